"""What a checkpoint says about itself without loading it: ``config.json``, tensor headers, sizes on disk.

Only the headers of safetensors files are read (a few kilobytes), and of the values only the draft's
vocabulary map, which decides whether proposed tokens exist in the target.
"""

from __future__ import annotations

import json
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.speculative.arguments.faults import ArgumentFault, one_line

Config = dict[str, Any]

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
# Descriptions that upstream reads instead of a config.json.
OTHER_DESCRIPTIONS = ("params.json", "*.gguf")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# A header is text of tens of bytes per tensor; more than this means that the file is something else.
MAX_HEADER_BYTES = 256 << 20

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_INTEGER_CODES = {"I64": "q", "I32": "i", "I16": "h", "U8": "B", "I8": "b"}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as its file announces it; ``begin`` and ``end`` are byte positions in ``file``."""

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    begin: int = 0
    end: int = 0


def is_remote(path: str) -> bool:
    """Whether the path is a URL (object store, another instance), which only upstream can open."""
    return "://" in path


def is_hub_id(path: str) -> bool:
    """Whether the path can be the name of a repository on a model hub."""
    return bool(_HUB_ID.match(path)) and not Path(path).exists()


def local_directory(option: str, path: str, *, what: str) -> Path | None:
    """The directory that ``option`` names, or None where only upstream can tell (hub, URL, single file).

    Raises:
        ArgumentFault: the path can be neither a directory here nor the name of a hub repository.
    """
    if is_remote(path):
        return None
    place = Path(path)
    try:
        if place.is_dir():
            return place
        if place.is_file() or is_hub_id(path):
            return None
    except OSError as error:
        # A folder above it that may not be entered, a name that is too long.
        raise ArgumentFault(
            f"{option} {one_line(path)}",
            f"cannot be looked at ({error.strerror})",
            "give a path that this user can read",
            code="path-unreadable",
        ) from error
    raise ArgumentFault(
        f"{option} {path}",
        "is no directory on this machine and cannot be the name of a hub repository either",
        f"give the directory that holds {what}'s config.json and weights",
        code="path-missing",
    )


def read_config(option: str, directory: Path, *, what: str, overrides: str = "{}") -> Config | None:
    """``config.json`` of a directory with the user's overrides; None where another description serves.

    Args:
        overrides: JSON object laid over the file, as ``--json-model-override-args`` does.

    Raises:
        ArgumentFault: no description at all, one that cannot be read, or text that is not a JSON object.
    """
    file = directory / CONFIG_NAME
    if not file.is_file():
        if any(next(directory.glob(pattern), None) for pattern in OTHER_DESCRIPTIONS):
            return None
        raise ArgumentFault(
            f"{option} {directory}",
            f"holds no {CONFIG_NAME}",
            f"give the directory that holds {what}'s {CONFIG_NAME} and weights",
            code="config-missing",
        )
    config = _json_object(f"{option} {directory}", _text(option, file), f"its {CONFIG_NAME}")
    return merged(config, _json_object("--json-model-override-args", overrides, "its value"))


def _text(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ArgumentFault(
            f"{option} {file.parent}",
            f"is unusable: its {file.name} cannot be read ({reason})",
            "give this user the right to read it, or fetch the model again",
            code="config-unreadable",
        ) from error


def merged(config: Config, overrides: Config) -> Config:
    """``config`` with the user's values laid over it; a section is updated, any other value replaced."""
    result = dict(config)
    for key, value in overrides.items():
        inner = result.get(key)
        result[key] = inner | value if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def _json_object(subject: str, text: str, what: str) -> Config:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ArgumentFault(
            subject, f"is unusable: {what} is not JSON ({error})", "correct the JSON", code="config-json"
        ) from error
    if not isinstance(value, dict):
        raise ArgumentFault(
            subject,
            f"is unusable: {what} is a JSON {type(value).__name__}",
            "give an object",
            code="config-json",
        )
    return value


def weight_files(directory: Path) -> list[Path]:
    """Files that can hold weights, the first kind that is present in upstream's order of preference."""
    for pattern in WEIGHT_PATTERNS:
        found = sorted(directory.glob(pattern))
        if found:
            return found
    return []


def weight_bytes(directory: Path) -> int:
    """Bytes of the weight files on disk; 0 where there are none."""
    return sum(file.stat().st_size for file in weight_files(directory))


def missing_shards(directory: Path) -> list[str]:
    """Names that the index lists and the directory lacks (an interrupted download)."""
    index = directory / INDEX_NAME
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
        return []
    return sorted(name for name in names if not (directory / name).is_file())


def require_weights(option: str, directory: Path, *, what: str) -> None:
    """Raise where a directory has a description but no weights, or only a part of them."""
    if not weight_files(directory):
        raise ArgumentFault(
            f"{option} {directory}",
            "holds no weight file (*.safetensors, *.bin, *.pt, *.gguf)",
            f"download {what}'s weights, or give --load-format dummy for a trial without them",
            code="weights-missing",
        )
    require_shards(option, directory)


def require_shards(option: str, directory: Path) -> None:
    """Raise where the directory lacks a file that its index lists."""
    missing = missing_shards(directory)
    if missing:
        raise ArgumentFault(
            f"{option} {directory}",
            f"lacks {len(missing)} of the files that {INDEX_NAME} lists (first: {missing[0]})",
            "complete the download",
            code="weights-partial",
        )


def read_headers(option: str, directory: Path) -> dict[str, TensorHeader] | None:
    """Headers of every tensor in the safetensors files of ``directory``; None where there are no such files.

    Raises:
        ArgumentFault: a file is cut short or is not a safetensors file.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            headers.update(_file_headers(file))
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise ArgumentFault(
                f"{option} {directory}",
                f"holds a file that is no complete safetensors file: {file.name} ({one_line(error)})",
                "download it again",
                code="weights-broken",
            ) from error
    return headers


def _file_headers(file: Path) -> dict[str, TensorHeader]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header of {length} bytes does not fit in {size} bytes")
        table: Mapping[str, Any] = json.loads(stream.read(length))
    start = 8 + length
    found = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        begin, end = (start + int(offset) for offset in entry["data_offsets"])
        if end > size:
            raise ValueError(f"tensor {name} ends at byte {end} of {size}")
        found[name] = TensorHeader(entry["dtype"], tuple(entry["shape"]), file, begin, end)
    return found


def read_integers(header: TensorHeader) -> list[int] | None:
    """Values of an integer tensor, flattened; None for another dtype or a header without a file."""
    code = _INTEGER_CODES.get(header.dtype)
    if code is None or header.file is None:
        return None
    values = array(code)
    with header.file.open("rb") as stream:
        stream.seek(header.begin)
        values.frombytes(stream.read(header.end - header.begin))
    return values.tolist()
