"""Is the split-KV path right for this attention call? (Whether it is *faster* is ``plan``'s question.)

``admit`` looks only at facts that decide correctness: shapes, dtypes, mask, architecture. It never looks at
lengths or speed, so its answer holds for every replay of a captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

MLA_LATENT_DIM = 576
MLA_VALUE_DIM = 512
MAX_TOKENS = 8
MAX_BATCH = 4096
GQA_HEAD_DIMS = (64, 96, 128, 192, 256)
KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Kind = Literal["mla", "gqa"]
MaskLayout = Literal["none", "qlen", "full"]


@dataclass(frozen=True)
class AttentionRequest:
    """Everything about one attention call that is fixed before its lengths are known.

    ``tokens`` is the number of query rows of every request (1 for decode, the draft width for verify).
    ``capability`` is the CUDA compute capability, ``(0, 0)`` for a CPU run under Triton's interpreter.
    ``draft_step`` is set for the decode of a chain draft, whose graph is part of the cycle's.
    """

    kind: Kind
    batch: int
    tokens: int
    q_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    capability: tuple[int, int]
    causal: bool = True
    mask: MaskLayout = "none"
    ragged: bool = False
    sliding_window: int = -1
    sinks: bool = False
    score_mod: bool = False
    temperature_len: int = -1
    logit_cap: float = 0.0
    page_size: int = 1
    draft_step: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.q_heads // max(self.kv_heads, 1)

    @property
    def rows(self) -> int:
        """Query rows that read the same keys: draft tokens x heads of one key head."""
        return self.tokens * self.group


@dataclass(frozen=True)
class Admission:
    """``ok`` and a reason fit for a log line and a counter label."""

    ok: bool
    reason: str


def _refuse(reason: str) -> Admission:
    return Admission(False, reason)


def admit(request: AttentionRequest) -> Admission:
    """Decide whether the split-KV kernels compute this call correctly."""
    r = request
    if r.kind not in ("mla", "gqa"):
        return _refuse(f"unknown kind {r.kind!r}")
    if not 1 <= r.tokens <= MAX_TOKENS:
        return _refuse(f"{r.tokens} query tokens a request, limit {MAX_TOKENS}")
    if not 1 <= r.batch <= MAX_BATCH:
        return _refuse(f"batch {r.batch}, limit {MAX_BATCH}")
    if r.ragged:
        return _refuse("query rows differ between requests")
    if not r.causal:
        return _refuse("attention is not causal")
    if r.sliding_window >= 0:
        return _refuse("sliding window")
    if r.sinks:
        return _refuse("attention sinks")
    if r.score_mod:
        return _refuse("score modifier")
    if r.temperature_len > 0:
        return _refuse("position-dependent temperature")
    if r.logit_cap < 0:
        return _refuse(f"negative logit cap {r.logit_cap}")
    if r.q_dtype not in QUERY_DTYPES:
        return _refuse(f"query dtype {r.q_dtype}")
    if r.kv_dtype not in KV_DTYPES:
        return _refuse(f"KV dtype {r.kv_dtype}")
    if r.kv_dtype != torch.float8_e4m3fn and r.kv_dtype != r.q_dtype:
        return _refuse(f"KV dtype {r.kv_dtype} differs from query dtype {r.q_dtype}")
    if r.kv_heads < 1 or r.q_heads < 1 or r.q_heads % r.kv_heads:
        return _refuse(f"{r.q_heads} query heads over {r.kv_heads} key heads")
    if r.capability != (0, 0) and r.capability < (9, 0):
        return _refuse(f"compute capability {r.capability[0]}.{r.capability[1]}, needs 9.0")
    if r.kind == "mla":
        if r.kv_heads != 1:
            return _refuse(f"{r.kv_heads} latent heads, needs 1")
        if (r.qk_dim, r.v_dim) != (MLA_LATENT_DIM, MLA_VALUE_DIM):
            return _refuse(f"latent {r.qk_dim}/{r.v_dim}, needs {MLA_LATENT_DIM}/{MLA_VALUE_DIM}")
        if r.logit_cap:
            return _refuse("logit cap with a latent cache")
    else:
        if r.qk_dim != r.v_dim:
            return _refuse(f"key dim {r.qk_dim} differs from value dim {r.v_dim}")
        if r.qk_dim not in GQA_HEAD_DIMS:
            return _refuse(f"head size {r.qk_dim}, has {GQA_HEAD_DIMS}")
    return Admission(True, "admitted")


@dataclass(frozen=True)
class BackendFacts:
    """What keeps every call of one attention backend on the stock kernels.

    Attributes:
        context_parallel: the context of a decode is divided over ranks.
        deterministic: ``--enable-deterministic-inference``.
        window_pool: the cache keeps a pool of its own for sliding windows.
        window: keys that a layer looks back on, in tokens; None or 0 where it sees all of them.
        virtual_slots: the request table holds slots that the pool translates (unified memory pool).
        multi_layer_draft: a draft's backend with ``--enable-multi-layer-eagle``.
    """

    context_parallel: bool = False
    deterministic: bool = False
    window_pool: bool = False
    window: int | None = None
    virtual_slots: bool = False
    multi_layer_draft: bool = False


def admit_backend(facts: BackendFacts) -> Admission:
    """Decide whether any call of a backend may take the split-KV kernels."""
    for holds, reason in (
        (facts.context_parallel, "decode context parallelism"),
        (facts.deterministic, "deterministic inference"),
        (facts.window_pool, "sliding-window KV pool"),
        ((facts.window or 0) > 0, "sliding window"),
        (facts.virtual_slots, "unified memory pool (slots are virtual)"),
        (facts.multi_layer_draft, "multi-layer draft"),
    ):
        if holds:
            return _refuse(reason)
    return Admission(True, "admitted")


# Server arguments with which attention does not have the device to itself.
SHARED = {
    "enable_pdmux": "prefill and decode share out the multiprocessors (PD multiplexing)",
    "enable_two_batch_overlap": "another batch's communication runs beside attention (two-batch overlap)",
}


def admit_one_launch(server_args: Any) -> Admission:
    """Decide whether the one-launch kernel may be used on a server with these (upstream's) arguments.

    Its blocks wait for each other, so all must be resident. Under PD multiplexing a stream has only some of the
    multiprocessors; beside a kernel that waits for another rank, half of either grid could wait for the other for good.
    """
    for argument, reason in SHARED.items():
        if getattr(server_args, argument, False):
            return _refuse(reason)
    return Admission(True, "admitted")
