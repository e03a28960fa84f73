"""Gets the pinned upstream wheel: from a directory, from the cache, or through pip by version and hash."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from patches.engine.errors import EngineError, UsageError
from patches.engine.hashes import file_digest
from patches.engine.project import Pins, Wheel

WHEELS_VARIABLE = "SGLANG_FORK_WHEELS"

_VERSION = re.compile(r"\d[0-9A-Za-z.]*")


def running_tag() -> str:
    """``cp311`` and the like, of the running interpreter."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def pick(pins: Pins, tag: str | None = None) -> Wheel:
    """The pinned wheel for an interpreter tag (default: the running one).

    Raises:
        UsageError: upstream has no wheel for this Python or platform.
    """
    tag = tag or running_tag()
    if tag not in pins.wheels:
        raise UsageError(
            f"sglang {pins.base} has no wheel for {tag} (pinned: {', '.join(sorted(pins.wheels))}); "
            "use a Python from 3.10 to 3.13"
        )
    machine = (platform.system(), platform.machine())
    wheel = pins.wheels[tag]
    if machine[0] != "Linux" or machine[1] not in wheel.file:
        raise UsageError(f"the pinned wheels are for Linux x86_64; this machine is {machine[0]} {machine[1]}")
    return wheel


def cache_directory() -> Path:
    """Where fetched wheels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sglang-fork" / "wheels"


def fetch(pins: Pins, wheel: Wheel, directory: Path | None = None) -> Path:
    """Path of the verified wheel.

    ``directory`` (default: ``SGLANG_FORK_WHEELS``) is where an already downloaded wheel lies; when given,
    nothing is fetched.

    Raises:
        EngineError: the wheel is missing, its hash is wrong, or pip could not fetch it.
    """
    if directory is None and os.environ.get(WHEELS_VARIABLE):
        directory = Path(os.environ[WHEELS_VARIABLE])
    if directory is not None:
        return _from_directory(wheel, directory)
    cached = cache_directory() / wheel.sha256[:16] / wheel.file
    if cached.is_file():
        if file_digest(cached) == wheel.sha256:
            return cached
        cached.unlink()  # a broken cache entry is ours to replace
    return _download(pins, wheel, cached)


def _from_directory(wheel: Wheel, directory: Path) -> Path:
    path = directory / wheel.file
    if not path.is_file():
        raise EngineError(
            f"{directory} does not hold {wheel.file}; put the wheel there, or unset {WHEELS_VARIABLE} to fetch it"
        )
    actual = file_digest(path)
    if actual != wheel.sha256:
        raise EngineError(
            f"{path} is not the pinned wheel: sha256 is {actual}, upstream.toml says {wheel.sha256}; "
            "fetch it again from the package index"
        )
    return path


def fetch_other(pins: Pins, version: str) -> Path:
    """The wheel of another upstream version, for a look forward: no hash is pinned for it.

    Raises:
        UsageError: ``version`` is not a version.
        EngineError: the named directory lacks the wheel, or pip could not fetch it.
    """
    if not _VERSION.fullmatch(version):
        raise UsageError(f"{version!r} is not a version such as 0.5.23")
    pinned = pick(pins)
    named = pinned.file.replace(f"-{pins.base}-", f"-{version}-", 1)
    if os.environ.get(WHEELS_VARIABLE):
        given = Path(os.environ[WHEELS_VARIABLE]) / named
        if not given.is_file():
            raise EngineError(
                f"{given.parent} does not hold {named}; put the wheel there, or unset {WHEELS_VARIABLE} to fetch it"
            )
        return given
    cached = cache_directory() / "other" / version / named
    if not cached.is_file():
        _pip_download(pinned.tag, cached, f"{pins.name}=={version}")
    return cached


def _download(pins: Pins, wheel: Wheel, cached: Path) -> Path:
    _pip_download(
        wheel.tag, cached, f"{pins.name}=={pins.base} --hash=sha256:{wheel.sha256}", "--require-hashes"
    )
    if file_digest(cached) != wheel.sha256:
        cached.unlink()
        raise EngineError(f"the index served a {wheel.file} whose hash is not the pinned one")
    return cached


def _pip_download(tag: str, cached: Path, requirement: str, *flags: str) -> None:
    """Fetch one wheel through pip, which knows the user's index, proxy and credentials, to ``cached``."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"the wheel cache {cached.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME"
        ) from error
    python = tag.removeprefix("cp")
    with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
        listed = Path(scratch) / "wanted.txt"
        listed.write_text(requirement + "\n", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            *flags,
        ]
        command += ["--python-version", f"{python[0]}.{python[1:]}", "--implementation", "cp", "--abi", tag]
        command += [
            "--platform",
            cached.name.rsplit("-", 1)[1].removesuffix(".whl"),
            "--dest",
            scratch,
            "-r",
            str(listed),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = Path(scratch) / cached.name
        if done.returncode == 0 and fetched.is_file():
            os.replace(fetched, cached)
            return
    other = re.search(r"^\s*Got\s+([0-9a-f]{64})\s*$", done.stderr, re.MULTILINE)
    if other is not None:
        raise EngineError(
            f"the index serves another {cached.name} than the pinned one: its sha256 is {other.group(1)}; "
            "upstream.toml or the index is wrong, nothing was kept"
        )
    raise EngineError(
        f"could not fetch {cached.name}: {_cause(done)}\n"
        f"without a network, download the wheel elsewhere and name its directory in {WHEELS_VARIABLE}"
    )


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """Why pip failed, in one line: its last one says "no matching distribution" of a dead network too."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip (`python -m ensurepip` adds it)"
    network = [line for line in lines if "connection broken by" in line]
    if network:
        told = re.search(r"connection broken by .*?: (.*?)['\")]*: /", network[-1])
        return f"the package index cannot be reached ({told.group(1) if told else network[-1]})"
    return lines[-1] if lines else f"pip ended with status {done.returncode}"
