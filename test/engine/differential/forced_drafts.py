"""Test-only plugin for the server process: draft tokens that the test dictates.

A request says in ``custom_params`` what plain decoding answered (``script``: token ids) and a number
(``script_seed``). In front of each verify the drafts of such a request are overwritten: 0, 1 or 2 of them are
the script's next tokens, the first of the others is wrong on purpose. So runs of 1, 2 and 3 all occur, in a
pattern that the seed and the position fix, whatever the real draft believes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

ENTRY = "forced_drafts"
MARK = "forced drafts are active"


def scripted(script: list[int], seed: int, produced: int, drafts: int, vocabulary: int) -> list[int]:
    """The drafts behind output token ``produced``.

    Args:
        script: the whole output that is expected.
        seed: together with the position decides how many drafts are right.
        produced: output tokens committed so far, the bonus included.
        drafts: how many draft tokens a verify has.
        vocabulary: wrong tokens are taken from this range.
    """
    right = (seed * 7919 + produced * 104_729 + (produced >> 3)) % (drafts + 1)
    chain = []
    for place in range(drafts):
        at = produced + place
        expected = script[at] if at < len(script) else (seed + at) % vocabulary
        chain.append(expected if place < right else (expected + 1 + place) % vocabulary)
    return chain


def force(batch: Any) -> None:
    """Overwrite the drafts of scripted requests in a verify that is about to run."""
    verify_input = batch.spec_info
    rows = verify_input.draft_token_num
    chains = verify_input.draft_token.view(-1, rows)
    for index, request in enumerate(batch.reqs):
        parameters = request.sampling_params.custom_params or {}
        script = parameters.get("script")
        if script is not None:
            chain = scripted(
                script, parameters["script_seed"], len(request.output_ids), rows - 1, request.vocab_size
            )
            chains[index, 1:] = chains.new_tensor(chain)


def activate() -> None:
    """Entry point: wrap the verify of the worker."""
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    original = EAGLEWorkerV2.verify

    def verify(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not batch.forward_mode.is_idle():
            force(batch)
        return original(self, batch, *args, **kwargs)

    EAGLEWorkerV2.verify = verify
    print(MARK, os.getpid(), file=sys.stderr, flush=True)
