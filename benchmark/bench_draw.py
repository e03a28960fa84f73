"""The sampled part of a cycle on the device: the fork's draw inside the graph against what upstream runs after its verify.

Both begin at the target's logits, float32 [requests * 3, vocabulary], and end at the accepted tokens of a chain of two
drafts. ``accept`` is the fork's step as it stands in the cycle's graph (mark, draw, acceptance), ``draw`` its
kernels that read the logits. ``upstream`` is the sequence of upstream's sampled verify: temperature, softmax, renormalisation
of top-k and top-p where a request asks for them, variates and the tree walk. It renormalises with flashinfer's kernels
where flashinfer is installed; ``upstream-aot`` takes the ones that sgl_kernel ships.

    python benchmark/bench_draw.py --machine h200 --out benchmark/results/h200_draw.json

``us`` is a replay of a captured graph of many calls, median, logits in L2 as the head leaves them (at batch 32 they do not fit); ``eager_us`` the same calls launched
one by one, as upstream does launch them (its step has no graph). ``share_of_copy`` is against the rate of a copy in this process,
counting every logit once: what no way to draw can avoid. The two keep different fronts where top-k and top-p are combined
(docs/sampling.md), which costs neither of them anything. The file is written after each case; ``--limit`` ends between two.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from bench_attention import copy_bandwidth, event, graph_of, replay_us
from sglang.bench_verify.environment import capture, under_load
from sglang.bench_verify.rows import Metric, Results, Row, Scalar
from sglang.srt.speculative.cycle_graph import draw_kernel, kernels
from sglang.srt.speculative.cycle_graph.buffers import (
    COUNTER,
    Control,
    CycleBuffers,
    DraftInputs,
    ExtendInputs,
    Relay,
    Sampling,
    Scratch,
    VerifyInputs,
)
from sglang.srt.speculative.cycle_graph.buffers import (
    Results as CycleResults,
)

WIDTH = 3
NO_TOP_K = 1 << 30
# A call of the device, and its answer: tokens int32 [batch * WIDTH].
Work = Callable[[], torch.Tensor]
RIVALS = {"upstream": False, "upstream-aot": True}


@dataclass(frozen=True)
class Filters:
    """Parameters that all requests of a case have."""

    name: str
    temperature: float = 0.8
    top_k: int = NO_TOP_K
    top_p: float = 1.0

    @property
    def renormalises(self) -> bool:
        """Whether anything is cut off."""
        return self.top_k < NO_TOP_K or self.top_p < 1.0


FILTERS = (
    Filters("top-k 50, top-p 0.95", top_k=50, top_p=0.95),
    Filters("top-p 0.95", top_p=0.95),
    Filters("top-k 50", top_k=50),
    Filters("temperature only"),
)


@dataclass(frozen=True)
class Case:
    """One size. ``logits`` float32 [batch * WIDTH, vocabulary], ``candidates`` int64 [batch, WIDTH], root first."""

    filters: Filters
    logits: torch.Tensor
    candidates: torch.Tensor

    @property
    def batch(self) -> int:
        """Requests."""
        return int(self.candidates.shape[0])

    @property
    def bytes(self) -> int:
        """Every logit once."""
        return self.logits.numel() * self.logits.element_size()


def make_case(batch: int, vocabulary: int, filters: Filters, device: str) -> Case:
    """Random logits; the drafts are the target's favourites, so that some are kept and some are not."""
    generator = torch.Generator(device).manual_seed(batch)
    logits = torch.randn(batch * WIDTH, vocabulary, device=device, generator=generator) * 2.5
    favourites = logits.argmax(-1).view(batch, WIDTH)
    return Case(filters, logits, torch.cat((favourites[:, :1], favourites[:, :-1]), 1).contiguous())


@dataclass(frozen=True)
class Ops:
    """Upstream's kernels, under the names of the calls that it makes."""

    top_k: Callable[..., torch.Tensor]
    top_p: Callable[..., torch.Tensor]
    walk: Callable[..., None]


def upstream_ops(aot: bool) -> Ops:
    """As ``sgl_kernel`` chooses them, or (``aot``) its own renormalisation where it would take flashinfer's.

    Raises:
        ImportError: no sgl_kernel.
    """
    import sgl_kernel
    from sgl_kernel import sampling

    if not aot:
        return Ops(
            sampling.top_k_renorm_prob,
            sampling.top_p_renorm_prob,
            sgl_kernel.tree_speculative_sampling_target_only,
        )
    return Ops(
        lambda probabilities, values: sampling._top_k_renorm_probs_internal(probabilities, values, 0),
        lambda probabilities, values: sampling._top_p_renorm_probs_internal(probabilities, values, 0.0),
        sgl_kernel.tree_speculative_sampling_target_only,
    )


def renormaliser(aot: bool) -> str:
    """Whose kernels cut off the tail."""
    from sgl_kernel import sampling

    if aot or not sampling._has_flashinfer:
        return "renormalised by sgl_kernel"
    return f"renormalised by flashinfer {importlib.metadata.version('flashinfer-python')}"


def upstream_work(case: Case, ops: Ops) -> Work:
    """Upstream's sampled verify of a chain; the tokens are those that it predicts behind each kept row."""
    device, batch, filters = case.logits.device, case.batch, case.filters
    temperatures = torch.full((batch, 1), filters.temperature, device=device)
    top_ks = torch.full((batch,), filters.top_k, dtype=torch.int32, device=device)
    top_ps = torch.full((batch,), filters.top_p, device=device)
    places = torch.arange(batch * WIDTH, device=device).view(batch, WIDTH)
    following = torch.tensor([*range(1, WIDTH), -1], device=device).repeat(batch, 1)
    siblings = torch.full_like(following, -1)

    def rows(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(WIDTH, dim=0)

    def work() -> torch.Tensor:
        predicted = torch.zeros(batch * WIDTH, dtype=torch.int32, device=device)
        accepted = torch.full((batch, WIDTH), -1, dtype=torch.int32, device=device)
        kept = torch.empty(batch, dtype=torch.int32, device=device)
        target = torch.softmax(case.logits / rows(temperatures), dim=-1)
        if filters.top_k < NO_TOP_K:
            target = ops.top_k(target, rows(top_ks))
        if filters.top_p < 1.0:
            target = ops.top_p(target, rows(top_ps))
        target = target.view(batch, WIDTH, -1)
        coins = torch.rand_like(case.candidates, dtype=torch.float32)
        last = torch.rand(batch, device=device)
        ops.walk(
            predicts=predicted, accept_index=accepted, accept_token_num=kept, candidates=case.candidates,
            retrive_index=places, retrive_next_token=following, retrive_next_sibling=siblings,
            uniform_samples=coins, uniform_samples_for_final_sampling=last,
            target_probs=target, draft_probs=torch.zeros_like(target),
            threshold_single=1.0, threshold_acc=1.0, deterministic=True,
        )  # fmt: skip
        return predicted

    return work


def rival_work(case: Case, aot: bool) -> Work:
    """See ``upstream_ops``."""
    return upstream_work(case, upstream_ops(aot))


def cycle_buffers(case: Case) -> CycleBuffers:
    """The buffers of a sampled cycle around these logits; what the accept step does not touch is as small as it may be."""
    batch, device = case.batch, case.logits.device
    count = batch * WIDTH

    def longs(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    def floats(*size: int) -> torch.Tensor:
        return torch.zeros(size, device=device)

    sampling = Sampling.allocate(batch, device)
    sampling.temperatures.fill_(case.filters.temperature)
    sampling.top_ks.fill_(case.filters.top_k)
    sampling.top_ps.fill_(case.filters.top_p)
    rows, lens, positions, slots, hidden = (
        longs(batch),
        longs(batch),
        longs(count),
        longs(count),
        floats(count, 1),
    )
    tokens = case.candidates.flatten().clone()
    buffers = CycleBuffers(
        batch=batch,
        width=WIDTH,
        table=ints(batch + 1, 8),
        control=Control(ints(4), longs(batch)),
        draft=DraftInputs(
            rows, lens, longs(batch), longs(count - batch), longs(batch, 1), floats(batch, 1), floats(batch, 1),
            longs(batch, WIDTH - 1),
        ),
        verify=VerifyInputs(rows, lens, tokens, positions, slots, case.logits, hidden),
        extend=ExtendInputs(
            rows, lens, longs(count), positions, slots, hidden, ints(batch), ints(batch), ints(batch),
            floats(count, 1), floats(count, 1),
        ),
        relay=Relay(longs(batch + 1), longs(batch + 1), longs(batch + 1, 1), floats(batch + 1, 1), floats(batch + 1, 1)),
        results=CycleResults.allocate(batch, WIDTH, device),
        scratch=Scratch.allocate(batch, WIDTH, 1, 1, device),
        sampling=sampling,
    )  # fmt: skip
    buffers.check()
    buffers.scratch.prefix.fill_(4)
    kernels.load(buffers, torch.arange(1, batch + 1, device=device), 0, 0, counter=1)
    return buffers


def fork_works(case: Case) -> dict[str, Callable[[], Work]]:
    """The accept step of a sampled cycle, and the draw alone (one token a row)."""
    b = cycle_buffers(case)
    assert b.sampling is not None
    sampling = b.sampling

    def accept() -> torch.Tensor:
        kernels.accept(b)
        return b.results.tokens[0]

    def draw() -> torch.Tensor:
        draw_kernel.draw(
            b.control.state, COUNTER, b.verify.logits, sampling, b.scratch.maxima, b.scratch.indices
        )
        return b.scratch.indices[:, 0]

    return {"accept": lambda: accept, "draw": lambda: draw}


def outside(case: Case, drawn: torch.Tensor) -> int:
    """How many of the drawn tokens, one a row, have top-k or more tokens in front of them: 0, or the draw is wrong."""
    value = case.logits.gather(1, drawn.long().view(-1, 1))
    return int(((case.logits > value).sum(-1) >= case.filters.top_k).sum())


def time_us(work: Work, calls: int, repeats: int) -> list[float]:
    """Microseconds a call on the device, one figure a replay of a graph of ``calls`` calls."""

    def body() -> None:
        for _ in range(calls):
            work()

    return [t / calls for t in replay_us(graph_of(body), repeats)]


def eager_us(work: Work, calls: int, repeats: int) -> list[float]:
    """Microseconds a call between two events, each kernel launched by the host."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = event(), event()
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return times


def ratios(name: str, times: Mapping[str, Mapping[str, Metric]]) -> dict[str, Metric]:
    """The fork's work over upstream's: both in a graph, and as they run (ours in the cycle's graph, upstream's launched)."""
    if name in RIVALS:
        return {}
    pairs = {
        "us_over": ("us", "us"),
        "us_over_eager": ("us", "eager_us"),
        "eager_us_over": ("eager_us", "eager_us"),
    }
    return {
        f"{ratio}_{rival}": Metric(times[name][mine].value / times[rival][theirs].value, "ratio")
        for ratio, (mine, theirs) in pairs.items()
        for rival in RIVALS
        if rival in times
    }


def measure(case: Case, args: argparse.Namespace, copy: float) -> tuple[list[Row], list[str]]:
    """The rows of one case, the fork's first with its ratios, and what failed."""
    works: dict[str, Callable[[], Work]] = fork_works(case)
    for name, aot in RIVALS.items():
        if not aot or case.filters.renormalises:
            works[name] = partial(rival_work, case, aot)
    times: dict[str, dict[str, Metric]] = {}
    wrong = 0
    failed = []
    for name, make in works.items():
        try:
            work = make()
            # Outside of a capture: kernels compile and load in their first call.
            work()
            if name == "draw":
                wrong = outside(case, work())
            times[name] = {
                "us": Metric.of(time_us(work, args.calls, args.repeats), "us"),
                "eager_us": Metric.of(eager_us(work, args.calls, args.repeats), "us"),
            }
        except Exception as error:
            # One rival that cannot run must not cost the others their row.
            failed.append(f"{name}, batch {case.batch}, {case.filters.name}: {error!r:.300}")
    if wrong:
        failed.append(f"draw, batch {case.batch}, {case.filters.name}: {wrong} tokens outside top-k")
    rows = []
    for name, metrics in times.items():
        rate = case.bytes / metrics["us"].value / 1e6
        shares = {"tb_s": Metric(rate, "TB/s"), "share_of_copy": Metric(rate / copy, "ratio")}
        facts: dict[str, Scalar] = {
            "work": name, "batch": case.batch, "draft_tokens": WIDTH, "vocabulary": int(case.logits.shape[1]),
            "filters": case.filters.name, "temperature": case.filters.temperature,
        }  # fmt: skip
        variant = "upstream" if name.startswith("upstream") else "fork"
        row = Row(
            "draw", args.machine, variant, facts, ratios(name, times) | metrics | shares,
            counters={"bytes": case.bytes}, note=renormaliser(RIVALS[name]) if name in RIVALS else "",
        )  # fmt: skip
        rows.append(row)
        shown = {metric: round(value.value, 4) for metric, value in row.metrics.items()}
        print(f"batch {case.batch:3} {case.filters.name:22} {name:14} {shown}", flush=True)
    return rows, failed


def main(argv: Sequence[str] | None = None, device: str = "cuda") -> int:
    """Measure and write the rows; status 1 if something could not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--out", default="")
    parser.add_argument("--vocabulary", type=int, default=163_840)
    parser.add_argument("--batches", default="1,4,8,32")
    parser.add_argument("--calls", type=int, default=20, help="calls a graph")
    parser.add_argument("--repeats", type=int, default=7, help="replays")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds; no case begins later")
    args = parser.parse_args(argv)
    begun = time.monotonic()
    results = Results(environments=[capture()])
    copy = copy_bandwidth()
    results.add(Row("copy", args.machine, "upstream", {"bytes": 2**31}, {"copy": Metric(copy, "TB/s")}))
    failed: list[str] = []
    with under_load(results.environments[0]):
        for filters in FILTERS:
            for batch in map(int, args.batches.split(",")):
                if time.monotonic() - begun > args.limit:
                    failed.append(f"left out after {args.limit} s: batch {batch}, {filters.name}")
                    continue
                rows, wrong = measure(make_case(batch, args.vocabulary, filters, device), args, copy)
                failed += wrong
                for row in rows:
                    results.add(row)
                if args.out:
                    results.save(args.out)
    for text in failed:
        print("FAILED", text, file=sys.stderr)
    if args.out:
        results.save(args.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
