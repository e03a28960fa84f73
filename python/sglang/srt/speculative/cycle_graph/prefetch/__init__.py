"""The draft's next weights asked into the L2 cache while its small kernels leave the memory idle.

A pass of the draft is some 25 kernels; the large ones read weights at the memory's pace, the small ones between them wait
for one another. ``kernel`` asks for a range of memory and ends at once, ``plan`` says what is asked where, ``branch`` launches
it beside the pass under capture, ``start`` puts it around the captures. Nothing reads what is asked for, so no value can
change. Off unless ``SGLANG_SPEC_DRAFT_PREFETCH`` names megabytes. Page: docs/cycle-graph.md.
"""
