"""Does EAGLE-3 change a token? The whole matrix on a CPU, and what it costs to start.

    python benchmark/equality.py --out benchmark/results/cpu_equality.json

Serves `models/nano` plainly and with its draft (a chain of 3), in float32, sends the same prompts greedily to both,
and compares token by token: one by one and in batches of four, page size 1 and 16, prefix cache off and on, prompts
prefilled in chunks of 64. Then the same in bfloat16, where sums round differently in other orders: there every first
difference must be a near-tie, which is checked with the float32 server's log-probabilities. Streamed and whole answers
over HTTP are compared too. Ends with status 1 if anything differs that should not.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from served import Generation, Served, speculative_flags
from sglang.bench_verify.environment import capture
from sglang.bench_verify.rows import Metric, Results, Row

ROOT = Path(__file__).resolve().parents[1]
#: In bfloat16 a logit near 16 has steps of 1/8: two tokens closer than one step, in float32, count as tied.
TIE_BOUND = 0.125
PREAMBLE = (
    "You are a careful helper who answers in plain words. Keep to the question, name what you do not know, and do "
    "not repeat yourself. When a story is asked for, give it a beginning and an end. When a number is asked for, give "
    "the number first and the reason after it. The question follows."
)


@dataclass(frozen=True)
class Configuration:
    """How a server is run; `spec` False is the plain one."""

    name: str
    spec: bool = True
    dtype: str = "float32"
    page_size: int = 1
    radix: bool = True
    chunk: int | None = None

    def flags(self, draft: Path) -> list[str]:
        """Return the server's flags."""
        flags = [f"--dtype={self.dtype}", f"--page-size={self.page_size}", "--max-running-requests=8"]
        if not self.radix:
            flags.append("--disable-radix-cache")
        if self.chunk is not None:
            flags.append(f"--chunked-prefill-size={self.chunk}")
        return flags + (speculative_flags(draft) if self.spec else [])


FLOAT32 = (
    Configuration("page 1, no prefix cache", radix=False),
    Configuration("page 16, prefix cache, chunks of 64", page_size=16, chunk=64),
    Configuration("page 16, no prefix cache", page_size=16, radix=False),
    Configuration("page 1, prefix cache, chunks of 64", chunk=64),
)
QUICK = (FLOAT32[1],)


@dataclass
class Bench:
    """Everything a run needs, and what it has found."""

    model: Path
    draft: Path
    prompts: list[list[int]]
    tokens: int
    logs: Path
    results: Results
    out: Path
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def serve(self, configuration: Configuration) -> Iterator[Served]:
        """Run a server, and record its start-up time and memory when it is done."""
        log = self.logs / f"{configuration.name.replace(' ', '-').replace(',', '')}-{configuration.dtype}.log"
        with Served(self.model, log, configuration.flags(self.draft)) as server:
            say(f"{configuration.name}: up in {server.start_seconds:.1f} s")
            yield server
            memory = server.memory()
            self.row(
                "launch",
                configuration,
                {},
                {
                    "startup_s": Metric.of([server.start_seconds], "s"),
                    "peak_rss_sum_bytes": Metric(memory["peak_rss_sum"], "bytes"),
                    "pss_bytes": Metric(memory["pss"], "bytes"),
                },
                note=shlex.join(["python", *server.command[1:]]).replace(f"{ROOT}/", ""),
            )

    def row(
        self,
        bench: str,
        configuration: Configuration,
        case: dict[str, Any],
        metrics: dict[str, Metric],
        counters: dict[str, Any] | None = None,
        note: str = "",
    ) -> None:
        """Add a row and save the file, so that an interrupted run keeps what it measured."""
        self.results.add(
            Row(
                bench,
                "cpu",
                "fork",
                {
                    "model": self.model.name,
                    "draft_tokens": 3 if configuration.spec else 0,
                    "dtype": configuration.dtype,
                    "page_size": configuration.page_size,
                    "prefix_cache": configuration.radix,
                    "chunk": configuration.chunk,
                    **case,
                },
                metrics,
                counters=counters or {},
                started=time.strftime("%Y-%m-%dT%H:%M:%S"),
                note=note,
            )
        )
        self.results.save(self.out)

    def fail(self, text: str) -> None:
        """Record a difference that must not be."""
        self.failures.append(text)
        say(f"DIFFERS: {text}")


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def load_prompts(path: Path, model: Path, count: int) -> list[list[int]]:
    """Return token ids of the first `count` prompts; every other one has the shared preamble in front."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for i, line in enumerate(path.read_text().splitlines()[:count]):
        entry = json.loads(line)
        preamble = f"{PREAMBLE} " if i % 2 else ""
        if "messages" in entry:
            first, *rest = entry["messages"]
            messages = [{**first, "content": preamble + first["content"]}, *rest]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer.encode(preamble + entry["prompt"])
        prompts.append(cast(list[int], ids))
    return prompts


def answer(
    server: Served, prompts: Sequence[Sequence[int]], tokens: int, batch: int
) -> tuple[list[Generation], float]:
    """Answer all prompts, `batch` at a time; also return the seconds it took."""
    began = time.monotonic()
    answers: list[Generation] = []
    for first in range(0, len(prompts), batch):
        answers += server.generate(list(prompts[first : first + batch]), tokens)
    return answers, time.monotonic() - began


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return where two answers part, or None."""
    if one == other:
        return None
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def accept_figures(answers: Sequence[Generation]) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Return accept length and the counts of accepted drafts, over all answers."""
    drafts: Counter[int] = Counter()
    for one in answers:
        drafts.update(dict(enumerate(one.meta.get("spec_correct_drafts_histogram") or [])))
    steps = sum(drafts.values())
    if not steps:
        return {}, {}
    mean = sum((count + 1) * times for count, times in drafts.items()) / steps
    return (
        {"accept_length": Metric(mean, "tokens")},
        {f"steps_with_{count}_drafts_accepted": times for count, times in sorted(drafts.items())},
    )


def measure(
    bench: Bench,
    configuration: Configuration,
    server: Served,
    expected: Sequence[Sequence[int]] | None,
    batch: int,
) -> list[tuple[int, ...]]:
    """Answer, compare with `expected` if given (differences are failures), and record a row."""
    answers, seconds = answer(server, bench.prompts, bench.tokens, batch)
    ids = [one.ids for one in answers]
    metrics, counters = accept_figures(answers)
    metrics["tok_s"] = Metric(sum(map(len, ids)) / seconds, "tok/s")
    counters["prompts"] = len(ids)
    counters["cached_tokens"] = sum(int(one.meta["cached_tokens"]) for one in answers)
    if expected is not None:
        parted = [i for i, one in enumerate(ids) if tuple(one) != tuple(expected[i])]
        counters["differing_prompts"] = len(parted)
        for i in parted:
            place = first_difference(ids[i], expected[i])
            bench.fail(f"{configuration.name}, batch {batch}, prompt {i}, token {place}")
    bench.row("equality", configuration, {"batch": batch, "tokens": bench.tokens}, metrics, counters)
    length = metrics.get("accept_length")
    say(
        f"{configuration.name}, batch {batch}: {counters.get('differing_prompts', '-')} of {len(ids)} differ, "
        f"{metrics['tok_s'].value:.0f} tok/s{f', accept length {length.value:.3f}' if length else ''}, "
        f"{counters['cached_tokens']} cached"
    )
    return ids


def streaming(bench: Bench, configuration: Configuration, server: Served, count: int) -> None:
    """Compare streamed with whole answers over HTTP, native and OpenAI."""
    differing = 0
    for i, prompt in enumerate(bench.prompts[:count]):
        native = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
        whole = server.post("/generate", native)["text"]
        last = ""
        for event in server.events("/generate", {**native, "stream": True}):
            last = event["text"]
        openai = {"model": "nano", "prompt": prompt, "max_tokens": 64, "temperature": 0}
        text = server.post("/v1/completions", openai)["choices"][0]["text"]
        parts = "".join(
            event["choices"][0]["text"]
            for event in server.events("/v1/completions", {**openai, "stream": True})
            if event["choices"]
        )
        if not whole == last == text == parts:
            differing += 1
            bench.fail(f"streaming, prompt {i}: {whole!r}, {last!r}, {text!r}, {parts!r}")
    bench.row("streaming", configuration, {}, {}, {"prompts": count, "differing_prompts": differing})
    say(f"streamed and whole answers: {differing} of {count} differ")


@dataclass(frozen=True)
class Parting:
    """Where two bfloat16 answers part: the tokens they chose after a text that both wrote."""

    prompt: int
    place: int
    plain: int
    spec: int
    prefix: tuple[int, ...]


def gaps(server: Served, bench: Bench, partings: Sequence[Parting]) -> list[float]:
    """Return how far apart both choices lie in float32 (log-probability), infinite if another token is near."""
    found = []
    for one in partings:
        body = {
            "input_ids": [*bench.prompts[one.prompt], *one.prefix],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 3,
        }
        top = server.post("/generate", body)["meta_info"]["output_top_logprobs"][0]
        scores = {int(token): float(score) for score, token, *_ in top}
        best = max(scores.values())
        chosen = [scores.get(one.plain, -float("inf")), scores.get(one.spec, -float("inf"))]
        found.append(best - min(chosen))
    return found


def bfloat16(bench: Bench) -> list[Parting]:
    """Answer in bfloat16 with and without speculation; return where they part."""
    plain = Configuration("bf16 plain", spec=False, dtype="bfloat16")
    with bench.serve(plain) as server:
        expected = measure(bench, plain, server, None, 4)
    spec = Configuration("bf16 chain of 3", dtype="bfloat16")
    with bench.serve(spec) as server:
        got = measure(bench, spec, server, None, 4)
    partings = []
    for i, (one, other) in enumerate(zip(expected, got, strict=True)):
        place = first_difference(one, other)
        if place is not None:
            partings.append(Parting(i, place, one[place], other[place], one[:place]))
    say(f"bf16: {len(partings)} of {len(expected)} answers part")
    return partings


def explain(bench: Bench, server: Served, partings: Sequence[Parting]) -> None:
    """Check that every parting is a near-tie in float32."""
    found = gaps(server, bench, partings)
    unexplained = [gap for gap in found if gap > TIE_BOUND]
    for one, gap in zip(partings, found, strict=True):
        if gap > TIE_BOUND:
            bench.fail(f"bf16, prompt {one.prompt}, token {one.place}: float32 gap {gap:.4f} > {TIE_BOUND}")
    metrics = {}
    if found:
        metrics = {
            "largest_gap": Metric(max(min(gap, 1e9) for gap in found), "ratio"),
            "median_gap": Metric(statistics.median(found), "ratio"),
        }
    bench.row(
        "bf16_ties",
        Configuration("bf16 chain of 3", dtype="bfloat16"),
        {"bound": TIE_BOUND},
        metrics,
        {"prompts": len(bench.prompts), "parted": len(partings), "unexplained": len(unexplained)},
        note="gap: float32 log-probability of the best token less that of the worse of the two choices, in nats",
    )
    say(f"bf16: {len(unexplained)} of {len(partings)} partings are not near-ties (bound {TIE_BOUND} nats)")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models/nano")
    parser.add_argument("--draft", type=Path, default=ROOT / "models/nano-eagle3")
    parser.add_argument("--prompts", type=Path, default=ROOT / "models/prompts.jsonl")
    parser.add_argument("--count", type=int, default=200, help="prompts (default 200)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt (default 128)")
    parser.add_argument("--quick", action="store_true", help="one float32 configuration and no bfloat16")
    parser.add_argument("--out", type=Path, required=True, help="results file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix; return 0 if nothing differs that should not."""
    options = parse(argv)
    prompts = load_prompts(options.prompts, options.model, options.count)
    results = Results(environments=[capture()])
    with tempfile.TemporaryDirectory() as logs:
        bench = Bench(options.model, options.draft, prompts, options.tokens, Path(logs), results, options.out)
        plain = Configuration("plain", spec=False, radix=False)
        with bench.serve(plain) as server:
            expected = measure(bench, plain, server, None, 1)
            measure(bench, plain, server, expected, 4)
        for configuration in QUICK if options.quick else FLOAT32:
            with bench.serve(configuration) as server:
                for batch in (4, 1):
                    measure(bench, configuration, server, expected, batch)
                if configuration == FLOAT32[1]:
                    streaming(bench, configuration, server, min(20, len(prompts)))
        if not options.quick:
            partings = bfloat16(bench)
            with bench.serve(plain) as server:
                explain(bench, server, partings)
    say(f"{len(bench.failures)} differences; rows in {options.out}")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
