"""Runs of prompts against one server, as rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.bench_verify import degenerate
from sglang.bench_verify.client import Answer, Client
from sglang.bench_verify.environment import Environment, Rank
from sglang.bench_verify.prompts import Prompt, PromptError
from sglang.bench_verify.rows import Metric, Row, Scalar
from sglang.srt.speculative.stats.accept import histogram_faults, position_rates

Report = Callable[[str, int, int], None]
Keep = Callable[[Row], None]
ARGUMENTS = (
    "model_path",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "page_size",
    "tp_size",
    "pp_size",
    "dp_size",
    "ep_size",
    "disable_cuda_graph",
    "cuda_graph_max_bs",
    "chunked_prefill_size",
    "num_continuous_decode_steps",
    "disable_radix_cache",
    "disable_custom_all_reduce",
    "nccl_profile",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_attention_mode",
    "speculative_draft_attention_backend",
)


@dataclass(frozen=True)
class Server:
    """What the rows say about the server they were measured on."""

    name: str
    machine: str
    variant: str = "fork"
    bench: str = "server"
    topics_off: tuple[str, ...] = ()
    environment: int = 0
    start: int = 1


def describe(client: Client, record: Environment) -> int:
    """Fill the record from a server: arguments, topics, ranks. Returns its draft tokens (0 = none)."""
    info = client.info()
    states = info.get("internal_states") or [{}]
    resolved: Mapping[str, Any] = states[0] if states[0].get("model_path") else info
    for name in ARGUMENTS:
        value = resolved.get(name, info.get(name))
        if value is not None:
            # Folders of a machine say nothing about speed; the model's name does.
            record.server_arguments[name] = (
                str(value).rstrip("/").rpartition("/")[2] if "path" in name else str(value)
            )
    statistics = states[0].get("spec_stats") or {}
    record.ranks = [Rank.from_json(item) for item in statistics.get("ranks", [])]
    fork = statistics.get("fork") or {}
    record.topics = dict(fork.get("topics") or record.topics)
    record.fork_version = str(fork.get("version") or record.fork_version)
    record.base_version = str(fork.get("base") or record.base_version)
    if record.ranks and record.ranks[0].nccl_version:
        record.nccl_version = record.ranks[0].nccl_version
    width = resolved.get("speculative_num_draft_tokens")
    return int(width) if resolved.get("speculative_algorithm") and width else 0


def run(
    client: Client,
    server: Server,
    prompts: Sequence[Prompt],
    tokens: int,
    width: int,
    rounds: int = 1,
    temperature: float = 0.0,
    report: Report | None = None,
    keep: Keep | None = None,
) -> list[Row]:
    """Answer every prompt ``rounds`` times, one at a time; one row an answer.

    A warm-up answer before the first is not counted: it pays for lazy compilation and cold caches. ``keep`` gets each
    row at once, so that a run which ends early leaves what it measured.
    """
    if not prompts:
        raise PromptError("no prompts: the file is empty, or --kinds and --count leave none")
    client.answer(prompts[0], min(tokens, 16), temperature)
    rows: list[Row] = []
    total = rounds * len(prompts)
    for index in range(total):
        prompt = prompts[index % len(prompts)]
        if report is not None:
            report(f"{server.name} {prompt.id}", index, total)
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        before = client.statistics()
        answer = client.answer(prompt, tokens, temperature)
        after = client.statistics()
        rows.append(row(server, prompt, answer, before, after, width, len(rows) + 1, started))
        if keep is not None:
            keep(rows[-1])
    if report is not None:
        report(f"{server.name} done", total, total)
    return rows


def row(
    server: Server,
    prompt: Prompt,
    answer: Answer,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    width: int,
    run_index: int,
    started: str,
) -> Row:
    """The row of one answer: its own acceptance, and the phases that the server timed between two readings.

    A server whose answers carry no counts (chat answers of clean upstream) is read before and after instead.
    """
    metrics = {
        "tok_s": Metric(answer.rate, "tok/s"),
        "seconds": Metric(answer.seconds, "s"),
        "completion_tokens": Metric(float(answer.tokens), "tokens"),
        "prompt_tokens": Metric(float(answer.prompt_tokens), "tokens"),
        "distinct_bigrams": Metric(degenerate.distinct_bigrams(answer.units()), "ratio"),
    }
    notes = [note for note in (degenerate.flag(answer.units()),) if note]
    counters: dict[str, Scalar] = {"finish": answer.finish}
    phases = mean_phases(before, after)
    if width:
        # The answer's own counts, where it carries them: the server's are also those of everyone else who asks it.
        own = answer.info.get("spec_correct_drafts_histogram")
        histogram = [int(count) for count in own] if own else kept_histogram(before, after)
        verifies = sum(histogram)
        drafts = sum(index * count for index, count in enumerate(histogram))
        told = answer.info.get("spec_cycle")
        plain = int(told.get("plain_steps", 0)) if own and told else plain_steps(before, after)
        if plain:
            counters["plain_steps"] = plain
        if verifies:
            counters |= {"verifies": verifies, "drafts_kept": drafts}
            metrics["kept_length"] = Metric(1.0 + drafts / verifies, "tokens")
            for position, rate in enumerate(position_rates(histogram, width - 1), 1):
                metrics[f"kept_at_{position}"] = Metric(rate, "ratio")
            notes.extend(histogram_faults(histogram, verifies, drafts, answer.tokens, plain))
        cycle = sum(phases.values())
        if cycle > 0:
            metrics["cycle_ms"] = Metric(cycle, "ms")
        if told and told.get("decode_ms"):
            metrics["known_decode_ms"] = Metric(float(told["decode_ms"]), "ms")
    elif "decode" in phases:
        metrics["decode_ms"] = Metric(sum(phases.values()), "ms")
    return Row(
        bench=server.bench,
        machine=server.machine,
        variant=server.variant,
        case={
            "server": server.name,
            "start": server.start,
            "run": run_index,
            "prompt": prompt.id,
            "kind": prompt.kind,
            "batch": 1,
            "draft_tokens": width,
        },
        metrics=metrics,
        phases_ms=phases,
        counters=counters,
        topics_off=server.topics_off,
        environment=server.environment,
        started=started,
        note="; ".join(notes),
    )


def plain_steps(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Steps between two readings in which a speculating server decoded plainly."""
    key = 'spec_auto_steps{mode="plain"}'
    return int(after.get("counters", {}).get(key, 0) - before.get("counters", {}).get(key, 0))


def kept_histogram(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[int]:
    """Cycles by drafts kept, between two readings."""
    later = list(after.get("kept_histogram") or [])
    earlier = list(before.get("kept_histogram") or [])
    earlier += [0] * (len(later) - len(earlier))
    return [int(b) - int(a) for a, b in zip(earlier, later, strict=False)]


def mean_phases(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds a cycle by phase, between two readings; of plain decodes where nothing is drafted."""
    for totals in ("phase_totals", "decode_totals"):
        later, earlier = after.get(totals) or {}, before.get(totals) or {}
        means = {}
        for name, (ms, count) in later.items():
            ms_before, count_before = earlier.get(name, (0.0, 0))
            if count > count_before:
                means[name] = (ms - ms_before) / (count - count_before)
        if means:
            return means
    return {}
