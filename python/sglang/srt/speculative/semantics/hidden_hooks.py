"""Topic ``run-hidden-states``: ``return_hidden_states`` gives the last layer's states under EAGLE-3 too.

For the draft, an EAGLE-3 target stores the packed states of its auxiliary layers where plain decoding stores
those of the last layer, and upstream hands the former to the client: another width and another meaning.

The packed tensor carries a reference to the last layer's. Upstream makes a new tensor of it at three places, and at
each the reference is carried over: behind a graph of verify, behind a graph of prefill, and where the accepted path
of a tree moves to the front.
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


def replayed(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the replay of a target's graph, which slices the captured states to the live rows.

    The last layer's rows are copied: the draft's graphs replay before the client's copy is made, and share the
    memory pool.
    """
    output = original(runner, *args, **kwargs)
    hidden = getattr(output, "hidden_states", None)
    if hidden is None or not _may_return():
        return output
    captured = getattr(runner.backend, "_outputs", {}).get(runner._replay_graph_key)
    final = getattr(getattr(captured, "hidden_states", None), _FINAL, None)
    if final is not None:
        setattr(hidden, _FINAL, final[: hidden.shape[0]].clone())
    elif hidden.shape[-1] != runner.model_runner.model_config.hidden_size:
        fallbacks.record(_PATH, "the graph's output does not name its last layer")
    return output


def trimmed(original: Callable[..., Any], runner: Any, output: Any) -> Any:
    """Around the cut of a prefill graph's output to the live rows."""
    result = original(runner, output)
    final = getattr(output.hidden_states, _FINAL, None)
    if final is not None:
        setattr(result.hidden_states, _FINAL, final[: result.hidden_states.shape[0]])
    return result


def moved(
    original: Callable[..., torch.Tensor], rows: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Around the move of a tree's accepted rows to the front of each request's block."""
    front = original(rows, *args, **kwargs)
    final = getattr(rows, _FINAL, None)
    if final is not None:
        setattr(front, _FINAL, original(final, *args, **kwargs))
    return front


def _may_return() -> bool:
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args().enable_return_hidden_states)
