"""Attention of verify and decode, one kernel call at a time: the fork, upstream's kernels and flashinfer's MLA.

Every case lays the cache out as a model does: one pool a layer, all layers under the same slots, the slots of
a request in random order. ``in_loop`` times a graph that walks over enough layers that no layer's cache is
still in L2 when its turn comes again; lengths and tables stay warm, as in a model. ``cold`` puts a flush of L2
before every call and subtracts the time of the flushes alone. Times are medians over graph replays.

    python benchmark/bench_attention.py --out benchmark/results/attention_h200.json

``--backends fork one-launch two-launches`` compares the fork's own two paths.

Bytes count every cached key once, whatever a kernel reads. The share is of a device-to-device copy measured in
the same process (bytes read plus bytes written).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from sglang.bench_verify.environment import capture
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.srt.layers.attention.verify.admission import AttentionRequest
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.mla import mla_attention
from sglang.srt.layers.attention.verify.plan import device_traits, make_plan
from sglang.srt.layers.attention.verify.table import Fused
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
BATCHES = (1, 4, 8, 32)
TOKENS = (3, 1)
LATENT, VALUE, HEADS = 576, 512, 8
L2_BYTES = 64 * 2**20
SM_SCALE = 0.1352337788608801 / 2
# Upstream's serial verify kernel takes milliseconds: beyond this many keys a call it is not worth the time.
SERIAL_KEYS = 8 * 65536

Call = Callable[[int], None]


@dataclass(frozen=True)
class Case:
    """Shape of one measurement; ``context`` is the length before the new tokens."""

    tokens: int
    batch: int
    context: int
    fp8: bool


class Setup:
    """Tensors of one case: ``pools`` [layers, slots, 1, 576], one request table for all layers."""

    def __init__(self, case: Case, device: str, budget_bytes: int) -> None:
        self.case, self.device = case, device
        self.length = case.context + case.tokens
        self.width = 1 if case.fp8 else 2
        need = case.batch * self.length
        slots = max(need + need // 4, 1024)
        layer = slots * LATENT * self.width
        used = need * LATENT * self.width
        layers = max(2, min(-(-2 * L2_BYTES // used), budget_bytes // layer, 160))
        self.layers = int(layers)
        gen = torch.Generator(device=device).manual_seed(17)
        self.pools = torch.empty(self.layers, slots, 1, LATENT, dtype=torch.bfloat16, device=device)
        for pool in self.pools:
            pool.normal_(generator=gen)
        if case.fp8:
            self.pools = torch.stack([p.to(torch.float8_e4m3fn).view(torch.uint8) for p in self.pools])
            self.pools = self.pools.view(torch.float8_e4m3fn)
        order = torch.randperm(slots, generator=gen, device=device)[:need]
        self.table = order.view(case.batch, self.length).to(torch.int32).contiguous()
        rows = case.batch * case.tokens
        self.q = torch.randn(rows, HEADS, LATENT, device=device, generator=gen).to(torch.bfloat16)
        self.out = torch.empty(rows, HEADS, VALUE, dtype=torch.bfloat16, device=device)
        self.bytes = case.batch * self.length * LATENT * self.width


def fork_call(setup: Setup, fused: Fused | None = None) -> tuple[Call, str]:
    """The product; ``prefix`` lengths for verify, full lengths for decode, as the backend passes them.

    ``fused`` forces one launch ("always") or two ("no") where policy would choose.
    """
    case = setup.case
    traits = device_traits()
    if fused is not None:
        traits = replace(traits, fused=fused)
    request = AttentionRequest(
        kind="mla",
        batch=case.batch,
        tokens=case.tokens,
        q_heads=HEADS,
        kv_heads=1,
        qk_dim=LATENT,
        v_dim=VALUE,
        q_dtype=torch.bfloat16,
        kv_dtype=setup.pools.dtype,
        capability=traits.capability,
    )
    plan = make_plan(request, traits, setup.length)
    space = VerifyWorkspace.for_plans([plan], setup.device)
    decode = case.tokens == 1
    lens = torch.full((case.batch,), setup.length if decode else case.context, device=setup.device)
    context = KVContext(
        seq_lens=lens,
        lens_include_new=decode,
        req_to_token=setup.table,
        req_pool_indices=torch.arange(case.batch, device=setup.device),
    )

    def call(layer: int) -> None:
        mla_attention(
            setup.q, setup.pools[layer], setup.out, context, plan=plan, workspace=space, sm_scale=SM_SCALE
        )

    return call, plan.reason


def upstream_verify_call(setup: Setup) -> tuple[Call, str]:
    """The prefill kernel that upstream's Triton backend uses for verify: prefix from the pool, chain beside it."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    case = setup.case
    bs, t = case.batch, case.tokens
    qo = torch.arange(0, bs * t + 1, t, dtype=torch.int32, device=setup.device)
    kv = torch.arange(0, bs * case.context + 1, case.context, dtype=torch.int32, device=setup.device)
    indices = setup.table[:, : case.context].reshape(-1).to(torch.int64)
    new = setup.table[:, case.context :].reshape(-1).long()
    chain = setup.pools[0].view(torch.uint8)[new].view(setup.pools.dtype).to(torch.bfloat16).contiguous()
    value = chain[..., :VALUE].contiguous()

    def call(layer: int) -> None:
        pool = setup.pools[layer]
        extend_attention_fwd(
            setup.q, chain, value, setup.out, pool, pool[..., :VALUE], qo, kv, indices,
            None, True, None, t, 1.0, 1.0, sm_scale=SM_SCALE,
        )  # fmt: skip

    return call, "extend_attention_fwd"


def upstream_decode_call(setup: Setup) -> tuple[Call, str]:
    """Upstream's split decode kernel and its merge, with the split counts its backend would use."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    case = setup.case
    bs, device = case.batch, setup.device
    cores = device_traits().sm_count
    most = max(8, min(triton.next_power_of_2(cores), triton.next_power_of_2(-(-setup.length // 32))))
    kv = torch.arange(0, bs * setup.length + 1, setup.length, dtype=torch.int32, device=device)
    indices = setup.table.reshape(-1).to(torch.int64)
    logits = torch.empty(bs, HEADS, most, VALUE, dtype=torch.float32, device=device)
    lse = torch.empty(bs, HEADS, most, dtype=torch.float32, device=device)
    splits = torch.empty(bs, dtype=torch.int32, device=device)
    lens = torch.full((bs,), setup.length, dtype=torch.int64, device=device)
    get_num_kv_splits_triton[(1,)](splits, lens, bs, 1, HEADS, 1, most, cores, MAX_NUM_SEQ=256)

    def call(layer: int) -> None:
        pool = setup.pools[layer]
        decode_attention_fwd(
            setup.q, pool, pool[..., :VALUE], setup.out, kv, indices, logits, lse, splits, most,
            SM_SCALE, 1.0, 1.0, has_mla=True, use_pdl=True,
        )  # fmt: skip

    return call, f"decode_attention_fwd, at most {most} splits"


def flashinfer_call(setup: Setup) -> tuple[Call, str]:
    """flashinfer's paged MLA, planned once on the host outside the timing; bf16 only (it has no fp8 latent)."""
    import flashinfer

    case = setup.case
    bs, t, device = case.batch, case.tokens, setup.device
    space = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(space, backend="auto")
    wrapper.plan(
        torch.arange(0, bs * t + 1, t, dtype=torch.int32, device=device),
        torch.arange(0, bs * setup.length + 1, setup.length, dtype=torch.int32, device=device),
        setup.table.reshape(-1).contiguous(),
        torch.full((bs,), setup.length, dtype=torch.int32, device=device),
        HEADS, VALUE, LATENT - VALUE, 1, t > 1, SM_SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    nope = setup.q[..., :VALUE].contiguous()
    rope = setup.q[..., VALUE:].contiguous()

    def call(layer: int) -> None:
        pool = setup.pools[layer]
        wrapper.run(nope, rope, pool[..., :VALUE], pool[..., VALUE:], out=setup.out)

    return call, f"flashinfer {flashinfer.__version__} BatchMLAPagedAttentionWrapper"


def graph_of(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture ``body`` after one run of it outside."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def event() -> Any:
    """A CUDA event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """Device microseconds of each replay."""
    times = []
    for _ in range(2):
        graph.replay()
    for _ in range(repeats):
        begin, end = event(), event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


def in_loop_us(call: Call, layers: int, repeats: int) -> list[float]:
    """Microseconds a call, walking over all layers."""

    def body() -> None:
        for layer in range(layers):
            call(layer)

    return [t / layers for t in replay_us(graph_of(body), repeats)]


def cold_us(call: Call, layers: int, repeats: int, flush: torch.Tensor) -> list[float]:
    """Microseconds a call with L2 flushed before each, flushes subtracted."""
    count = min(layers, 8)

    def body(with_call: bool) -> None:
        for layer in range(count):
            flush.zero_()
            if with_call:
                call(layer)

    alone = sorted(replay_us(graph_of(lambda: body(False)), repeats))[repeats // 2]
    return [(t - alone) / count for t in replay_us(graph_of(lambda: body(True)), repeats)]


def copy_bandwidth() -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)

    # Not from a graph: there the copy becomes a node of the copy engine, which is slower than the kernel.
    times = []
    for _ in range(12):
        begin, end = event(), event()
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(2 * source.numel() / sorted(times)[6] / 1e6)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def backends(case: Case, wanted: Sequence[str]) -> dict[str, Callable[[Setup], tuple[Call, str]]]:
    """What can run ``case``, the fork first: the others' output is compared with its."""
    found: dict[str, Callable[[Setup], tuple[Call, str]]] = {
        "fork": fork_call,
        "one-launch": lambda setup: fork_call(setup, "always"),
        "two-launches": lambda setup: fork_call(setup, "no"),
    }
    if "upstream" in wanted:
        if case.tokens == 1:
            found["upstream"] = upstream_decode_call
        elif case.context * case.batch <= SERIAL_KEYS:
            found["upstream"] = upstream_verify_call
    if "flashinfer" in wanted and not case.fp8:
        found["flashinfer"] = flashinfer_call
    return {name: make for name, make in found.items() if name in wanted}


def measure(case: Case, args: argparse.Namespace, copy: float, flush: torch.Tensor, results: Results) -> None:
    """All backends on one case; appends rows and prints a line each."""
    setup = Setup(case, "cuda", args.budget_gib * 2**30)
    reference: torch.Tensor | None = None
    for name, make in backends(case, args.backends).items():
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        facts: dict[str, Any] = asdict(case) | {"backend": name, "kv": "fp8" if case.fp8 else "bf16"}
        del facts["fp8"]
        try:
            call, how = make(setup)
            call(0)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name} {case}: {error!r:.300}", flush=True)
            continue
        result = setup.out.clone()
        reference = result if reference is None else reference
        difference = relative_error(result, reference)
        begin = time.perf_counter()
        call(0)
        torch.cuda.synchronize()
        slow = time.perf_counter() - begin > 2e-3
        repeats, layers = (3, 2) if slow else (args.repeats, setup.layers)
        for mode in ("in_loop", "cold"):
            if mode == "in_loop":
                samples = in_loop_us(call, layers, repeats)
            elif case.batch == 1:
                samples = cold_us(call, layers, repeats, flush)
            else:
                continue
            time_us = Metric.of([round(s, 3) for s in samples], "us")
            rate = setup.bytes / time_us.value / 1e6
            metrics = {
                "us": time_us,
                "tb_s": Metric(round(rate, 4), "TB/s"),
                "share_of_copy": Metric(round(rate / copy, 4), "ratio"),
            }
            if mode == "in_loop" and not case.fp8 and name in ("fork", "upstream"):
                metrics["mla_verify_us"] = time_us
            variant = "upstream" if name in ("upstream", "flashinfer") else "fork"
            results.add(
                Row(
                    bench="attention",
                    machine=args.machine,
                    variant=variant,
                    case=facts | {"mode": mode, "heads": HEADS},
                    metrics=metrics,
                    counters={"layers": layers, "difference_from_fork": round(difference, 6)},
                    started=started,
                    note=how,
                )
            )
            print(
                f"T{case.tokens} bs{case.batch:<2d} {case.context:6d} {facts['kv']} {mode:7s} {name:10s} "
                f"{time_us.value:9.2f} us {rate:5.2f} TB/s {rate / copy:5.2f} diff {difference:.1e}",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the table and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--backends", nargs="+", default=["fork", "upstream", "flashinfer"])
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kv", nargs="+", choices=("bf16", "fp8"), default=("bf16", "fp8"))
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--budget-gib", type=int, default=24, help="device memory for the layers of one case")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop starting new cases after this long")
    args = parser.parse_args(argv)
    cases = [
        Case(tokens, batch, context, kv == "fp8")
        for kv in args.kv
        for batch in args.batches
        for context in args.contexts
        for tokens in args.tokens
    ]
    if not torch.cuda.is_available():
        print(f"no CUDA device; {len(cases)} cases planned", file=sys.stderr)
        return 2
    begun = time.monotonic()
    results = Results(environments=[capture(root=Path(__file__).resolve().parent)])
    copy = copy_bandwidth()
    results.add(
        Row("copy", args.machine, "upstream", {"bytes": 2**31}, {"copy": Metric(round(copy, 4), "TB/s")})
    )
    flush = torch.empty(4 * L2_BYTES, dtype=torch.uint8, device="cuda")
    print(f"copy {copy:.3f} TB/s", flush=True)
    left_out = []
    for case in cases:
        if time.monotonic() - begun > args.limit_s:
            left_out.append(asdict(case))
            continue
        measure(case, args, copy, flush, results)
        torch.cuda.empty_cache()
        results.save(args.out)
    if left_out:
        print(f"left out after {args.limit_s} s: {json.dumps(left_out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
