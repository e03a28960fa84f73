"""The Triton glue against the PyTorch glue under Triton's interpreter; ``test_kernels.py`` runs it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import cycles
import pytest
import torch
from sglang.srt.speculative.cycle_graph import kernels, program, steps
from sglang.srt.speculative.cycle_graph.buffers import Sampling

SHAPES = (
    cycles.Shape(),
    cycles.Shape(batch=1, live=1),
    cycles.Shape(batch=5, live=0),
    cycles.Shape(batch=7, live=7, requests=13, width=2),
    cycles.Shape(
        batch=4, live=3, width=5, shared=False, vocabulary=131, draft_vocabulary=67, hidden=71, packed=213
    ),
    cycles.Shape(batch=2, live=1, width=9, context=64, vocabulary=97),
)
# ``maxima`` and ``indices`` are the kernels' own; boundaries' times are no numbers to compare.
OWN = ("scratch.maxima", "scratch.indices", "scratch.draft", "results.marks")


def both(
    shape: cycles.Shape, seed: int, simulated: int, bad: tuple[tuple[int, float], ...], real: bool
) -> list[str]:
    parts, draft_parts = kernels.parts(shape.vocabulary), kernels.parts(shape.draft_vocabulary)
    left = dataclasses.replace(cycles.make(shape, seed, parts, draft_parts), real_tokens=real)
    right = cycles.duplicate(left)
    rows = cycles.choose_rows(shape, seed)
    for buffers, glue in ((left, steps), (right, kernels)):
        stand = cycles.Stand(buffers, seed, bad)
        for cycle in range(3):
            glue.load(buffers, rows, cycle % 4, simulated)
            program.run(buffers, glue, stand)
    live = shape.live
    # Results of padded requests are not written by the kernels and not read by anybody.
    for buffers in (left, right):
        buffers.results.tokens[:, live * shape.width :] = 0
        buffers.results.lengths[:, live:] = 0
        buffers.results.good[:, live:] = 0
    return cycles.differences(left, right, ignore=OWN)


@pytest.mark.parametrize("columns", (16, 4096))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_glue_equals_steps(shape: cycles.Shape, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COLUMNS", columns)
    for seed in range(2):
        assert both(shape, seed, 0, (), False) == []


@pytest.mark.parametrize("simulated", (1, 2, 3))
@pytest.mark.parametrize("real", (False, True))
def test_simulated_lengths(simulated: int, real: bool) -> None:
    assert both(cycles.Shape(), 5, simulated, (), real) == []


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("row", range(6))
def test_bad_rows(row: int, value: float) -> None:
    assert both(cycles.Shape(), 9, 0, ((row, value),), False) == []


@pytest.mark.parametrize("shape", (cycles.Shape(), cycles.Shape(batch=1, live=1, width=4)), ids=str)
def test_drawn_rows(shape: cycles.Shape) -> None:
    left = cycles.make(shape, 8)
    left = dataclasses.replace(left, sampling=Sampling.allocate(shape.batch, torch.device("cpu")))
    right = cycles.duplicate(left)
    rows, live = cycles.choose_rows(shape, 8), shape.live
    info = SimpleNamespace(
        temperatures=torch.full((live, 1), 0.7),
        top_ks=torch.tensor([1, 5][:live], dtype=torch.int32),
        top_ps=torch.full((live,), 0.9),
        min_ps=torch.full((live,), 0.01),
    )
    for buffers, glue in ((left, steps), (right, kernels)):
        stand = cycles.Stand(buffers, 8, ((1, float("nan")),))
        for cycle in range(3):
            glue.load(buffers, rows, cycle, 0, 1000 + cycle)
            glue.load_sampling(buffers, info)
            program.run(buffers, glue, stand)
        buffers.results.tokens[:, live * shape.width :] = 0
        buffers.results.lengths[:, live:] = 0
        buffers.results.good[:, live:] = 0
    assert cycles.differences(left, right, ignore=("scratch.draft", "results.marks")) == []


def test_equal_maxima_choose_the_first() -> None:
    shape = cycles.Shape(batch=1, live=1)
    buffers = cycles.make(shape, 3)
    kernels.load(buffers, torch.tensor([4]), 0, 0)
    stand = cycles.Stand(buffers, 3)
    kernels.begin(buffers)
    stand.draft()
    kernels.verify_inputs(buffers)
    stand.verify()
    buffers.verify.logits[:, 7] = 50.0
    buffers.verify.logits[:, 30] = 50.0
    kernels.accept(buffers)
    assert int(buffers.results.tokens[0, 0]) == 7


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = kernels.relay

    def late(buffers: object) -> None:
        honest(buffers)  # type: ignore[arg-type]
        buffers.relay.lengths.add_(1)  # type: ignore[attr-defined]

    monkeypatch.setattr(kernels, "relay", late)
    assert both(cycles.Shape(), 1, 0, (), False)
