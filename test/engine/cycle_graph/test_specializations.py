"""How many kernels the launch in front of a cycle needs: one a captured size, whatever the cycle's numbers are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
from sglang.srt.speculative.cycle_graph import device
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

# One, multiples of 16 and others are three kinds to the compiler.
KINDS = (1, 16, 5)
ROWS = torch.zeros(16, dtype=torch.int64)
FLOATS, INTEGERS = torch.zeros(16), torch.zeros(16, dtype=torch.int32)


def keys(kernel: Any, calls: list[tuple[Any, ...]]) -> set[str]:
    """What the compiler distinguishes of these calls."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind: Any = create_function_from_signature(kernel.signature, kernel.params, backend)
    return {str(bind(*call, BLOCK=4)[1]) for call in calls}


def load_calls() -> list[tuple[Any, ...]]:
    return [
        (ROWS, live, slot, simulated, counter, INTEGERS, ROWS, batch)
        for live, slot, simulated, counter, batch in itertools.product(
            KINDS, (0, 1, 2), (0, 1, 2), KINDS, KINDS
        )
    ]


def sampling_calls() -> list[tuple[Any, ...]]:
    parameters = (FLOATS, INTEGERS, FLOATS, FLOATS)
    return [(live, *parameters, *parameters, batch) for live, batch in itertools.product(KINDS, KINDS)]


@pytest.mark.parametrize(
    ("kernel", "calls", "otherwise"),
    [(device.load_kernel, load_calls(), 27 * 9), (device.load_sampling_kernel, sampling_calls(), 9)],
    ids=["load", "load sampling"],
)
def test_one_kernel_whatever_the_numbers(kernel: Any, calls: list[tuple[Any, ...]], otherwise: int) -> None:
    assert len(keys(kernel, calls)) == 1
    # The same code without the exception: what a server would compile or load in its first cycles.
    assert len(keys(triton.jit(kernel.fn), calls)) == otherwise
