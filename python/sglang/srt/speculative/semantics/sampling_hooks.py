"""Topic ``run-sampling``: sampled requests are sampled in verify as in plain decoding, on every device.

Upstream takes the argmax of every row on some devices whatever the temperature, and elsewhere leaves out
``min_p`` and renormalises between top-k and top-p where plain decoding does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from sglang.fork import fallbacks
from sglang.srt.speculative.sampling.hooks import rejection_verify, usable_proposal
from sglang.srt.speculative.semantics.row_bias import apply_bias
from sglang.srt.speculative.semantics.row_sampling import draw_rows, per_row

_PATH = "run-sampling"


def verify(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None
) -> Any:
    """Around the verify's sampler: draw each row, then accept along the draws; greedy batches stay upstream's."""
    info = batch.sampling_info
    if batch.forward_mode.is_idle() or info.is_all_greedy:
        return original(verify_input, batch, logits_output, grammar_mask)
    reason = _declined(logits_output.next_token_logits.device.type)
    if reason is not None:
        fallbacks.record(_PATH, reason)
        return original(verify_input, batch, logits_output, grammar_mask)

    logits = logits_output.next_token_logits
    rows = verify_input.draft_token_num
    _apply_shared_penalties(logits, info, rows)
    apply_bias(logits, info, rows, grammar_mask)
    parameters = per_row(info, rows)
    if _rejection_asked_for() and usable_proposal(
        verify_input, logits.shape[-1], info.sampling_seed is not None
    ):
        return rejection_verify(verify_input, logits, parameters)
    drawn = draw_rows(logits, parameters, verify_input.positions, _sampler())
    _agree_across_ranks(drawn)
    return accept_along(verify_input, drawn.reshape(-1, rows))


def accept_along(verify_input: Any, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree along the draws ``[B, T]``: (predicted ids ``[B * T]``, accepted lengths, accepted rows)."""
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

    batch, rows = drawn.shape
    device = drawn.device
    predicted, accepted, drafts = verify_tree_greedy_func(
        predicts=torch.zeros(batch * rows, dtype=torch.int32, device=device),
        accept_index=torch.full((batch, verify_input.max_tree_depth), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty(batch, dtype=torch.int32, device=device),
        topk=verify_input.tree_topk,
        target_predict=drawn,
        candidates=verify_input.draft_token.reshape(batch, rows),
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_index=verify_input.retrieve_index,
    )
    return predicted, drafts + 1, accepted


def _rejection_asked_for() -> bool:
    """Whether drafts shall be accepted by rejection; only the CPU gets this far with that flag on."""
    from sglang.srt.runtime_context import get_spec

    return bool(get_spec().speculative_use_rejection_sampling)


def _declined(device: str) -> str | None:
    """Why this step goes to upstream's sampler, or None: settings that ask for another rule keep it."""
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    settings = get_spec()
    if SIMULATE_ACC_LEN > 0:
        return "accept length is simulated"
    if device == "cpu":
        # Upstream has no other sampled verify here than the argmax.
        return None
    if settings.speculative_use_rejection_sampling:
        return "rejection sampling was asked for"
    if (
        settings.speculative_accept_threshold_single != 1.0
        or settings.speculative_accept_threshold_acc != 1.0
    ):
        return "a relaxed acceptance threshold was asked for"
    return None


def _apply_shared_penalties(logits: torch.Tensor, info: Any, rows: int) -> None:
    """Upstream's one-for-all-rows penalties; nothing is left of them when ``run-penalties`` is on."""
    view = logits.view(-1, rows, logits.shape[-1])
    if info.acc_additive_penalties is not None:
        view.add_(info.acc_additive_penalties.unsqueeze(1))
    if info.acc_scaling_penalties is not None:
        factor = info.acc_scaling_penalties.unsqueeze(1)
        view.copy_(torch.where(view < 0, view * factor, view / factor))


@lru_cache(maxsize=1)
def _sampler() -> Any:
    from sglang.srt.layers.sampler import create_sampler

    return create_sampler()


def _agree_across_ranks(drawn: torch.Tensor) -> None:
    """All ranks take the draws of the first: their logits may differ in the last bit."""
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().attn_tp_group if is_dp_attention_enabled() else get_tp_group()
    if group.world_size > 1:
        group.broadcast(drawn, src=0)
