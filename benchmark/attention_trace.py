"""Where the microseconds of an attention call go: a timeline of every block, from time stamps in the kernels.

Runs calls in a graph as ``bench_attention`` does in a loop, each with records of its own, so what consecutive calls
overlap shows. All paths: two launches (split and merge, in CUDA C++ or Triton) and one.

    python benchmark/attention_trace.py --contexts 16384 65536 --paths two-launches one-launch --out trace.json

Prints, for calls from the middle of the loop, minimum / median / maximum over the blocks of each stage, in microseconds
after the first block of that call's split started; then how long each step took within a block. Stamps cost some tenths of
a microsecond a call, so compare stages with each other, and totals with ``bench_attention``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from attention_cases import PATHS, SM_SCALE, UNLISTED, Case, Setup, fork_context, fork_plan
from attention_timeline import Axis, gaps, read_records, stages, steps
from attention_trials import CHANGES, WARPGROUP_CHANGES
from bench_attention import graph_of, replay_us
from sglang.bench_verify.environment import capture
from sglang.srt.layers.attention.verify.fused_build import WarpgroupVariant
from sglang.srt.layers.attention.verify.launch import Operands, attend
from sglang.srt.layers.attention.verify.plan import SplitPlan
from sglang.srt.layers.attention.verify.stamps import WIDTH
from sglang.srt.layers.attention.verify.work_list import PassList
from sglang.srt.layers.attention.verify.workspace import VerifyWorkspace


def programs(plan: SplitPlan) -> tuple[int, int]:
    """Records of a call: of the split (or the one launch), and of the merge."""
    r = plan.request
    if plan.tile.kernel == "fused":
        return plan.items, 0
    if plan.tile.kernel == "warpgroup":
        return plan.items, r.batch * WarpgroupVariant(plan.tile.block_r // 8, False).merge_blocks
    columns = -(-r.v_dim // plan.merge.block_d)
    return plan.items * plan.row_blocks, r.batch * r.tokens * r.q_heads * columns


def traced_loop(
    setup: Setup, plan: SplitPlan, calls: int, listed: bool
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Records of the last replay: [calls, programs, WIDTH] of split and merge, and microseconds a call.

    ``listed``: the calls are one forward pass that shares a work list, written in front of the first.
    """
    space = VerifyWorkspace.for_plans([plan], setup.device)
    context = fork_context(setup)
    split, merge = (
        torch.full((calls, max(n, 1), WIDTH), -1, dtype=torch.int64, device=setup.device)
        for n in programs(plan)
    )

    def body() -> None:
        work = PassList() if listed else None
        for i in range(calls):
            pool = setup.pools[i % setup.layers]
            x = Operands(setup.q, pool, pool[..., :512], setup.out, None, (split[i], merge[i]))
            attend(plan, space, x, context, SM_SCALE, 1.0, 1.0, 0.0, work)

    times = replay_us(graph_of(body), 5)
    return split.cpu(), merge.cpu(), sorted(times)[2] / calls


def table(title: str, times: Mapping[str, tuple[float, float, float]]) -> None:
    """One line a stage."""
    print(title)
    for name, (low, middle, high) in times.items():
        print(f"    {name:20s} {low:8.2f} {middle:8.2f} {high:8.2f}", flush=True)


def report(split: torch.Tensor, merge: torch.Tensor) -> dict[str, Any]:
    """Stages, steps and gaps over the middle half of the loop's calls (medians over calls)."""
    calls = split.shape[0]
    splits = [read_records(split[i]) for i in range(calls)]
    merges = [read_records(merge[i]) for i in range(calls)]
    axis = Axis.fit([r for call in (*splits, *merges) for r in call])
    middle = range(calls // 4, max(calls // 4 + 1, calls * 3 // 4))
    found: dict[str, Any] = {
        "megahertz": round(axis.cycles_per_us, 1),
        "split": stages([splits[i] for i in middle], [splits[i] for i in middle], axis),
        "split_steps": steps([r for i in middle for r in splits[i]], axis),
    }
    if any(merges):
        found["merge"] = stages([merges[i] for i in middle], [splits[i] for i in middle], axis)
        found["merge_steps"] = steps([r for i in middle for r in merges[i]], axis)
    found["between_calls"] = gaps(splits, merges, axis, middle)
    return found


def measure(case: Case, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case and path; prints its tables."""
    setup = Setup(case, "cuda", args.budget_gib * 2**30)
    changed = "warpgroup" if name in WARPGROUP_CHANGES else "two-launches"
    plan = fork_plan(setup, name if name in PATHS or name in UNLISTED else changed)
    if name in CHANGES or name in WARPGROUP_CHANGES:
        plan = (CHANGES | WARPGROUP_CHANGES)[name](plan)
    listed = plan.tile.kernel == "warpgroup" and name not in UNLISTED
    split, merge, us = traced_loop(setup, plan, args.calls, listed)
    found = report(split, merge)
    print(
        f"\n{name} T{case.tokens} bs{case.batch} {case.context}: {us:.2f} us a call with stamps; {plan.reason}"
    )
    for part, times in found.items():
        if isinstance(times, dict):
            table(f"  {part} (us: min, median, max)", times)
    if args.raw is not None:
        torch.save({"split": split, "merge": merge}, args.raw / f"{name}-T{case.tokens}-{case.context}.pt")
    return {"case": asdict(case), "path": name, "us": round(us, 3), "plan": plan.reason, **found}


def main(argv: Sequence[str] | None = None) -> int:
    """Trace every case on every path; what is done is written after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", nargs="+", type=int, default=[16384, 65536])
    parser.add_argument("--tokens", nargs="+", type=int, default=[3])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--paths", nargs="+", default=["warpgroup"], choices=[*PATHS, *UNLISTED, *CHANGES, *WARPGROUP_CHANGES]
    )
    parser.add_argument("--calls", type=int, default=24, help="calls in the loop")
    parser.add_argument("--budget-gib", type=int, default=24)
    parser.add_argument("--raw", type=Path, help="folder for the records themselves")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop starting new cases after this long")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    begun = time.monotonic()
    record: dict[str, Any] = {
        "environment": asdict(capture(root=Path(__file__).resolve().parent)),
        "traces": [],
    }
    for context in args.contexts:
        for tokens in args.tokens:
            for name in args.paths:
                if time.monotonic() - begun > args.limit_s:
                    print(f"left out: {name} T{tokens} {context}")
                    continue
                try:
                    record["traces"].append(measure(Case(tokens, args.batch, context, False), name, args))
                except Exception as error:
                    print(f"{name} T{tokens} {context}: {error!r:.300}", flush=True)
                torch.cuda.empty_cache()
                args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
