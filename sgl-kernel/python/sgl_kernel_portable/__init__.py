"""CPU implementations of the sgl_kernel ops that speculative decoding needs.

Everything here is PyTorch and NumPy: no compiler and no driver is needed. The package is installed in
`sys.modules` as `sgl_kernel` only where the compiled one cannot be used (see `sglang.srt.cpu_engine`).

It must never define `torch.ops.sgl_kernel.convert_weight_packed`: the mere presence of that op tells upstream
that AMX kernels exist, and every layer would then call ops that are not there.
"""

from __future__ import annotations

from typing import Any

from sgl_kernel_portable.accepted_tokens import (
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel_portable.cache_locations import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
)
from sgl_kernel_portable.draft_tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from sgl_kernel_portable.kv_copy import copy_all_layer_kv_cache_cpu
from sgl_kernel_portable.unavailable import unavailable_op

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

__version__ = "0+portable"


def __getattr__(name: str) -> Any:
    """Give any other public name a function that refuses to run, so that importing it succeeds."""
    if name.startswith("_"):
        raise AttributeError(name)
    return unavailable_op(name)
