"""Topology from the doctor's recorded facts, and the gate on faked machines of 4 and 8 GPUs (sglang H1 family)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.distributed.one_shot import gate
from sglang.srt.distributed.one_shot.gate import RankFacts
from sglang.srt.distributed.one_shot.topology import Topology, from_facts, slot

RECORDED = Path(__file__).resolve().parents[1] / "doctor" / "facts"


def recorded(name: str) -> Topology:
    return from_facts(json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("name", "link", "islands", "iommu", "redirects"),
    [
        ("rtxpro6000_x8_switches", "PXB", 1, "passthrough", False),
        ("rtxpro6000_x8_two_sockets", "SYS", 2, "passthrough", False),
        ("rtxpro6000_x8_iommu_translation", "NODE", 1, "translation", True),
        ("h200_x2_nvlink", "NV", 1, "translation", False),
    ],
)
def test_recorded_machines(name: str, link: str, islands: int, iommu: str, redirects: bool) -> None:
    machine = recorded(name)
    whole = list(range(len(machine.names)))
    assert machine.link(whole) == link
    assert len(machine.islands(whole)) == islands
    assert machine.iommu == iommu
    assert bool(machine.redirecting) is redirects
    assert dict(machine.describe())["farthest path"] == link


def test_islands_of_four_across_sockets() -> None:
    machine = recorded("rtxpro6000_x8_two_sockets")
    assert machine.islands(list(range(8))) == ((0, 1, 2, 3), (4, 5, 6, 7))
    # Ranks are placed by the user: islands are of ranks, not of GPUs.
    assert machine.islands([0, 4, 1, 5]) == ((0, 2), (1, 3))


def test_a_subset_has_its_own_farthest_path() -> None:
    machine = recorded("rtxpro6000_x8_switches")
    assert machine.link([0, 1, 2, 3]) == "PIX"
    assert machine.link([0, 4]) == "PXB"
    assert machine.link([3]) == "same"


def test_unknown_is_never_near() -> None:
    machine = recorded("cpu_without_gpu")
    assert machine.pair(0, 1) == "unknown"
    assert machine.link([0, 1, 2]) == "unknown"
    assert Topology(paths=(("X", "BAR"), ("BAR", "X"))).pair(0, 1) == "unknown"
    assert Topology().pair(-1, 0) == "unknown"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("0000:11:00.0", "0000:11:00.0"),
        ("11:00.0", "0000:11:00.0"),
    ],
)
def test_slots(text: str, expected: str) -> None:
    assert slot(text) == expected


def test_a_slot_finds_its_gpu_whatever_is_visible() -> None:
    machine = recorded("rtxpro6000_x8_switches")
    assert [machine.index_of(bus) for bus in machine.buses] == list(range(8))
    assert machine.index_of("0000:99:00.0") == -1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("tp", "cuda", 2), ""),
        (("tp", "cuda", 8), ""),
        (("tp", "cuda", 3), ""),
        (("tp", "cuda", 1), "one rank"),
        (("tp", "cuda", 16), "too many ranks"),
        (("tp", "cpu", 2), "no GPU"),
        (("pdmux_prefill_tp", "cuda", 2), "another group"),
        (("pp", "cuda", 2), "another group"),
        (("tp", "cpu", 2, "simulate"), ""),
        (("tp", "cpu", 9, "simulate"), "too many ranks"),
        (("tp", "cuda", 2, "simulate"), "peers are simulated on a CPU only"),
        (("tp", "cpu", 2, "force"), "no GPU"),
    ],
)
def test_groups(arguments: tuple[Any, ...], reason: str) -> None:
    assert gate.group(*arguments).reason == reason


def rank(index: int, **changes: Any) -> RankFacts:
    facts: dict[str, Any] = {
        "host": "a",
        "bus": f"0000:{index + 1}1:00.0",
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "capability": (12, 0),
        "mode": "auto",
        "pid": 100 + index,
    }
    return RankFacts(**{**facts, **changes})


@pytest.mark.parametrize("ranks", [4, 8])
def test_pcie_machines_of_4_and_8_are_admitted(ranks: int) -> None:
    """vllm#56128: two gates that ask for NVLink shut these machines out; ours asks for no link at all."""
    assert gate.members([rank(index) for index in range(ranks)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "off"}, "switched off"),
        ({"mode": "force"}, "settings differ"),
        ({"host": "b"}, "several machines"),
        ({"capability": (9, 0)}, "GPUs differ"),
        ({"bus": "0000:11:00.0"}, "ranks share a GPU"),
    ],
)
def test_one_different_rank_is_enough_to_refuse(changes: dict[str, Any], reason: str) -> None:
    said = [rank(index) for index in range(3)] + [rank(3, **changes)]
    assert gate.members(said).reason == reason


def test_ranks_on_one_gpu_only_when_forced() -> None:
    said = [rank(index, bus="0000:11:00.0", mode="force") for index in range(2)]
    assert gate.members(said)
