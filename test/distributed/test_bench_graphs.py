"""What the bench derives: what a reduction adds among other kernels, nodes of a graph, an effect of the order."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.bench_all_reduce import flashinfer_fused, graph_nodes, measure, methods, report, worker
from sglang.bench_all_reduce.worker import Job, Result
from sglang.srt.distributed.one_shot.policy import FUSED, ONE_SHOT, PACKETS, PLAIN, STOCK, TWO_STAGE
from sglang.srt.distributed.one_shot.topology import Topology

PAIR = Topology(
    names=("H200", "H200"),
    buses=("0000:11:00.0", "0000:12:00.0"),
    paths=(("X", "NV18"), ("NV18", "X")),
    driver="580",
)
JOB = Job((0, 1), "cuda", (3,), 7168, torch.bfloat16, 2, 1, "", Path(), PAIR, passes=2)


class Driver:
    """libcuda, as far as nodes are counted; ``kinds`` of a graph's nodes, and a status to answer with."""

    def __init__(self, kinds: list[int], status: int = 0) -> None:
        self.kinds, self.status = kinds, status

    def cuGraphGetNodes(self, graph: Any, nodes: Any, number: Any) -> int:
        assert graph.value == 4711
        size = ctypes.cast(number, ctypes.POINTER(ctypes.c_size_t))
        if nodes is None:
            size[0] = len(self.kinds)
        else:
            for at in range(size[0]):
                nodes[at] = 100 + at
        return self.status

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        ctypes.cast(kind, ctypes.POINTER(ctypes.c_int))[0] = self.kinds[node.value - 100]
        return self.status


def test_nodes_are_counted_by_kind() -> None:
    found = graph_nodes.count(4711, Driver([0, 7, 0, 7, 6, 99]))
    assert found == {"kernel": 2, "event record": 2, "event wait": 1, "kind 99": 1}
    assert graph_nodes.count(4711, Driver([])) == {}
    with pytest.raises(OSError, match="the driver answered 1"):
        graph_nodes.count(4711, Driver([0], status=1))


def test_what_a_step_adds_is_a_difference() -> None:
    assert measure.added([9.0, 10.0], [1.0, 2.0, 6.0]) == [7.0, 8.0]
    assert measure.added([], [1.0]) == []


def result(**between: float) -> Result:
    """Two passes of two repeats; NCCL's chain is slow, and what it adds among other kernels is not."""
    made = Result(gpu="H200", passes=2)
    for name, chain in ((ONE_SHOT, 8.0), ("nccl", 19.0)):
        made.variants[name, PLAIN] = "fork" if name == ONE_SHOT else "upstream"
        made.figures[name, PLAIN, 3] = [chain, chain, chain, chain]
        if name in between:
            made.between[name, PLAIN, 3] = [between[name]] * 4
    return made


def result_of(one_shot: float, nccl: float) -> Result:
    return result(**{ONE_SHOT: one_shot, "nccl": nccl})


def test_the_table_compares_what_a_model_pays() -> None:
    assert report.table_of(JOB, result(), "t").choose(PLAIN, 43_008).method == ONE_SHOT
    assert report.table_of(JOB, result_of(8.0, 7.0), "t").choose(PLAIN, 43_008).method == STOCK
    assert report.table_of(JOB, result_of(4.0, 7.0), "t").choose(PLAIN, 43_008).method == ONE_SHOT
    # A difference that noise has made negative is no figure.
    assert report.table_of(JOB, result_of(-0.1, 7.0), "t").points[0].us[ONE_SHOT] == 8.0


def test_rows_have_both_figures_passes_and_nodes() -> None:
    made = result_of(4.0, 7.0)
    made.figures["nccl", PLAIN, 3] = [19.0, 19.0, 10.0, 10.0]
    made.nodes["nccl", PLAIN, 3] = {"kernel": 1.0, "event record": 1.0}
    row = next(each for each in report.rows_of(JOB, made, "m", "t") if each.case["method"] == "nccl")
    assert {name: metric.value for name, metric in row.metrics.items()} == {
        "us": 14.5,
        "us_between": 7.0,
        "us_pass_1": 19.0,
        "us_pass_2": 10.0,
    }
    assert row.counters == {"kernel nodes a step": 1.0, "event record nodes a step": 1.0}
    text = report.text(JOB, made)
    assert "nccl sum, 3 rows: 19.00, 10.00 us in passes of opposite order" in text
    assert "nccl sum: 1.00 event record, 1.00 kernel" in text and "among other kernels" in text


def test_figures_that_do_not_depend_on_the_order_are_said_to() -> None:
    text = report.text(JOB, result())
    assert "no figure depends on the order" in text and "among other kernels" not in text
    assert "graph nodes" not in text


def test_passes_are_kept_one_behind_the_other_and_the_slowest_rank_counts() -> None:
    made = Result()
    case = ("nccl", PLAIN, 3)
    worker._keep(made, case, [[[1.0, 4.0], []], [[2.0, 3.0], []]], {})
    assert made.figures[case] == [2.0, 4.0] and case not in made.between and case not in made.nodes
    worker._keep(made, case, [[[5.0], [1.0]], [[6.0], [0.5]]], {"kernel": 1.0})
    assert made.figures[case] == [2.0, 4.0, 6.0] and made.between[case] == [1.0]


class Launches:
    """Stands in for kernels on a GPU: remembers how each call would have been launched."""

    dependent_launch = False
    packet_shape = 0

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, int]] = []

    def all_reduce(self, x: torch.Tensor, **words: Any) -> None:
        self.seen.append((words["variant"].value, self.dependent_launch, self.packet_shape))

    def all_reduce_rms_norm(self, x: torch.Tensor, *operands: Any, **words: Any) -> None:
        self.all_reduce(x, **words)


@pytest.mark.parametrize("setting", ["0", "1"])
def test_one_shot_is_measured_with_and_without_dependent_launch(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order: a method leaves nothing behind for the next one."""
    monkeypatch.setenv("SGLANG_FORK_ALL_REDUCE_PDL", setting)
    kernels: Any = Launches()
    x = torch.zeros(3, 8)
    found = methods.ours(kernels, "", shapes=(2, 64))
    wanted = {
        ONE_SHOT: ("one_shot", False, 0),
        methods.ONE_SHOT_PDL: ("one_shot", True, 0),
        PACKETS: ("packets", False, 0),
        methods.PACKETS_PDL: ("packets", True, 0),
        "packets/2": ("packets", False, 2),
        "packets/64": ("packets", False, 64),
        TWO_STAGE: ("two_stage", setting == "1", 0),
    }
    both = [(name, kind) for name in wanted for kind in (PLAIN, FUSED) if "/" not in name]
    shaped = [("packets/2", FUSED), ("packets/64", PLAIN)]  # CTAs a row, threads a CTA
    assert {(method.name, method.kind) for method in found} == {*both, *shaped}
    for method in [*found, *reversed(found)]:
        method.prepare(x)(x)
        assert kernels.seen[-1] == wanted[method.name], method.name
        assert methods.variant_of(method.name).value == wanted[method.name][0]
    # The table has the figures of what a server with this setting launches.
    assert methods.table_name(ONE_SHOT) == (methods.ONE_SHOT_PDL if setting == "1" else ONE_SHOT)
    assert methods.table_name(PACKETS) == (methods.PACKETS_PDL if setting == "1" else PACKETS)
    assert methods.table_name("nccl") == "nccl"
    simulated: Any = SimpleNamespace()
    for others in (methods.ours(simulated, "", shapes=(2,)), methods.ours(None, "no kernels", shapes=(2,))):
        assert {method.name for method in others} == {ONE_SHOT, PACKETS, TWO_STAGE}


def test_what_does_not_fit_packets_is_a_missing_row() -> None:
    message = methods.Method(PACKETS, PLAIN, "fork")
    assert worker._outside(message, 3, JOB, 2) == ""
    assert "too large for packets" in worker._outside(message, 24, JOB, 8)
    assert worker._outside(methods.Method(ONE_SHOT, PLAIN, "fork"), 24, JOB, 8) == ""
    assert worker._outside(methods.Method("nccl", PLAIN, "upstream"), 24, JOB, 8) == ""


@pytest.mark.parametrize(
    ("found", "capability", "words"),
    [
        ({"built": True}, (9, 0), ""),
        ({"built": False}, (9, 0), "not compiled"),
        (None, (9, 0), "not installed"),
        ({"built": True}, (10, 0), "SM100"),  # its backend there makes multicast objects
        ({"built": True}, (12, 0), "SM120"),
    ],
)
def test_flashinfers_is_measured_where_it_is_compiled(
    found: dict[str, bool] | None, capability: tuple[int, int], words: str
) -> None:
    why = flashinfer_fused.reason_against(found, capability)
    assert words in why and bool(why) == bool(words)


def test_flashinfers_call_and_its_place_in_the_table() -> None:
    seen: dict[str, Any] = {}
    made = flashinfer_fused.method("workspace", lambda **words: seen.update(words), "pattern")
    x = torch.zeros(3, 8)
    made.prepare(x)(x)
    assert seen["input"] is x and seen["workspace"] == "workspace" and seen["pattern"] == "pattern"
    assert seen["norm_out"].shape == seen["residual_out"].shape == x.shape
    assert seen["residual_out"] is not seen["residual_in"] and seen["rms_gamma"].shape == (8,)
    found = Result(gpu="H200")
    for name, us in ((ONE_SHOT, 5.0), ("nccl", 9.0), (flashinfer_fused.NAME, 4.0)):
        found.figures[name, FUSED, 3] = [us]
    assert report.table_of(JOB, found, "t").choose(FUSED, 43_008).method == STOCK
    del found.figures[flashinfer_fused.NAME, FUSED, 3]
    assert report.table_of(JOB, found, "t").choose(FUSED, 43_008).method == ONE_SHOT
