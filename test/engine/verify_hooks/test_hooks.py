"""The hooked Triton backend against the stock one: same outputs, every refusal counted, nothing left when off.

The cases run in processes of their own, because ``TRITON_INTERPRET`` must be set before Triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
COMPOSED = HERE.parents[2] / "build" / "composed"
LIMIT_S = 900
TOLERANCE = {"fp32": 2e-4, "fp16": 4e-3}
TOPICS = "verify-attention,verify-metadata"

pytest.importorskip("triton")
pytestmark = pytest.mark.long


def run_cases(groups: tuple[str, ...], disabled: str = "") -> dict[str, dict[str, Any]]:
    """Results of ``cases.py`` by case name. A failed run is remembered too: it is not tried again by each test."""
    results, problem = _run(groups, disabled)
    if problem:
        pytest.fail(problem)
    return results


@cache
def _run(groups: tuple[str, ...], disabled: str) -> tuple[dict[str, dict[str, Any]], str]:
    if not (COMPOSED / "sglang").is_dir():
        return {}, f"{COMPOSED} is missing: run `make compose`"
    environment = dict(os.environ)
    for name in ("PYTHONDONTWRITEBYTECODE", "SGLANG_FORK_DISABLE"):
        environment.pop(name, None)
    environment |= {"TRITON_INTERPRET": "1", "PYTHONPATH": str(COMPOSED), "OMP_NUM_THREADS": "1"}
    if disabled:
        environment["SGLANG_FORK_DISABLE"] = disabled
    command = [sys.executable, str(HERE / "cases.py"), *groups]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return {}, f"not done after {late.timeout} s"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        return {}, f"failed after {len(lines)} cases:\n{done.stderr[-3000:]}"
    return {line["name"]: line for line in lines}, ""


def on() -> dict[str, dict[str, Any]]:
    return run_cases(("comparisons", "replays", "refusals", "sabotage"))


def counted(result: dict[str, Any], path: str) -> int:
    """Attention calls that took ``path`` (fork or stock)."""
    return int(sum(n for name, n in result["counters"].items() if f'path="{path}"' in name))


def group(prefix: tuple[str, ...]) -> list[dict[str, Any]]:
    found = [result for name, result in on().items() if name.startswith(prefix)]
    assert found
    return found


MODES = ("verify", "draft_extend", "decode", "draft_decode")


@pytest.mark.parametrize("mode", MODES)
def test_eager_output_equals_the_stock_kernel(mode: str) -> None:
    for result in group((f"{mode}-",)):
        assert result["finite"], result
        assert result["magnitude"] > 0.05, result
        assert result["error"] <= TOLERANCE[result["dtype"]] * max(1.0, result["magnitude"]), result
        assert counted(result, "fork") == 1, result
        assert counted(result, "stock") == 0 and not result["fallbacks"], result


@pytest.mark.parametrize("mode", MODES)
def test_replays_follow_changing_lengths_and_padding(mode: str) -> None:
    for result in group((f"graph-{mode}-mla", f"graph-{mode}-gqa")):
        assert result["error"] <= TOLERANCE["fp32"], result
        assert result["counters"][f'verify_metadata_skipped{{mode="{mode}"}}'] == 3, result


def test_a_graph_with_one_stock_layer_keeps_its_metadata() -> None:
    for result in group(("graph-verify-mixed", "graph-decode-mixed")):
        assert result["error"] <= TOLERANCE["fp32"], result
        assert not any(name.startswith("verify_metadata_skipped") for name in result["counters"]), result


REASONS = {
    "topk 2": "verify: draft tree (topk above 1)",
    "ngram": "verify: verify input NGRAM_VERIFY is not known to be a causal chain",
    "sinks": "verify: attention sinks",
    "sinks-decode": "decode: attention sinks",
    "cross": "verify: cross attention",
    "window": "decode: sliding window",
    "temperature": "decode: position-dependent temperature",
    "front": "draft_extend: draft extend window is widened in front",
    "alone": "draft_decode: draft decode outside the multi-step draft backend",
    "deterministic": "decode: deterministic inference",
    "rows": "verify: query rows are not batch x tokens",
}


@pytest.mark.parametrize("name", sorted(REASONS))
def test_what_is_refused_runs_on_the_stock_kernel_and_is_counted(name: str) -> None:
    result = on()[f"refused-{name}"]
    assert result["fallbacks"] == {REASONS[name]: 1}
    assert counted(result, "fork") == 0 and counted(result, "stock") == 1


def test_the_comparison_notices_a_wrong_length() -> None:
    """The control: with every length one short, each mode must differ."""
    for result in group(("sabotage-",)):
        assert result["error"] > 10 * TOLERANCE["fp32"], result


def test_topics_off_leave_upstream_untouched() -> None:
    off = run_cases(("identity", "controls"), TOPICS)
    assert off["identity"]["wrapped"] == [] and off["identity"]["bound"] is False
    for name, result in off.items():
        if name != "identity":
            assert result["counters"] == {} and result["fallbacks"] == {}, name
            assert result["finite"]
