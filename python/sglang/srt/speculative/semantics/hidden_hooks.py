"""Topic ``run-hidden-states``: ``return_hidden_states`` gives the last layer's states under EAGLE-3 too.

For the draft, an EAGLE-3 target stores the packed states of its auxiliary layers where plain decoding stores
those of the last layer, and upstream hands the former to the client: another width and another meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.fork import fallbacks

_FINAL = "run_final_states"
_PATH = "run-hidden-states"


def keep_final(
    original: Callable[..., Any], processor: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Around the choice of what to store: the packed states keep a reference to the last layer's.

    Only servers that may return hidden states do so, others free the tensor as early as upstream does.
    """
    stored = original(processor, hidden_states, *args, **kwargs)
    if stored is not None and stored.shape[-1] != hidden_states.shape[-1] and _may_return():
        if stored.shape[0] == hidden_states.shape[0]:
            setattr(stored, _FINAL, hidden_states)
        else:
            fallbacks.record(_PATH, "states of the last token only")
    return stored


def to_host(
    original: Callable[..., None], result: Any, return_logprob: bool, return_hidden_states: bool = True
) -> None:
    """Around the copy of a step's results to the host, after the draft has used the packed states."""
    output = result.logits_output
    if return_hidden_states and output is not None and output.hidden_states is not None:
        final = getattr(output.hidden_states, _FINAL, None)
        if final is not None:
            output.hidden_states = final
    original(result, return_logprob, return_hidden_states)


def _may_return() -> bool:
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args().enable_return_hidden_states)
