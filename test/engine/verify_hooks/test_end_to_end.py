"""The tiny model says the same with and without EAGLE-3 when every attention call goes through our kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
COMPOSED = HERE.parents[2] / "build" / "composed"
LIMIT_S = 420
TOKENS = 8

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.server]


def generate(steps: int) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": str(COMPOSED),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "engine_text.py"), str(steps), str(TOKENS)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ids"')]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def test_text_is_the_same_with_and_without_speculation() -> None:
    plain, speculative = generate(0), generate(2)
    assert plain["ids"] == speculative["ids"]
    assert max(speculative["accept"]) > 1.0
    for result, modes in (
        (plain, {"decode"}),
        (speculative, {"verify", "draft_extend", "draft_decode"}),
    ):
        calls = {name for name in result["counters"] if name.startswith("verify_attention_calls")}
        assert calls == {f'verify_attention_calls{{mode="{mode}",path="fork"}}' for mode in modes}
        assert not result["fallbacks"]
