"""Plain decode beside speculation: the switch that keeps speculation where it pays.

``controller`` and ``cells`` decide (pure), ``admission`` says where the switch may work, ``rows`` and ``catch_up``
keep the draft's KV whole, ``plain`` is the plain decode step, ``graphs`` its capture, ``runtime`` ties them to a
worker, ``hooks`` is what patched upstream functions call. Page: docs/verify-graph.md.
"""
