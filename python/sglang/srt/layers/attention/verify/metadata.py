"""Entry points of the topic ``verify-metadata``: drop the per-step preparation that only the stock kernels read.

A graph whose attention calls were all served by the split-KV path reads the request table itself. Upstream's
index lists, query offsets, split counts and mask offsets (two to nine launches before each replay) are then dead
weight, and so is the tree mask of a chain, which causality already says.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.fork import counters
from sglang.srt.layers.attention.verify.calls import mode_of
from sglang.srt.layers.attention.verify.hooks import binding_of

Original = Callable[..., Any]

# Workers whose verify input at topk 1 is a plain chain: token t follows token t - 1.
CHAIN_ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "STANDALONE"})


def verifies_chains(backend: Any) -> bool:
    """Whether every target verify of this backend is causal, so that nobody needs to read a mask."""
    binding = binding_of(backend)
    if binding is None or binding.refusal is not None or backend.topk != 1:
        return False
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm in CHAIN_ALGORITHMS


def mask_is_read(stock: bool, backend: Any) -> bool:
    """For ``is_read`` of the verify mask: False shrinks it from max_batch x tokens x context bytes to tokens^2."""
    return stock and not verifies_chains(backend)


def _without_mask(spec_info: Any) -> Any:
    width = getattr(spec_info, "draft_token_num", None)
    return SimpleNamespace(custom_mask=None, draft_token_num=width)


def update_verify_buffers(
    original: Original, backend: Any, bs: int, seq_lens: Any, req_pool_indices: Any, spec_info: Any
) -> Any:
    """Around ``_update_target_verify_buffers``: the mask is no input of a chain, so it is not copied."""
    if verifies_chains(backend):
        spec_info = _without_mask(spec_info)
    return original(backend, bs, seq_lens, req_pool_indices, spec_info)


def build_graph_metadata(
    original: Original, backend: Any, bs: int, forward_mode: Any, spec_info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``_build_cuda_graph_forward_metadata``: a captured stock kernel goes by causality, not by the mask.

    It must not see the mask's buffer, which now has the small layout that it cannot read.
    """
    if forward_mode.is_target_verify() and verifies_chains(backend):
        spec_info = _without_mask(spec_info)
    return original(backend, bs, forward_mode, spec_info, *args, **kwargs)


def init_metadata(original: Original, backend: Any, forward_batch: Any) -> None:
    """Around ``init_forward_metadata``: the same for a stock kernel that runs eagerly."""
    original(backend, forward_batch)
    if forward_batch.forward_mode.is_target_verify() and verifies_chains(backend):
        backend.forward_metadata.custom_mask = None


def init_metadata_out_graph(
    original: Original, backend: Any, forward_batch: Any, in_capture: bool = False
) -> Any:
    """Around ``init_forward_metadata_out_graph``: before a replay, refill nothing that nothing reads."""
    if not in_capture and _unread([backend], forward_batch):
        return None
    return original(backend, forward_batch, in_capture=in_capture)


def init_multi_step_out_graph(
    original: Original, multi_step: Any, forward_batch: Any, in_capture: bool = False
) -> Any:
    """The same around ``TritonMultiStepDraftBackend``'s method, for all draft steps of the graph at once."""
    if not in_capture and _unread(multi_step.attn_backends, forward_batch):
        return None
    return original(multi_step, forward_batch, in_capture=in_capture)


def _unread(backends: list[Any], forward_batch: Any) -> bool:
    mode = mode_of(forward_batch.forward_mode, forward_batch.spec_info)
    if mode is None:
        return False
    batch = int(forward_batch.batch_size)
    for backend in backends:
        binding = binding_of(backend)
        if binding is None or not binding.fully_ours(mode, batch):
            return False
    counters.add("verify_metadata_skipped", mode=mode)
    return True
