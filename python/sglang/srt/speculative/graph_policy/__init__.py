"""Which passes replay a CUDA graph, what that costs in memory, and what happens where none serves.

``reasons`` and ``sizes`` and ``room`` are pure; ``policy`` holds the choice of the process
(``--speculative-verify-graph``), ``capture`` what was captured, ``steps`` the counts; ``hooks`` is what patched
upstream methods call. Pages: docs/verify-graph.md.
"""
