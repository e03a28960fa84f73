"""One engine in a process of its own, driven by lines of JSON on standard input.

Started by ``engines.Fleet``, once a variant: switches of the fork, simulated acceptance and the router's
noise are read from the environment when modules are imported, so variants cannot share a process.

Requests: ``{"op": "measure", "context": C, "batch": B, "tokens": N, "seed": S}`` (with ``"watch": true`` the state
before and after the timed tokens comes along), ``{"op": "generate", "context": C, "batch": B, "tokens": N, "seed": S}``,
``{"op": "state"}``, ``{"op": "profile", "context": C, "tokens": N, "folder": F, "seed": S}`` and ``{"op": "stop"}``.
Every answer is one line that starts with ``MARK``; other output of the engine is not an answer.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "@bench_verify "
# Tokens before the measured stretch: the first cycles after a prefill fill caches and pick up graphs.
LEAD = 8
# Runs of the lead: one that was disturbed would shorten the measured stretch by as much.
LEADS = 3


def measure(
    engine: Any, context: int, batch: int, tokens: int, seed: int, vocabulary: int, watch: bool = False
) -> dict[str, Any]:
    """Milliseconds of a token and of a cycle at one context.

    The same prompts are run for ``LEAD`` (the median of ``LEADS`` runs) and for ``LEAD + tokens`` tokens; the difference
    is decode only. The prompt is in the prefix cache after its first run, so none of them pays for a prefill.
    ``watch`` adds ``states``: the scheduler's statistics right before and right after the longer run.
    """
    prompts = _prompts(context, batch, seed, vocabulary)
    marks = []
    states = []
    # The first call fills the prefix cache, the second compiles what a cached prefix needs; neither is used.
    for count in (2, *(LEAD,) * (1 + LEADS), LEAD + tokens):
        if watch and count > LEAD:
            states.append(state(engine))
        begin = time.perf_counter()
        infos = _run(engine, prompts, count)
        seconds = time.perf_counter() - begin
        cycles = max(int(info.get("spec_verify_ct") or info["completion_tokens"]) for info in infos)
        marks.append((seconds, cycles, infos))
    short, long = sorted(marks[2:-1], key=lambda mark: mark[0])[LEADS // 2], marks[-1]
    elapsed = 1000.0 * (long[0] - short[0])
    if elapsed <= 0:
        raise RuntimeError(
            f"{LEAD + tokens} tokens in {long[0]:.3f} s, {LEAD} in {short[0]:.3f} s: disturbed"
        )
    infos = long[2]
    if watch:
        states.append(state(engine))
    return {
        "ms_per_token": elapsed / tokens,
        "ms_per_cycle": elapsed / max(1, long[1] - short[1]),
        "phases": _phases(infos),
        "kept_length": _mean(infos, "spec_kept_length"),
        "cached_tokens": int(infos[0].get("cached_tokens") or 0),
        "prefill_s": marks[0][0],
        "lead_s": short[0],
        **({"states": states} if watch else {}),
    }


def generate(
    engine: Any, context: int, batch: int, tokens: int, seed: int, vocabulary: int
) -> dict[str, Any]:
    """Run one batch and time nothing: ``completion_tokens`` of each request."""
    infos = _run(engine, _prompts(context, batch, seed, vocabulary), tokens)
    return {"completion_tokens": [int(info["completion_tokens"]) for info in infos]}


def _prompts(context: int, batch: int, seed: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocabulary - 10) for _ in range(context)] for _ in range(batch)]


def _run(engine: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[dict[str, Any]]:
    """Greedy answers of exactly ``tokens`` tokens; ``meta_info`` of each request."""
    outputs = engine.generate(
        input_ids=prompts, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    )
    return [output["meta_info"] for output in outputs]


def _phases(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Phase times as the engine measured them; empty without the statistics topic."""
    record = infos[0].get("spec_cycle") or {}
    return {name[: -len("_ms")]: float(value) for name, value in record.items() if name.endswith("_ms")}


def _mean(infos: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(info[name]) for info in infos if info.get(name) is not None]
    return sum(values) / len(values) if values else None


def profile(
    engine: Any, context: int, tokens: int, folder: str, seed: int, vocabulary: int
) -> dict[str, Any]:
    """Run one request of ``context`` tokens under the torch profiler; names the trace it left in ``folder``."""
    rng = random.Random(seed)
    prompt = [rng.randrange(10, vocabulary - 10) for _ in range(context)]

    def generate(count: int) -> None:
        engine.generate(
            input_ids=prompt, sampling_params={"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        )

    # Twice: the first run pays for the prefill, and the trace should hold cycles only.
    generate(LEAD)
    generate(LEAD)
    engine.start_profile(output_dir=folder)
    generate(tokens)
    engine.stop_profile()
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        traces = sorted(Path(folder).rglob("*.json.gz"), key=lambda path: path.stat().st_mtime)
        # A file that still grows is being written.
        if traces and time.time() - traces[-1].stat().st_mtime > 1.0:
            return {"trace": str(traces[-1])}
        time.sleep(0.25)
    raise TimeoutError(f"no trace in {folder} after 60 s")


def state(engine: Any) -> dict[str, Any]:
    """What the scheduler says about itself: topics, fallbacks, counters, graph capture times, ranks, the switch.

    ``all_reduce`` is who reduces between ranks: by group ``ours``, ``reason``, ``launches`` and ``lines``;
    ``memory_usage`` (GB) and ``startup_time`` (seconds) are upstream's.
    """
    info = engine.get_server_info()
    states = info.get("internal_states") or [{}]
    found: dict[str, Any] = dict(states[0].get("spec_stats") or {})
    for name in ("speculative_auto", "memory_usage", "startup_time"):
        if name in states[0]:
            found[name] = states[0][name]
    if "one_shot_all_reduce" in states[0]:
        found["all_reduce"] = states[0]["one_shot_all_reduce"]
    return found


def main() -> int:
    """Start the engine named on the command line as JSON and serve requests until told to stop."""
    settings = json.loads(sys.argv[1])
    vocabulary = int(settings.pop("vocabulary"))
    begin = time.perf_counter()
    sglang: Any = importlib.import_module("sglang")
    # ``sglang.Engine`` imports at its first call, and imports are told apart from the start.
    importlib.import_module("sglang.srt.entrypoints.engine")
    imported = time.perf_counter() - begin
    engine = sglang.Engine(**settings)
    _answer({"ready": True, "startup_s": time.perf_counter() - begin, "import_s": imported})
    try:
        for line in sys.stdin:
            request = json.loads(line)
            operation = request.pop("op")
            if operation == "stop":
                break
            try:
                if operation == "state":
                    result = state(engine)
                elif operation == "profile":
                    result = profile(engine, vocabulary=vocabulary, **request)
                elif operation == "generate":
                    result = generate(engine, vocabulary=vocabulary, **request)
                else:
                    result = measure(engine, vocabulary=vocabulary, **request)
                _answer({"ok": True, "result": result})
            except Exception as error:
                _answer({"ok": False, "error": f"{type(error).__name__}: {error}"})
    finally:
        engine.shutdown()
    return 0


def _answer(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message, default=str), flush=True)


if __name__ == "__main__":
    sys.exit(main())
