"""Settings of NCCL, of the allocator and of the fork, as the environment and NCCL's own files have them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.verify_settings import catalogue, library
from sglang.srt.verify_settings.native import shown

PREFIXES = (
    "NCCL_",
    "SGLANG_",
    "TORCH_NCCL_",
    "PYTORCH_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "CUDA_LAUNCH_BLOCKING",
)
CONF_FILES = (Path("~/.nccl.conf"), Path("/etc/nccl.conf"))


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that reach communication or the allocator; values that may name places or secrets are hidden."""
    return shown({name: value for name, value in variables.items() if name.startswith(PREFIXES)})


def gather() -> dict[str, Any]:
    """``nccl_version`` of the library on disk, ``unread`` variables with the nearest real name, ``conf`` values.

    NCCL also reads files; where a variable is in both, the environment wins.
    """
    found = library.read()
    named = os.environ.get("NCCL_CONF_FILE")
    files = (Path(named),) if named else CONF_FILES
    conf: dict[str, str] = {}
    for file in files:
        try:
            text = file.expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):
            continue
        for name, value in parse_conf(text).items():
            conf.setdefault(name, value)
    mine = os.environ | conf
    return {
        "nccl_version": found.version or None,
        "unread": catalogue.slips(mine, found.names),
        "conf": shown(conf),
    }


def parse_conf(text: str) -> dict[str, str]:
    """Lines ``NAME=value`` of an NCCL configuration file; ``#`` begins a comment."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("#")[0].strip().partition("=")
        if equals and name.strip():
            found[name.strip()] = value.strip()
    return found
