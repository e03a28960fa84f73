"""Builds ``fused.cu`` and ``warpgroup.cu`` at run time (NVRTC, which comes with PyTorch) and keeps the machine code on disk.

No compiler driver, headers or network are needed, and no device: the tests compile every variant with it.
``fused_driver`` loads the result.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.verify_settings import read_text

_HERE = Path(__file__).parent
# A source, then what it includes.
FUSED = tuple(
    _HERE / name
    for name in ("fused.cu", "fused_device.cuh", "fused_merge.cuh", "fused_tile.cuh", "fused_work.cuh")
)
WARPGROUP = tuple(
    _HERE / name
    for name in (
        "warpgroup.cu", "warpgroup_device.cuh", "warpgroup_list.cuh", "warpgroup_merge.cuh",
        "warpgroup_split.cuh", "fused_device.cuh", "fused_work.cuh",
    )
)  # fmt: skip
CACHE_VARIABLE = "SGLANG_FORK_KERNEL_CACHE"
STAGE_KEYS = 32
# Bytes of shared memory that one block may have.
SHARED_LIMIT = {(9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448, (12, 0): 101_376, (12, 1): 101_376}

# Of the kernels in ``warpgroup.cu``: threads of a block of the list, the split and the merge, packets that the latter adds up.
WARPGROUP_LIST_THREADS, WARPGROUP_THREADS, WARPGROUP_MERGE_THREADS, WARPGROUP_PACKETS = 128, 256, 256, 16
# Words of a work item in the list of a forward pass.
WARPGROUP_LINE = 160
# From this batch on the merge has a quarter of its blocks: requests have so few splits that most would have nothing to do.
WARPGROUP_FEWER_FROM, WARPGROUP_FEWER = 8, 4


class BuildError(RuntimeError):
    """The kernel cannot be built or loaded here. ``reason`` fits a counter label, ``detail`` a log line."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def _options(arch: str, traced: bool, **choices: int) -> tuple[str, ...]:
    """Options of the run-time compiler for ``arch`` ("sm_90a"), with ``choices`` as macros."""
    macros = (f"-D{name}={value}" for name, value in choices.items())
    return (f"--gpu-architecture={arch}", "--std=c++17", *macros, *(("-DTRACE",) if traced else ()))


@dataclass(frozen=True)
class Variant:
    """Compile-time choices of ``fused.cu``: row tiles of 8, fp16 instead of bf16, fp8 cache, ring depth, time stamps."""

    row_tiles: int
    half: bool
    fp8: bool
    stages: int
    traced: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """The source, then what it includes."""
        return FUSED

    def options(self, arch: str) -> tuple[str, ...]:
        """Options of the run-time compiler for ``arch`` ("sm_90a")."""
        return _options(
            arch, self.traced, NT=self.row_tiles, HALF=int(self.half), FP8=int(self.fp8), STAGES=self.stages
        )

    def shared_bytes(self) -> int:
        """Shared memory of a block: the ring, scores and probabilities, barriers (a test compares with the source)."""
        rows = 8 * self.row_tiles
        pitch = (576 if self.fp8 else 1152) + 16
        keys = STAGE_KEYS * (2 if self.stages >= 5 and self.row_tiles + self.fp8 <= 3 else 1)
        scores = 4 * rows * (keys + 4) * 4 + rows * (2 * keys + 16) + rows * 4 + rows * 8
        return self.stages * STAGE_KEYS * pitch + scores + 16 * self.stages


@dataclass(frozen=True)
class WarpgroupVariant:
    """Compile-time choices of ``warpgroup.cu``: row tiles of 8, fp16 instead of bf16, time stamps.

    ``listed``: split and merge read the work list of a forward pass, which a third kernel writes. ``pace``: parts of
    16 keys by 192 dims under way at once in the first stage, until the queries are there, and from then on.
    """

    row_tiles: int
    half: bool
    traced: bool = False
    listed: bool = False
    pace: tuple[int, int, int] = (3, 4, 8)
    stages: int = 5

    @property
    def files(self) -> tuple[Path, ...]:
        """The source, then what it includes."""
        return WARPGROUP

    def options(self, arch: str) -> tuple[str, ...]:
        """Options of the run-time compiler for ``arch`` ("sm_90a")."""
        return _options(
            arch,
            self.traced,
            NT=self.row_tiles,
            HALF=int(self.half),
            LISTED=int(self.listed),
            STAGES=self.stages,
            PACE_FIRST=self.pace[0],
            PACE_EARLY=self.pace[1],
            PACE=self.pace[2],
        )

    def shared_bytes(self) -> int:
        """Shared memory of a split block: ring, queries, probabilities twice, rows, barriers."""
        rows = 8 * self.row_tiles
        barriers = 16 * (self.stages + 1)
        return self.stages * STAGE_KEYS * 1152 + rows * (1152 + 2 * 64 * 2 + 2 * 4 * 4) + barriers

    def merge_bytes(self) -> int:
        """Shared memory of a merge block: sums of its threads, maxima and sums of weights of rows."""
        return WARPGROUP_MERGE_THREADS * (40 + 2)

    @property
    def split_packets(self) -> int:
        """16-byte packets that a split leaves."""
        return self.row_tiles * 8 * 512 // 8

    @property
    def merge_blocks(self) -> int:
        """Merge blocks a request."""
        return self.split_packets // WARPGROUP_PACKETS

    def merge_columns(self, batch: int) -> int:
        """How many of them a launch has for each request of ``batch``; they do the work of all."""
        return self.merge_blocks // (WARPGROUP_FEWER if batch >= WARPGROUP_FEWER_FROM else 1)


def deepest(row_tiles: int, half: bool, fp8: bool, capability: tuple[int, int]) -> Variant | None:
    """The variant with the deepest useful ring that fits a block of ``capability``, if one with two tiles does."""
    limit = SHARED_LIMIT.get(capability, 0)
    for stages in range(8 if fp8 else 5, 1, -1):
        variant = Variant(row_tiles, half, fp8, stages)
        held = -(-8 * row_tiles * 1168 // (STAGE_KEYS * (592 if fp8 else 1168)))
        if variant.shared_bytes() <= limit and held < stages:
            return variant
    return None


def _candidates() -> Iterator[str]:
    """Names of the compiler library: beside PyTorch's other CUDA libraries, then wherever the loader finds one."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(
            (str(p) for p in Path(root).glob("*/lib/libnvrtc.so.*") if "alt" not in p.name), reverse=True
        )
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _compiler() -> ctypes.CDLL:
    for name in _candidates():
        try:
            # It looks for its second half by name only, where the loader does not find PyTorch's copy.
            for half in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")) if "/" in name else []:
                ctypes.CDLL(str(half), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BuildError("no run-time compiler (libnvrtc)")


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw[: size.value]


def compile_source(source: str, options: tuple[str, ...], headers: Mapping[str, str]) -> bytes:
    """Machine code of ``source``; ``headers`` by name. Raises BuildError; its detail is the compiler's log."""
    library = _compiler()
    program = ctypes.c_void_p()
    encoded = [o.encode() for o in options]
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", len(headers), texts, names
    )
    if status:
        raise BuildError("the run-time compiler does not start")
    try:
        array = (ctypes.c_char_p * len(encoded))(*encoded)
        if library.nvrtcCompileProgram(program, len(encoded), array):
            log = _text(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise BuildError("the run-time compiler refuses the kernel", log)
        return _text(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def cache_directory() -> Path:
    """Where machine code is kept: ``SGLANG_FORK_KERNEL_CACHE``, or the user's cache directory."""
    chosen = read_text(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-fork" / "kernels"


def machine_code(variant: Variant | WarpgroupVariant, arch: str) -> bytes:
    """Machine code of ``variant`` for ``arch``, from the cache if it is there.

    Raises:
        BuildError: no compiler, or it refuses. An unwritable cache is no error, only slow.
    """
    main, *included = variant.files
    source = main.read_text(encoding="utf-8")
    headers = {path.name: path.read_text(encoding="utf-8") for path in included}
    options = variant.options(arch)
    name = hashlib.sha256("\0".join((source, *headers.values(), *options)).encode()).hexdigest()[:32]
    path = cache_directory() / f"{main.stem}-{arch}-{name}.cubin"
    try:
        code = path.read_bytes()
        if code:
            return code
    except OSError:
        pass
    code = compile_source(source, options, headers)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that ranks that start together never see half a file.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as scratch:
            scratch.write(code)
        os.replace(scratch.name, path)
    except OSError:
        pass
    return code
