"""Drive the backend the way upstream's runners do: eagerly, or as a captured graph with static buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import rig
import torch

MAX_BATCH = 4
DRAFT_STEPS = 3


@dataclass
class Setup:
    """One backend with its pool. ``decoder`` is the multi-step draft backend when ``mode`` needs one."""

    arch: rig.Arch
    mode: str
    tokens: int
    pool: rig.Pool
    runner: Any
    backend: Any
    generator: torch.Generator
    step: int = 0
    decoder: Any = None
    layer: Any = None
    static: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def bindings(self) -> list[Any]:
        """Bindings of every backend involved; empty where the topic is off."""
        backends = self.decoder.attn_backends if self.decoder is not None else [self.backend]
        found = [getattr(backend, "fork_verify_binding", None) for backend in backends]
        return [binding for binding in found if binding is not None]


def build(
    arch: rig.Arch, mode: str, server_args: Any, *, tokens: int = 3, step: int = 0, dtype: torch.dtype, seed: int = 0,
    scale: float = 1.0, page_size: int = 1, window: int | None = None, **layer: Any,
) -> Setup:  # fmt: skip
    """A fresh backend for ``mode`` (verify, draft_extend, decode or draft_decode)."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend, TritonMultiStepDraftBackend

    generator = torch.Generator().manual_seed(seed)
    pool = rig.Pool(arch, dtype, generator, scale)
    draft = mode.startswith("draft")
    runner = rig.model_runner(arch, pool, server_args, draft=draft, page_size=page_size)
    runner.sliding_window_size = window
    decoder = None
    if mode == "draft_decode":
        decoder = TritonMultiStepDraftBackend(runner, 1, DRAFT_STEPS)
        backend = decoder.attn_backends[step]
    else:
        backend = TritonAttnBackend(runner)
    width = 1 if mode.endswith("decode") else tokens
    attention = rig.attention_layer(arch, **layer)
    return Setup(arch, mode, width, pool, runner, backend, generator, step, decoder, attention)


def _spec_info(setup: Setup, prefixes: list[int]) -> Any:
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput

    if setup.mode == "verify":
        return rig.verify_input(setup.tokens, rig.chain_mask(prefixes, setup.tokens))
    if setup.mode == "draft_extend":
        return EagleDraftExtendInput(num_tokens_per_req=setup.tokens)
    return EagleDraftInput() if setup.mode == "draft_decode" else None


def _forward_mode(setup: Setup) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    names = dict(
        verify="TARGET_VERIFY", draft_extend="DRAFT_EXTEND_V2", decode="DECODE", draft_decode="DECODE"
    )
    return ForwardMode[names[setup.mode]]


def live_batch(setup: Setup, prefixes: list[int]) -> Any:
    """A forward batch of requests whose committed prefixes have these lengths, with its slots allocated."""
    batch, width, table = len(prefixes), setup.tokens, setup.runner.req_to_token_pool.req_to_token
    reach = setup.step + 1 if setup.mode == "draft_decode" else width
    rig.fill_table(table, [prefix + reach for prefix in prefixes], setup.generator)
    prefix = torch.tensor(prefixes, dtype=torch.int64)
    first = prefix + (setup.step if setup.mode == "draft_decode" else 0)
    rows = torch.arange(1, batch + 1)
    places = first[:, None] + torch.arange(width)
    grows = setup.mode in ("draft_extend", "decode")
    seq_lens = prefix + (width if grows else 0)
    return SimpleNamespace(
        batch_size=batch,
        forward_mode=_forward_mode(setup),
        req_pool_indices=rows,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.clone(),
        seq_lens_sum=int(seq_lens.sum()),
        positions=(places - (setup.step if setup.mode == "draft_decode" else 0)).flatten(),
        out_cache_loc=table[rows[:, None], places].flatten().to(torch.int64),
        spec_info=_spec_info(setup, prefixes),
        extend_prefix_lens=prefix,
        extend_prefix_lens_cpu=prefixes,
        extend_seq_lens=torch.full((batch,), width, dtype=torch.int32),
        extend_seq_lens_cpu=[width] * batch,
        encoder_lens=None,
    )


@dataclass(frozen=True)
class Inputs:
    """q [rows, heads * qk_dim]; k, v [rows, kv_heads, dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def inputs(setup: Setup, batch: int) -> Inputs:
    """Random query, key and value rows for ``batch`` requests."""
    arch, rows, dtype = setup.arch, batch * setup.tokens, setup.pool.dtype
    q = torch.randn(rows, arch.q_heads * arch.qk_dim, generator=setup.generator).to(dtype)
    k = torch.randn(rows, arch.kv_heads, arch.qk_dim, generator=setup.generator).to(dtype)
    if arch.mla:
        return Inputs(q, k, k[..., : arch.v_dim].contiguous())
    return Inputs(q, k, torch.randn(rows, arch.kv_heads, arch.v_dim, generator=setup.generator).to(dtype))


def attend(setup: Setup, batch: Any, given: Inputs, **extra: Any) -> torch.Tensor:
    """One attention layer on ``batch``: what the model's layer would call. Returns [rows, heads * v_dim].

    The worker advances ``positions`` on the device from draft step to draft step, after metadata was made.
    """
    decode = setup.mode.endswith("decode")
    method = setup.backend.forward_decode if decode else setup.backend.forward_extend
    batch.positions.add_(setup.step)
    try:
        out: torch.Tensor = method(given.q, given.k.clone(), given.v.clone(), setup.layer, batch, **extra)
    finally:
        batch.positions.sub_(setup.step)
    return out.clone()


def eager(setup: Setup, batch: Any, given: Inputs, **extra: Any) -> torch.Tensor:
    """Metadata and one layer, without graphs."""
    (setup.decoder or setup.backend).init_forward_metadata(batch)
    return attend(setup, batch, given, **extra)


def stock(setup: Setup, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the stock kernel gives for ``run`` from the same pool contents, which are put back afterwards."""
    keys, values = setup.pool.keys.clone(), setup.pool.values.clone()
    for binding in setup.bindings:
        binding.refusal = "comparison with the stock path"
    try:
        return run()
    finally:
        for binding in setup.bindings:
            binding.refusal = None
        setup.pool.keys.copy_(keys)
        setup.pool.values.copy_(values)


class Graph:
    """A captured batch size: static buffers, and a closure that stands for the graph's kernels.

    Capturing on a GPU freezes the tensors that the closure reads; on a CPU calling the same closure again with the
    same tensor objects has the same meaning, so stale or wrong static buffers show up here too.
    """

    def __init__(self, setup: Setup, size: int, *, mixed: bool = False) -> None:
        self.setup, self.size, self.mixed = setup, size, mixed
        rows = size * setup.tokens
        live = live_batch(setup, [1] * size)
        self.static = SimpleNamespace(
            seq_lens=torch.ones(size, dtype=torch.int64),
            req_pool_indices=torch.zeros(size, dtype=torch.int64),
            positions=torch.zeros(rows, dtype=torch.int64),
            out_cache_loc=torch.zeros(rows, dtype=torch.int64),
        )
        self.given = inputs(setup, size)
        self.batch = SimpleNamespace(**(vars(live) | vars(self.static) | {"batch_size": size}))
        target = setup.decoder or setup.backend
        target.init_cuda_graph_state(size, rows)
        target.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.run()
        self.metadata = setup.backend.forward_metadata

    def run(self) -> torch.Tensor:
        """All attention calls of the graph; of several draft steps, the one under test is returned."""
        if self.mixed:
            # A layer that stays on the stock kernel needs upstream's metadata at every replay.
            kept = stock(self.setup, lambda: attend(self.setup, self.batch, self.given))
            attend(self.setup, self.batch, self.given)
            return kept
        if self.setup.decoder is None:
            return attend(self.setup, self.batch, self.given)
        outputs = []
        for step, backend in enumerate(self.setup.decoder.attn_backends):
            outputs.append(attend(replace(self.setup, backend=backend, step=step), self.batch, self.given))
        return outputs[self.setup.step]

    def replay(self, batch: Any, given: Inputs) -> torch.Tensor:
        """Copy a live batch in, pad the rest as upstream's runners do, refresh metadata, run the closure."""
        live, rows = batch.batch_size, batch.batch_size * self.setup.tokens
        buffers = self.static
        buffers.seq_lens.fill_(self.setup.backend.get_cuda_graph_seq_len_fill_value())
        for name in ("req_pool_indices", "positions", "out_cache_loc"):
            getattr(buffers, name).zero_()
        buffers.seq_lens[:live] = batch.seq_lens
        buffers.req_pool_indices[:live] = batch.req_pool_indices
        buffers.positions[:rows] = batch.positions
        buffers.out_cache_loc[:rows] = batch.out_cache_loc
        for name in ("q", "k", "v"):
            getattr(self.given, name)[:rows] = getattr(given, name)
        spec_info = batch.spec_info
        if self.setup.mode == "draft_extend":
            spec_info.extend_seq_lens_tensor = torch.full((self.size,), self.setup.tokens, dtype=torch.int32)
        view = SimpleNamespace(
            **(vars(batch) | vars(buffers) | {"batch_size": self.size, "spec_info": spec_info})
        )
        view.seq_lens_sum = None
        target = self.setup.decoder or self.setup.backend
        target.init_forward_metadata_out_graph(view)
        self.setup.backend.forward_metadata = self.metadata
        return self.run()[:rows]
