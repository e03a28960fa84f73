"""Request semantics when a step commits a run of several tokens.

Everything here answers one question: what would plain decoding have done with these tokens, one at a time?
Each module holds one concept as plain functions over lists or tensors (``run_end``, ``penalty_rows``,
``row_history`` ...); ``*_hooks`` modules connect them to upstream objects and are the only ones that
patched upstream lines name.

Vocabulary used throughout:

* *run*: the tokens that one verify step commits for one request, 1 to ``T`` of them;
* *row*: one position of the verify batch; request ``i`` owns rows ``i * T`` to ``i * T + T - 1``;
* *bonus*: the last committed token of the previous step. It is candidate 0 of every verify, and row 0 is the
  distribution of the token that follows it.
"""
