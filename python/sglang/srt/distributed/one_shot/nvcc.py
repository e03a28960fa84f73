"""Compiling the kernels: with the CUDA toolkit's ``nvcc`` and a C++ compiler, and nothing of PyTorch.

Standard library only, and nothing of this package: the wheel build loads this file by its path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = ("launch.cu", "sharing.cu")
# What a wheel carries, and facts about it.
LIBRARY, FACTS = "one_shot.so", "one_shot.json"
# The "a" targets are not forward compatible; other devices compile when first used.
ARCHITECTURES = ("90a", "100a", "120a")
FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-shared")
OLDEST_TOOLKIT = (12, 8)  # the first that knows sm_100 and sm_120
LIMIT_S = 300


class CompileError(RuntimeError):
    """Why the kernels could not be compiled: no compiler, one that is too old, or its last lines."""


def digest(folder: Path, architectures: Sequence[str], defines: Sequence[str] = ()) -> str:
    """Hex digest of the sources in ``folder`` and of how they are compiled; names a compiled library."""
    value = hashlib.sha256(repr((FLAGS, tuple(architectures), tuple(defines))).encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in {".cu", ".cuh", ".h"}:
            value.update(path.name.encode() + b"\0" + path.read_bytes())
    return value.hexdigest()[:16]


def find_compiler() -> str:
    """Path of ``nvcc``: ``CUDA_HOME`` or ``CUDA_PATH``, then PATH, then /usr/local/cuda.

    Raises:
        CompileError: none there, or older than CUDA 12.8.
    """
    places = [
        Path(os.environ[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)
    ]
    on_path = shutil.which("nvcc")
    places += [Path(on_path)] if on_path else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    for place in places:
        if place.is_file() and os.access(place, os.X_OK):
            _refuse_old(str(place))
            return str(place)
    raise CompileError(
        "nvcc is not there (looked in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda); install the CUDA toolkit "
        "12.8 or newer, or a wheel that was built where it is installed"
    )


def _refuse_old(compiler: str) -> None:
    try:
        text = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"{compiler} does not run ({error})") from error
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found is None:
        raise CompileError(f"{compiler} --version does not name a release")
    version = (int(found[1]), int(found[2]))
    if version < OLDEST_TOOLKIT:
        wanted = ".".join(map(str, OLDEST_TOOLKIT))
        raise CompileError(f"{compiler} is of CUDA {found[1]}.{found[2]}; {wanted} or newer is needed")


def command(
    compiler: str,
    folder: Path,
    out: Path,
    architectures: Sequence[str],
    defines: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> list[str]:
    """The command line that compiles all sources of ``folder`` into ``out``."""
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    macros = [f"-D{name}" for name in defines]
    sources = [str(folder / name) for name in SOURCES]
    return [compiler, *FLAGS, *targets, *macros, *extra, "-o", str(out), *sources]


def compile_library(
    folder: Path,
    out: Path,
    architectures: Sequence[str] = ARCHITECTURES,
    defines: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> str:
    """Compile to ``out``, which appears whole or not at all. Returns what the compiler printed.

    Args:
        folder: the sources.
        out: the shared library.
        architectures: names as in ``sm_<name>``.
        defines: macros to set.
        extra: more options (``-Xptxas -v``).

    Raises:
        CompileError: see :func:`find_compiler`; compiling failed or took more than 300 s.
    """
    compiler = find_compiler()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=out.parent) as scratch:
        staged = Path(scratch) / out.name
        line = command(compiler, folder, staged, architectures, defines, extra)
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"{compiler} was not done after {LIMIT_S} s") from error
        if done.returncode or not staged.is_file():
            last = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:]) or "no message"
            raise CompileError(f"{compiler} failed with status {done.returncode}: {last}")
        os.replace(staged, out)
    return done.stdout + done.stderr


def build_into(folder: Path, sources: Path, architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile the library that a wheel carries, with the facts by which it is recognised. Raises CompileError."""
    compile_library(sources, folder / LIBRARY, architectures)
    facts = {"architectures": list(architectures), "digest": digest(sources, architectures)}
    (folder / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")
