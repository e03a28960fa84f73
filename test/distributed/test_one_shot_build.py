"""The kernels ahead of time: every target compiles, nothing spills; what a machine without a compiler is told."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from sglang.srt.distributed.one_shot import build, library, nvcc
from sglang.srt.distributed.one_shot.errors import NotBuilt, OneShotError

try:
    COMPILER = nvcc.find_compiler()
except nvcc.CompileError as error:
    COMPILER, WHY = "", str(error)
else:
    WHY = ""

# Blackwell's workstation cards have the least shared memory; the kernels use a few hundred bytes of it.
SHARED_LIMIT = 1024
REGISTER_FILE = 65_536  # of one SM


def threads_of(kernel: str) -> int:
    """Most threads of a CTA of a kernel (its launch bound)."""
    ranks = re.search(r"packet_kernelI\w+Lb[01]ELi(\d)E", kernel)
    return {"2": 896, "4": 512, "8": 256}[ranks[1]] if ranks else 512


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of one kernel."""

    name: str
    registers: int
    spilled: int
    stack: int
    shared: int


def kernels_in(text: str) -> list[Kernel]:
    """Parse ``ptxas -v``."""
    found = []
    for block in text.split("Compiling entry function")[1:]:
        name = re.search(r"'(\S+)'", block)
        resources = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
        )
        registers = re.search(r"Used (\d+) registers", block)
        assert name and resources and registers, block
        stack, stores, loads = map(int, resources.groups())
        shared = re.search(r"(\d+) bytes smem", block)
        found.append(
            Kernel(name[1], int(registers[1]), stores + loads, stack, int(shared[1]) if shared else 0)
        )
    return found


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """The library for one target, and what the assembler printed; each is compiled once."""
    folder = tmp_path_factory.mktemp("library")

    @functools.cache
    def library_for(name: str) -> tuple[Path, str]:
        if not COMPILER:
            pytest.skip(WHY)
        out = folder / f"{name}.so"
        return out, nvcc.compile_library(build.SOURCES, out, (name,), extra=("-Xptxas", "-v"))

    return library_for


@pytest.fixture
def for_hopper(libraries: Callable[[str], tuple[Path, str]]) -> tuple[Path, str]:
    return libraries("90a")


@pytest.mark.parametrize("name", nvcc.ARCHITECTURES)
def test_no_kernel_spills_and_all_fit(libraries: Callable[[str], tuple[Path, str]], name: str) -> None:
    kernels = kernels_in(libraries(name)[1])
    # Two dtypes, plain and fused: one-shot and two-stage, and packets for 2, up to 4 and up to 8 ranks.
    assert len(kernels) == 2 * 2 * (2 + 3)
    for kernel in kernels:
        assert (kernel.spilled, kernel.stack) == (0, 0), kernel
        assert kernel.registers * threads_of(kernel.name) <= REGISTER_FILE, kernel
        assert kernel.shared <= SHARED_LIMIT, kernel


def test_the_library_loads_without_a_driver_and_mirrors_the_structures(for_hopper: tuple[Path, str]) -> None:
    loaded = library.Library(for_hopper[0])
    layout = loaded.layout(64, 8192, 64, 8, False)
    assert layout.channels == 64
    assert layout.capacity == 1024  # 64 x 8192 elements are 65,536 units, dealt to 64 channels
    assert layout.packets == layout.slots + 64 * 2 * 8 * 1024 * 16
    # 8 ranks send up to 9 rows of that width in packets, or more of narrower ones.
    assert layout.packet_capacity == 320
    assert layout.bytes == layout.packets + 64 * 2 * 8 * 2 * 320 * 16
    assert loaded.layout(64, 8192, 64, 2, False).packet_capacity == 1024
    pairs = loaded.layout(4, 2048, 4, 8, True)
    assert pairs.channels == 4 + 28
    assert pairs.capacity == 4 * 2048 // 8
    with pytest.raises(OneShotError, match="one_shot_layout"):
        loaded.layout(1, 8200, 64, 8, False)
    with pytest.raises(OneShotError, match="one_shot_alloc: "):  # no driver here, or no device 99
        loaded.number("alloc", 99, 1024)


@pytest.mark.parametrize(
    ("hidden", "blocks"), [(8, 1), (136, 2), (4096, 1), (7168, 7), (7168, 64), (8192, 64)]
)
def test_every_call_that_fits_the_room_fits_the_slots(
    for_hopper: tuple[Path, str], hidden: int, blocks: int
) -> None:
    loaded = library.Library(for_hopper[0])
    layout = loaded.layout(17, hidden, blocks, 3, False)

    def shape(**fields: int) -> tuple[int, ...]:
        call = library.Call(layout=layout, ranks=3, members=7, max_blocks=blocks, rows=1, hidden=hidden)
        for name, value in fields.items():
            setattr(call, name, value)
        return loaded.geometry(call)

    for rows, fused in product(range(1, 18), (0, 1)):
        for width in {8, hidden // 2 // 8 * 8 or 8, hidden}:
            count, threads, cluster, turns = shape(rows=rows, hidden=width, fused=fused)
            assert count <= blocks and count % cluster == 0 and threads <= 512
            assert turns * threads <= layout.capacity
            if fused:
                assert cluster * threads * 8 >= width and count // cluster * turns >= rows
            else:
                assert count * threads * turns * 8 >= rows * width
    for rows, fused, shape_ in product(range(1, 18), (0, 1), (0, 1, 2, 8, 32, 256)):
        for width in {8, hidden // 2 // 8 * 8 or 8, hidden}:
            if shape_ and (shape_ < 32) != bool(fused):
                with pytest.raises(OneShotError, match="invalid argument"):
                    shape(rows=rows, hidden=width, fused=fused, variant=2, shape=shape_)
                continue
            count, threads, cluster, turns = shape(
                rows=rows, hidden=width, fused=fused, variant=2, shape=shape_
            )
            assert 1 <= count <= blocks and count % cluster == 0 and threads <= 512
            assert turns * threads <= layout.packet_capacity
            if fused:
                assert cluster * threads * 8 >= width and count // cluster * turns >= rows
                assert (cluster - 1) * threads * 8 < width  # no CTA without a unit of its row
            else:
                assert count * threads * turns * 8 >= rows * width
    refused = [
        {"rows": 0}, {"hidden": 12}, {"hidden": 8200}, {"members": 6}, {"members": 15}, {"first_channel": blocks},
        {"variant": 1, "members": 3}, {"variant": 2, "members": 3}, {"rank": 3}, {"ranks": 9}, {"variant": 3},
        {"shape": 2}, {"variant": 2, "shape": 3, "fused": 1},
    ]  # fmt: skip
    for change in refused:
        with pytest.raises(OneShotError, match="invalid argument"):
            shape(**change)
    if hidden == 8192:
        with pytest.raises(OneShotError, match="invalid argument"):
            shape(rows=64)  # the room was for 17


def test_stores_are_wide_and_flags_are_ordered(for_hopper: tuple[Path, str]) -> None:
    """What the assembler made of it: 16-byte stores, a system fence before the flag, no cached flag."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        pytest.skip("no cuobjdump in this Triton")
    text = subprocess.run(
        [str(tool), "-sass", str(for_hopper[0])], capture_output=True, text=True, check=True
    ).stdout
    functions = {part.split("\n", 1)[0]: part for part in text.split("Function : ")[1:]}
    flags = [body for name, body in functions.items() if "all_reduce_kernel" in name]
    packets = [body for name, body in functions.items() if "packet_kernel" in name]
    assert (len(flags), len(packets)) == (8, 12)
    for body in [*flags, *packets]:
        assert "STG.E.128" in body and "LDG.E.128" in body
        assert "STL" not in body and "LDL" not in body
    for body in flags:
        flag = body.index("STG.E.64.STRONG.SYS")  # 64 bits: a flag of 32 wraps within days
        # The barrier before a flag asks every thread whether it saw the workspace poisoned.
        assert body.index("STG.E.128") < body.index("BAR.RED.AND") < body.index("MEMBAR.ALL.SYS") < flag
        assert flag < body.index("LDG.E.64.STRONG.SYS")
    for body in packets:
        # Data and epoch in one access each way, and no fence but that of the record of a failed wait, which is last.
        pushed = body.index("STG.E.128.STRONG.SYS")
        received = body.index("LDG.E.128.STRONG.SYS")
        assert pushed < received < body.index("MEMBAR.ALL.SYS")
        assert body.count("MEMBAR.ALL.SYS") == 1 and body.index("MEMBAR.ALL.SYS") > body.index("EXIT")
        assert "STG.E.64.STRONG.SYS" not in body
        # Every thread polls; a look at the host's word every 256 polls made one late rank late the other, and so on.
        assert "0x1fff" in body


def test_without_a_compiler_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    with pytest.raises(
        NotBuilt, match=r"no prebuilt kernels for sm_90a, and compiling failed: nvcc is not there.*12\.8"
    ):
        build.locate((9, 0))


def fake_compiler(folder: Path, release: str, status: int = 0) -> None:
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "release {release}, V{release}" && exit 0\necho "x.cu: error: broken" >&2\nexit {status}\n'
    )
    path.chmod(0o755)


def test_an_old_toolkit_and_a_failing_one_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    fake_compiler(tmp_path / "old", "11.8")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    with pytest.raises(NotBuilt, match=r"CUDA 11\.8; 12\.8 or newer"):
        build.locate((9, 0))
    fake_compiler(tmp_path / "bad", "13.0", status=2)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "bad"))
    with pytest.raises(NotBuilt, match=r"failed with status 2: x\.cu: error: broken"):
        build.locate((12, 0))


def test_devices_without_clusters_are_refused_by_name() -> None:
    with pytest.raises(NotBuilt, match=r"8\.9 is below 9\.0"):
        build.locate((8, 9))
    assert [build.architecture(c) for c in ((9, 0), (10, 0), (12, 0), (10, 3))] == [
        "90a",
        "100a",
        "120a",
        "103a",
    ]


def test_a_prebuilt_library_counts_only_with_these_sources_and_that_target(tmp_path: Path) -> None:
    sources, wheel = tmp_path / "csrc", tmp_path / "wheel"
    sources.mkdir()
    wheel.mkdir()
    (sources / "launch.cu").write_text("1")
    assert build.prebuilt("90a", wheel, sources) is None
    facts = {"architectures": ["90a"], "digest": nvcc.digest(sources, ["90a"])}
    (wheel / nvcc.FACTS).write_text(json.dumps(facts))
    found = build.prebuilt("90a", wheel, sources)
    assert found is not None and found.path == wheel / nvcc.LIBRARY
    assert build.prebuilt("120a", wheel, sources) is None
    (sources / "launch.cu").write_text("2")
    assert build.prebuilt("90a", wheel, sources) is None


def test_what_a_wheel_build_writes_is_what_a_process_finds(tmp_path: Path) -> None:
    if not COMPILER:
        pytest.skip(WHY)
    nvcc.build_into(tmp_path / "prebuilt", build.SOURCES, ("90a",))
    found = build.prebuilt("90a", tmp_path / "prebuilt")
    assert found is not None and found.how == "prebuilt for sm_90a"
    assert library.Library(found.path).path == found.path


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"not a library")
    with pytest.raises(NotBuilt, match="does not load"):
        library.Library(tmp_path / "x.so")
