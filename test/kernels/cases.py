"""The cases of the kernels as data; lengths include the new tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from paged import Case

LENGTHS = (3, 4, 5, 61, 63, 64, 65, 66, 67, 127, 131)

# Small enough for an interpreter: each runs in about a second.
SMALL = (
    Case("mla-lengths", lengths=LENGTHS),
    Case("mla-b5-short-prefixes-and-padding", lengths=(3, 4, 5, 0, 67)),
    Case("mla-b1-batch-2", lengths=(3, 68)),
    Case("mla-decode-lengths", tokens=1, lengths=(1, 2, 63, 64, 65, 0, 97)),
    *(Case(f"mla-tokens-{t}", tokens=t, lengths=(t, t + 64)) for t in (2, 4, 5, 6, 7, 8)),
    Case("mla-heads-16", heads=16, lengths=(66,)),
    Case("mla-heads-64", heads=64, tokens=1, lengths=(66,)),
    Case("mla-heads-128", heads=128, tokens=1, lengths=(33,)),
    Case("mla-include-new", include_new=True, lengths=(1, 2, 3, 70)),
    Case("mla-kv-indices", indices=True, lengths=(70, 9)),
    Case("mla-page-16", page=16, lengths=(70, 33)),
    Case("mla-page-64", page=64, lengths=(70, 5)),
    Case("mla-tree-qlen", mask="qlen", tokens=4, lengths=(70, 9)),
    Case("mla-tree-full", mask="full", tokens=4, lengths=(70, 9)),
    *(Case(f"mla-b13-x{x}", scale=float(x), lengths=(97,)) for x in (1, 8, 50)),
    *(
        Case(f"mla-b16-fp8-k{k}", fp8=True, k_scale=k, dtype=torch.float16, lengths=(67, 5))
        for k in (0.5, 1.0, 2.0)
    ),
    Case("mla-fp16", dtype=torch.float16, lengths=(97,)),
    *(
        Case(f"gqa-{d}", kind="gqa", heads=8, kv_heads=2, dim=d, lengths=(70, 5))
        for d in (64, 96, 128, 192, 256)
    ),
    Case("mha", kind="gqa", heads=4, kv_heads=4, lengths=(70, 5, 0)),
    Case("mqa-decode", kind="gqa", heads=8, kv_heads=1, tokens=1, lengths=(70, 1)),
    Case("gqa-cap", kind="gqa", heads=8, kv_heads=2, dim=64, logit_cap=3.0, lengths=(70,)),
    Case("gqa-tree", kind="gqa", heads=8, kv_heads=2, dim=64, mask="qlen", tokens=4, lengths=(70, 9)),
    Case(
        "gqa-fp8", kind="gqa", heads=8, kv_heads=2, dim=64, fp8=True, k_scale=0.5, v_scale=2.0, lengths=(70,)
    ),
    Case("gqa-tokens-8", kind="gqa", heads=8, kv_heads=2, dim=64, tokens=8, lengths=(8, 70)),
)


def _gpu(case: Case) -> Case:
    return replace(case, dtype=torch.bfloat16)


PRIMES = (1009, 4099, 16411)
# On a device: the small ones in bf16, and what is long.
DEVICE = (
    *(_gpu(c) for c in SMALL if not c.name.startswith("mla-fp16")),
    *(
        Case(f"mla-h{h}-t{t}", heads=h, tokens=t, dtype=torch.bfloat16, lengths=(PRIMES[0], t, 65))
        for h in (8, 16, 64, 128)
        for t in range(1, 9)
    ),
    *(
        Case(
            f"mla-fp8-h{h}-t{t}",
            fp8=True,
            k_scale=0.5,
            heads=h,
            tokens=t,
            dtype=torch.bfloat16,
            lengths=(PRIMES[0], t),
        )
        for h in (8, 16, 64, 128)
        for t in (1, 3, 8)
    ),
    Case("mla-primes", dtype=torch.bfloat16, lengths=PRIMES),
    Case("mla-mixed-100x", dtype=torch.bfloat16, lengths=(16411, 163, 3, 0, 1031)),
    Case("mla-131072", dtype=torch.bfloat16, lengths=(131072,)),
    Case("mla-131072-decode", dtype=torch.bfloat16, tokens=1, lengths=(131072,)),
    Case("mla-131072-fp8", dtype=torch.bfloat16, fp8=True, k_scale=2.0, lengths=(131072,)),
    Case("mla-batch-64", dtype=torch.bfloat16, lengths=tuple(3 + 37 * i for i in range(64))),
    Case("gqa-draft-8x128", kind="gqa", heads=8, kv_heads=8, dtype=torch.bfloat16, lengths=(4099, 67)),
    Case("gqa-llama-64-8", kind="gqa", heads=64, kv_heads=8, dtype=torch.bfloat16, lengths=(4099, 67)),
    Case("gqa-131072", kind="gqa", heads=8, kv_heads=1, dtype=torch.bfloat16, lengths=(131072,)),
    *(Case(f"mla-b13-long-x{x}", scale=float(x), dtype=torch.bfloat16, lengths=(4099,)) for x in (1, 8, 50)),
)
