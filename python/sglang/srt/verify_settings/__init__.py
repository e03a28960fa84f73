"""Every environment variable that the fork reads, and the NCCL ones that decide how ranks reach each other.

``declared`` says what there is, ``catalogue`` reads values, ``reach`` and ``readback`` show that they arrived in
every rank, ``profiles`` recommends, ``hooks`` is where upstream calls. Standard library only.
"""

from __future__ import annotations

from sglang.srt.verify_settings.catalogue import (
    declared,
    read_flag,
    read_float,
    read_int,
    read_list,
    read_text,
    setting,
    slips,
)
from sglang.srt.verify_settings.declare import Setting, SettingError

__all__ = [
    "Setting",
    "SettingError",
    "declared",
    "read_flag",
    "read_float",
    "read_int",
    "read_list",
    "read_text",
    "setting",
    "slips",
]
