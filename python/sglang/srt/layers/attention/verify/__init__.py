"""Split-KV attention for the few query tokens of speculative verify, draft extend and decode.

``admission`` says whether a shape can be served, ``plan`` how (and whether it pays), ``mla`` and ``gqa``
launch it, ``workspace`` owns the scratch memory that captured graphs point at.
"""
