"""Every variant of ``fused.cu`` compiled ahead of time: shared memory, registers, spills, instructions. No device needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from aot import Resources, resources
from sglang.srt.layers.attention.verify import fused_build
from sglang.srt.layers.attention.verify.fused_build import (
    BuildError,
    Variant,
    compile_source,
    deepest,
    machine_code,
)

CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_120a": (12, 0)}
DEFAULT = (("sm_90a", 3, False, False), ("sm_90a", 1, False, True), ("sm_120a", 3, False, False))
ALL = tuple(
    (arch, tiles, half, fp8)
    for arch in CAPABILITY
    for tiles in (1, 2, 3, 4)
    for half in (False, True)
    for fp8 in (False, True)
)


def check(arch: str, tiles: int, half: bool, fp8: bool) -> Resources:
    """Compile one variant and hold it against the limits of its architecture."""
    variant = deepest(tiles, half, fp8, CAPABILITY[arch])
    assert variant is not None
    found = resources(machine_code(variant, arch), variant.shared_bytes())
    assert found.shared <= fused_build.SHARED_LIMIT[CAPABILITY[arch]]
    # Twelve warps share a multiprocessor's registers.
    assert found.registers <= 168
    # Four row tiles keep 64 sums and 72 words of queries a thread: a few are put aside, outside the loop over keys.
    assert found.spill_bytes <= (112 if tiles == 4 else 0), found.spill_bytes
    assert found.count("HMMA") and found.count("LDSM")
    assert "LDGSTS.E.BYPASS.128" in found.sass, "keys without 16-byte copies"
    return found


@pytest.mark.parametrize(("arch", "tiles", "half", "fp8"), DEFAULT)
def test_resources(arch: str, tiles: int, half: bool, fp8: bool) -> None:
    check(arch, tiles, half, fp8)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "tiles", "half", "fp8"), ALL)
def test_resources_of_every_variant(arch: str, tiles: int, half: bool, fp8: bool) -> None:
    check(arch, tiles, half, fp8)


def test_control_a_deeper_ring_breaks_the_limit_of_sm_120() -> None:
    assert Variant(3, False, False, 3).shared_bytes() > fused_build.SHARED_LIMIT[(12, 0)]


def test_the_cache_is_used_and_survives_being_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(fused_build, "compile_source", lambda *args: compiled.append("x") or b"code")
    monkeypatch.setenv(fused_build.CACHE_VARIABLE, str(tmp_path / "cache"))
    variant = Variant(1, False, False, 5)
    assert machine_code(variant, "sm_90a") == machine_code(variant, "sm_90a") == b"code"
    assert len(compiled) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(fused_build.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    assert machine_code(variant, "sm_90a") == b"code" and len(compiled) == 2


def test_a_refusal_of_the_compiler_carries_its_log() -> None:
    with pytest.raises(BuildError) as caught:
        compile_source("this is no program", ("--gpu-architecture=sm_90a",), {})
    assert "refuses" in caught.value.reason and "error" in caught.value.detail


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_build, "_candidates", lambda: iter(("libnothing.so.0",)))
    with pytest.raises(BuildError, match="no run-time compiler"):
        compile_source("", (), {})
