"""Which attention calls of a forward pass the split-KV path knows, and where their keys lie.

A call is served from the request table on the device (``req_to_token``, ``req_pool_indices`` and one length a
request), so nothing has to be built on the host between replays of a captured graph. What differs between the
kinds of call is only which tensor holds the length and whether it counts the new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.layers.attention.verify.context import KVContext

Mode = Literal["verify", "draft_extend", "decode", "draft_decode"]


@dataclass(frozen=True)
class Call:
    """One attention call: ``tokens`` query rows for each of ``batch`` requests, keys found by ``context``."""

    mode: Mode
    batch: int
    tokens: int
    context: KVContext


@dataclass(frozen=True)
class Refusal:
    """Why a call of ``mode`` stays on the stock kernel. ``reason`` never contains a varying number."""

    mode: str
    reason: str
    detail: str = ""


def mode_of(forward_mode: Any, spec_info: Any) -> Mode | None:
    """The kind of call, or None for prefill and idle passes, which are none of this path's business."""
    if forward_mode.is_target_verify():
        return "verify"
    if forward_mode.is_draft_extend_v2():
        return "draft_extend"
    if forward_mode.is_decode():
        return "decode" if spec_info is None else "draft_decode"
    return None


def _kind(spec_info: Any) -> str:
    return str(getattr(getattr(spec_info, "spec_input_type", None), "name", type(spec_info).__name__))


def _verify(spec_info: Any) -> int | str:
    kind = _kind(spec_info)
    if kind != "EAGLE_VERIFY":
        return f"verify input {kind} is not known to be a causal chain"
    if spec_info.topk != 1:
        return "draft tree (topk above 1)"
    if getattr(spec_info, "ragged_verify_layout", None) is not None:
        return "verify widths differ between requests"
    return int(spec_info.draft_token_num)


def _draft_extend(spec_info: Any, lens: Any) -> int | str:
    kind = _kind(spec_info)
    if kind != "EAGLE_DRAFT_EXTEND":
        return f"draft extend input {kind}"
    if spec_info.num_front_tokens:
        return "draft extend window is widened in front"
    width = int(spec_info.num_tokens_per_req)
    if lens is not None and any(int(n) != width for n in lens):
        return "draft extend widths differ between requests"
    return width


def _draft_decode(spec_info: Any, topk: int, step: int | None) -> int | str:
    kind = _kind(spec_info)
    if kind != "EAGLE_DRAFT":
        return f"draft input {kind}"
    if step is None:
        return "draft decode outside the multi-step draft backend"
    return 1 if topk == 1 else "draft tree (topk above 1)"


def locate(
    forward_batch: Any, req_to_token: Any, rows: int, *, topk: int, draft_step: int | None
) -> Call | Refusal | None:
    """Describe the attention call that ``forward_batch`` makes with ``rows`` query rows.

    ``topk`` and ``draft_step`` belong to the backend that serves the call: the width of the draft tree, and its
    place in the multi-step draft backend (None elsewhere). Returns None for passes outside this path's scope.

    Lengths: verify counts the prefix only and draft extend the prefix plus its rows, both in ``seq_lens``. A
    draft step's key count is its row's position plus one; upstream advances ``positions`` on the device from
    step to step (inside the captured graph), while ``seq_lens`` stays at the prefix.
    """
    spec_info = forward_batch.spec_info
    mode = mode_of(forward_batch.forward_mode, spec_info)
    if mode is None or rows == 0:
        return None
    lengths, includes_new = forward_batch.seq_lens, True
    width: int | str = 1
    if mode == "verify":
        width, includes_new = _verify(spec_info), False
    elif mode == "draft_extend":
        width = _draft_extend(spec_info, getattr(forward_batch, "extend_seq_lens_cpu", None))
    elif mode == "draft_decode":
        width = _draft_decode(spec_info, topk, draft_step)
        lengths, includes_new = forward_batch.positions, False
    if isinstance(width, str):
        return Refusal(mode, width)
    batch = int(forward_batch.batch_size)
    if batch * width != rows:
        return Refusal(
            mode,
            "query rows are not batch x tokens",
            f"{rows} rows, {batch} requests x {width} tokens; the batch was padded after it was planned",
        )
    if lengths.shape[0] != batch or forward_batch.req_pool_indices.shape[0] != batch:
        return Refusal(
            mode,
            "lengths or request indices do not match the batch",
            f"{lengths.shape[0]} lengths, {forward_batch.req_pool_indices.shape[0]} indices, batch {batch}",
        )
    context = KVContext(
        seq_lens=lengths,
        lens_include_new=includes_new,
        req_to_token=req_to_token,
        req_pool_indices=forward_batch.req_pool_indices,
    )
    return Call(mode, batch, width, context)
