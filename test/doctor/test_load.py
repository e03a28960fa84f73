"""The load on GPUs that fail: its reason at once, and nobody waits for a GPU that does not come."""

from __future__ import annotations

import time

import pytest
from sglang.verify_doctor.facts import load

# What the work asks of torch, on two GPUs; PLACE names where the second one fails.
TORCH = """
import contextlib, sys, threading, time, types
here = threading.local()

@contextlib.contextmanager
def device(index):
    here.index = index
    yield

def ask(place):
    if place == "PLACE" and here.index == 1:
        raise RuntimeError("CUDA error: out of memory\\nCompile with TORCH_USE_CUDA_DSA")

def matmul(a, b, out):
    time.sleep(0.001)
    here.calls = getattr(here, "calls", 0) + 1
    ask("first" if here.calls == 1 else "later")

torch = types.ModuleType("torch")
torch.bfloat16 = None
torch.randn = lambda *_, **__: ask("begin")
torch.empty_like = lambda _: None
torch.matmul = matmul
torch.cuda = types.SimpleNamespace(device_count=lambda: 2, device=device, synchronize=lambda: None)
sys.modules["torch"] = torch
"""
LIMIT_S = 20.0


@pytest.mark.parametrize("place", ["begin", "first", "later"])
def test_one_of_two_fails(place: str) -> None:
    begin = time.monotonic()
    program = TORCH.replace("PLACE", place) + load._WORK.format(seconds=0.2)
    found = load._measure(program, LIMIT_S)
    assert found == {
        "error": "GPU 1: RuntimeError: CUDA error: out of memory Compile with TORCH_USE_CUDA_DSA"
    }
    assert time.monotonic() - begin < LIMIT_S


def test_control_none_fails() -> None:
    found = load._measure(TORCH + load._WORK.format(seconds=0.2), LIMIT_S)
    assert "error" not in found and len(found["tflops"]) == 2 and all(found["tflops"])
