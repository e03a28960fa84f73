"""Where the compiled kernels come from: the wheel, the cache, or the compiler, in that order."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.distributed.one_shot import nvcc, settings
from sglang.srt.distributed.one_shot.errors import NotBuilt

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"  # laid beside this file by composing; sgl-kernel/csrc/all_reduce in the repository
PREBUILT = HERE / "prebuilt"
CACHE_VARIABLE = "SGLANG_FORK_CACHE"


@dataclass(frozen=True)
class Built:
    """A compiled library: its path, and how it came about, for the doctor."""

    path: Path
    how: str


def architecture(capability: tuple[int, int]) -> str:
    """Name of the compile target of a device, as in ``sm_<name>``.

    Raises:
        NotBuilt: the device is older than compute capability 9.0 (clusters are needed).
    """
    if capability < (9, 0):
        raise NotBuilt(
            f"compute capability {capability[0]}.{capability[1]} is below 9.0, which the kernels need (clusters)"
        )
    return f"{capability[0]}{capability[1]}a"


def cache_folder() -> Path:
    """``SGLANG_FORK_CACHE``, else the user's cache directory."""
    chosen = settings.kernel_cache()
    if chosen:
        return Path(chosen) / "one_shot"
    base = os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache"
    return Path(base) / "sglang-fork" / "one_shot"


def prebuilt(name: str, folder: Path = PREBUILT, sources: Path = SOURCES) -> Built | None:
    """The wheel's library, if it has code for architecture ``name`` and is of these very sources."""
    try:
        facts = json.loads((folder / nvcc.FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    listed = facts.get("architectures", [])
    if name not in listed or facts.get("digest") != nvcc.digest(sources, listed):
        return None
    return Built(folder / nvcc.LIBRARY, f"prebuilt for {', '.join('sm_' + each for each in listed)}")


def locate(capability: tuple[int, int], defines: Sequence[str] = ()) -> Built:
    """A library for a device of this compute capability, compiled now if need be (about 10 s, once).

    Args:
        capability: (major, minor).
        defines: macros of a special build (tests); such a build is never prebuilt.

    Raises:
        NotBuilt: no library and no way to compile one; the text says what is missing.
    """
    name = architecture(capability)
    found = None if defines else prebuilt(name)
    if found is not None:
        return found
    if not SOURCES.is_dir():
        raise NotBuilt(f"no prebuilt kernels for sm_{name}, and the sources are not in {SOURCES}")
    folder = cache_folder()
    path = folder / f"one_shot-{nvcc.digest(SOURCES, (name,), defines)}-sm_{name}.so"
    if path.is_file():
        return Built(path, f"compiled for sm_{name} earlier ({path})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # All ranks of a machine come here at once: one compiles, the others find its result.
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.is_file():
                return Built(path, f"compiled for sm_{name} by another rank ({path})")
            start = time.monotonic()
            nvcc.compile_library(SOURCES, path, (name,), defines)
            return Built(path, f"compiled for sm_{name} in {time.monotonic() - start:.0f} s ({path})")
    except nvcc.CompileError as error:
        raise NotBuilt(f"no prebuilt kernels for sm_{name}, and compiling failed: {error}") from error
    except OSError as error:
        raise NotBuilt(
            f"no prebuilt kernels for sm_{name}, and {folder} cannot be written ({error.strerror}); set "
            f"{CACHE_VARIABLE} to a writable folder"
        ) from error
