"""What the doctor adds about several ranks: each finding from a fact that is so, and silence from the same without it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from sglang.bench_all_reduce import start_probe
from sglang.srt.distributed.one_shot import fusion_build, policy, start_places, table_file
from sglang.verify_doctor.contributed import all_reduce
from sglang.verify_doctor.facts import document

FACTS = Path(__file__).resolve().parents[1] / "doctor" / "facts"


def facts(name: str, **found: Any) -> dict[str, Any]:
    made = copy.deepcopy(document.read(FACTS / f"{name}.json"))
    made["all_reduce"] = {"name_s": 0.01, "tables": [], "named": None, "setting": "auto", **found}
    return made


PCIE, NVLINK, CPU = "rtxpro6000_x8_switches", "h200_x2_nvlink", "cpu_without_gpu"


@pytest.mark.parametrize(
    ("machine", "seconds", "words"),
    [(PCIE, 0.01, ""), (PCIE, None, "is not to be resolved"), (PCIE, 10.0, "takes 10 s"), (CPU, None, "")],
)
def test_the_machines_own_name(machine: str, seconds: float | None, words: str) -> None:
    found = all_reduce.name(facts(machine, name_s=seconds), "gpu")
    assert bool(found) == bool(words)
    assert not words or (words in found[0].found and "/etc/hosts" in found[0].cure)


def measured(machine: dict[str, Any], path: Path, us: float = 9.0) -> policy.Key:
    """A table of this machine in a file; its key."""
    gpu = machine["nvidia"]["gpus"][0]
    key = policy.Key(gpu["name"], "PXB", 8, machine["nvidia"]["driver"])
    points = [policy.Point(policy.PLAIN, 1, 14_336, {policy.ONE_SHOT: us, policy.STOCK: 24.0})]
    table_file.save(policy.from_measurements(key, points, "t"), path, "2026")
    return key


def test_a_table_of_this_machine_is_named_and_a_broken_one_too(tmp_path: Path) -> None:
    machine = facts(PCIE)
    measured(machine, tmp_path / "a.json")
    machine["all_reduce"]["tables"] = all_reduce.tables(tmp_path)
    (found,) = all_reduce.table(machine, "gpu")
    assert "8 ranks over PXB" in found.found and str(tmp_path / "a.json") in found.found
    (tmp_path / "b.json").write_text("{}")
    (tmp_path / "c.json").write_text('{"schema": "all-reduce-table/2", "poi')
    machine["all_reduce"]["tables"] = all_reduce.tables(tmp_path)
    broken = [each for each in all_reduce.table(machine, "gpu") if each.cure]
    assert [each.level.value for each in broken] == ["warning", "warning"]
    for each, name, words in zip(broken, ("b", "c"), ("no all-reduce-table/2", "cut off"), strict=True):
        assert str(tmp_path / f"{name}.json") in each.found and words in each.found
        assert each.cure == table_file.CURE
    for name in ("b", "c"):
        (tmp_path / f"{name}.json").unlink()
    machine["nvidia"]["driver"] = "590.0"  # the cache may hold tables of several machines: nothing to warn of
    machine["all_reduce"]["tables"] = all_reduce.tables(tmp_path)
    (found,) = all_reduce.table(machine, "gpu")
    assert "bench_all_reduce --write" in found.found and not found.cure


def test_the_table_that_a_setting_names_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLANG_FORK_ALL_REDUCE_TABLE: sound, of another machine, cut off, not there; the cache is not asked then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine, path = facts(PCIE), tmp_path / "mine.json"
    key = measured(machine, path)
    monkeypatch.setenv(all_reduce.TABLE, str(path))

    def look() -> tuple[Any, Any]:
        machine["all_reduce"] = {**all_reduce.gather(), "name_s": 0.01}
        json.dumps(machine["all_reduce"])
        (finding,) = all_reduce.table(machine, "gpu")
        return finding, all_reduce.find(machine, key)

    finding, found = look()
    assert finding.level.value == "ok" and str(path) in finding.found
    assert found.table.choose(policy.PLAIN, 14_336).measured
    text = path.read_text(encoding="utf-8")
    for change, words in (
        (
            lambda: path.write_text(text.replace("PXB", "SYS").replace(key.gpu, "another GPU")),
            "another machine",
        ),
        (lambda: path.write_text(text[: len(text) // 2]), "cut off"),
        (path.unlink, "cannot be read"),
    ):
        change()
        finding, found = look()
        assert finding.level.value == "warning" and words in finding.found and str(path) in finding.found
        assert "unset SGLANG_FORK_ALL_REDUCE_TABLE" in finding.cure
        assert found.refused and found.table == policy.shipped(key) and words in found.advice


@pytest.mark.parametrize(
    ("machine", "mode", "words"),
    [(PCIE, "gpu", "PXB"), (NVLINK, "gpu", "NVLink"), (CPU, "cpu", "")],
)
def test_without_a_table(machine: str, mode: str, words: str) -> None:
    found = all_reduce.table(facts(machine), mode)
    assert bool(found) == bool(words) and (not words or words in found[0].found)


def test_a_setting_is_named() -> None:
    assert "=off" in all_reduce.table(facts(PCIE, setting="off"), "gpu")[0].found


@pytest.mark.parametrize("protocol", ["flags", "packets"])
def test_a_protocol_that_was_asked_for_is_named(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(all_reduce.PROTOCOL, protocol)
    assert all_reduce.gather()["protocol"] == protocol
    default, told = all_reduce.table(facts(PCIE, protocol=protocol), "gpu")
    assert "not measured" in default.found and f"{all_reduce.PROTOCOL}={protocol}" in told.found
    assert len(all_reduce.table(facts(PCIE, protocol=protocol, setting="force"), "gpu")) == 2
    assert len(all_reduce.table(facts(PCIE, protocol=protocol, setting="off"), "gpu")) == 1


def test_a_table_without_figures_of_packets_says_so(tmp_path: Path) -> None:
    machine = facts(PCIE)
    key = measured(machine, tmp_path / "a.json")
    machine["all_reduce"]["tables"] = all_reduce.tables(tmp_path)
    (found,) = all_reduce.table(machine, "gpu")
    assert "packets were not measured" in found.found
    times = {policy.ONE_SHOT: 5.0, policy.PACKETS: 3.0, policy.STOCK: 6.0}
    points = [policy.Point(policy.PLAIN, 1, 14_336, times)]
    table_file.save(policy.from_measurements(key, points, "t"), tmp_path / "a.json", "2026")
    machine["all_reduce"]["tables"] = all_reduce.tables(tmp_path)
    (found,) = all_reduce.table(machine, "gpu")
    assert "packets" not in found.found


def test_the_start_that_stood_still() -> None:
    machine = facts(NVLINK)
    assert all_reduce.start(machine, "gpu") == []
    machine["host"]["cpu"]["features"].append("hypervisor")
    (found,) = all_reduce.start(machine, "gpu")
    assert "enough of a cause and not proven" in found.found and "start_probe" in found.found
    assert all_reduce.start(facts(PCIE), "gpu") == []


def test_the_last_probe_of_a_start_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which step stands still, and what starts without it: the recorded place and the settings that were tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    step = start_probe.STEPS[-2].name
    place = next(place for place in start_places.PLACES if place.signs == ("recv_fd",))
    detail = f"rank 0 at {place.name}, waits for {place.waits_for}"
    hung = start_probe.Outcome(start_probe.BASE, step, "hung", 20.0, detail)
    fine = start_probe.Outcome(start_probe.BASE, start_probe.STEPS[0].name, "ok", 1.0)
    cured = start_probe.Outcome("NCCL_CUMEM_ENABLE=1", step, "ok", 1.0)
    for outcomes, words, cure in (
        ([fine, hung], f"{step}: hung under upstream's settings", start_places.NO_FUSION),
        ([fine, hung, cured], "passes with NCCL_CUMEM_ENABLE=1", "start with NCCL_CUMEM_ENABLE=1"),
        ([fine], "1 steps tried on", ""),
    ):
        start_probe.save(outcomes, start_probe.last())
        machine = facts(NVLINK, start_probe=all_reduce.gather()["start_probe"])
        json.dumps(machine["all_reduce"])
        (found,) = all_reduce.start(machine, "gpu")
        assert words in found.found and cure in found.cure and bool(found.cure) == bool(cure)
    assert (
        place.waits_for
        in all_reduce.start(
            facts(NVLINK, start_probe={"taken": "2026-01-01", "outcomes": [vars(hung)]}), "gpu"
        )[0].found
    )


def test_facts_are_json_and_the_doctor_knows_the_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sglang.verify_doctor.registry import contributions

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    json.dumps(all_reduce.gather())
    found, broken = contributions()
    assert not broken and "one-shot-all-reduce" in [entry.name for entry in found]


def fusion(**changes: Any) -> dict[str, Any]:
    return {"version": "0.6.15", "built": False, "sources": 3, "wanted": 3, "compiler": True, **changes}


@pytest.mark.parametrize(
    ("changes", "words", "cure"),
    [
        ({}, "will be compiled at the first start of several ranks: 3 sources", fusion_build.COMMAND),
        ({"sources": 0}, "cannot be: 0 of 3 sources are installed", start_places.NO_FUSION),
        ({"compiler": False}, "cannot be: there is no nvcc", start_places.NO_FUSION),
        ({"built": True}, "", ""),
    ],
)
def test_a_fused_all_reduce_that_the_first_start_compiles(
    changes: dict[str, Any], words: str, cure: str
) -> None:
    found = all_reduce.fusion(facts(NVLINK, fusion=fusion(**changes)), "gpu")
    assert bool(found) == bool(words)
    for each in found:
        assert each.level.value == "warning" and words in each.found
        assert cure in each.cure and start_places.NO_FUSION in each.cure


def test_nobody_compiles_it_on_one_gpu_elsewhere_or_without_flashinfer() -> None:
    """SM120 has no such kernel, SM100 another module, and older facts do not say."""
    for machine in (facts(PCIE, fusion=fusion()), facts("h200_x1_vm", fusion=fusion()), facts(NVLINK)):
        assert all_reduce.fusion(machine, "gpu") == []
    assert all_reduce.fusion(facts(NVLINK, fusion=None), "gpu") == []
    assert all_reduce.fusion(facts(NVLINK, fusion=fusion()), "cpu") == []


def test_the_compiled_module_is_found_where_flashinfer_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, base = tmp_path / "flashinfer", tmp_path / "base"
    source = package / "data" / "csrc"
    source.mkdir(parents=True)
    folders = {"flashinfer": package}
    monkeypatch.setattr(fusion_build, "_folder", folders.get)
    monkeypatch.setattr(fusion_build.importlib.metadata, "version", lambda name: "0.6.15")
    words = {"FLASHINFER_WORKSPACE_BASE": str(base), "CUDA_HOME": str(tmp_path)}

    def look() -> dict[str, Any]:
        found = fusion_build.look(words)
        assert found is not None
        return found

    assert (look()["built"], look()["sources"]) == (False, 0)
    for name in fusion_build.SOURCES:
        (source / name).touch()
    assert (look()["built"], look()["sources"]) == (False, 3)
    shipped = tmp_path / "flashinfer_jit_cache"
    folders["flashinfer_jit_cache"] = shipped
    for place in (
        base / ".cache" / "flashinfer" / "0.6.15" / "90a" / "cached_ops",
        package / "data" / "aot",
        shipped / "jit_cache",
    ):
        library = place / "trtllm_comm" / "trtllm_comm.so"
        library.parent.mkdir(parents=True)
        assert not look()["built"]  # a folder in which a build has only begun
        library.touch()
        assert look()["built"]
        library.unlink()
    other = (
        base / ".cache" / "flashinfer" / "0.6.14" / "90a" / "cached_ops" / "trtllm_comm" / "trtllm_comm.so"
    )
    other.parent.mkdir(parents=True)
    other.touch()
    assert not look()["built"]  # of another release
    folders.clear()
    assert fusion_build.look(words) is None
