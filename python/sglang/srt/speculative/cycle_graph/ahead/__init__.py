"""The draft's projection of the packed states, begun inside verify as soon as the last of them is known.

Draft extend starts by projecting what three layers of the target left behind, and most of that time is reading one
large weight. The states are known some layers before the target's end, whose small kernels leave most of the memory's
bandwidth idle, so the product is made there on a stream of its own. ``projection`` says what a draft computes,
``kernel`` computes it beside other kernels, ``branch`` forks and joins, ``graphs`` captures a draft extend that starts
from the result, ``start`` ties them to a scheduler. Off unless ``SGLANG_SPEC_PROJECT_AHEAD`` names a number of thread
blocks. Page: docs/cycle-graph.md.
"""
