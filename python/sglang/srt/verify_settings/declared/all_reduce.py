"""Variables of the one-shot all-reduce."""

from __future__ import annotations

from sglang.srt.verify_settings.declare import Setting

_READER = "sglang.srt.distributed.one_shot, in every rank"

SETTINGS = (
    Setting(
        "SGLANG_FORK_ALL_REDUCE",
        "choice",
        "auto",
        "One-shot all-reduce: auto (the table decides), force (every message that the kernels admit), off, or "
        "simulate (ranks on a CPU, for tests)",
        _READER,
        choices=("auto", "force", "off", "simulate"),
    ),
    Setting(
        "SGLANG_FORK_ALL_REDUCE_TABLE",
        "path",
        "(in the cache)",
        "A table of `bench_all_reduce --write` that is used in place of the one in the cache",
        f"{_READER}; rank 0's is everybody's",
    ),
    Setting(
        "SGLANG_FORK_ALL_REDUCE_PROTOCOL",
        "choice",
        "auto",
        "How a one-shot message is sent: auto (the table decides), flags (data, then a flag), or packets (each 16 bytes "
        "carry their own epoch) wherever it fits",
        f"{_READER}; rank 0's is everybody's",
        choices=("auto", "flags", "packets"),
    ),
    Setting(
        "SGLANG_FORK_ALL_REDUCE_PREFLIGHT_S",
        "float",
        "10",
        "Longest preflight in seconds",
        _READER,
        least=1,
        most=600,
    ),
    Setting(
        "SGLANG_FORK_ALL_REDUCE_WAIT_S",
        "float",
        "300",
        "Longest wait of an eager reduction for another rank in seconds; captured ones wait for the rank watch",
        _READER,
        least=1,
        most=86_400,
    ),
    Setting(
        "SGLANG_FORK_ALL_REDUCE_PDL",
        "flag",
        "0",
        "Launch the all-reduce kernels with programmatic dependence on the kernel before them",
        _READER,
    ),
    Setting(
        "SGLANG_FORK_CACHE",
        "path",
        "~/.cache/sglang-fork",
        "Folder for all-reduce kernels that are compiled on first use",
        _READER,
    ),
    Setting(
        "SGLANG_FORK_PREBUILD",
        "flag",
        "1",
        "Compile the all-reduce kernels into the wheel where nvcc is; only when a wheel is built",
        "setup.py",
    ),
)
