"""GPU machines that the resolution of arguments sees without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

# Some modules import what only a GPU machine has if they see one; resolving reaches them, so they come first.
from sglang.srt.layers.quantization import fp8_utils  # noqa: F401
from sglang.srt.utils import common


@dataclass(frozen=True)
class Machine:
    """What upstream asks a machine for: capability, memory of a GPU in MiB, number of GPUs, a name."""

    name: str
    capability: tuple[int, int]
    memory_mib: int
    gpus: int

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Let torch and upstream report this machine; what upstream remembers of the real one is forgotten."""
        with pytest.MonkeyPatch.context() as patch:
            # What the fork sets on a machine without a driver.
            patch.setenv("SGLANG_USE_CPU_ENGINE", "0")
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "device_count", lambda: self.gpus)
            patch.setattr(torch.cuda, "get_device_capability", lambda *_: self.capability)
            patch.setattr(torch.cuda, "get_device_name", lambda *_: self.name)
            patch.setattr(torch.version, "cuda", "13.0")
            patch.setattr("sglang.srt.server_args.get_device_memory_capacity", lambda *_: self.memory_mib)
            patch.setattr("sglang.srt.utils.get_device_memory_capacity", lambda *_: self.memory_mib)
            forget()
            try:
                yield
            finally:
                forget()


def forget() -> None:
    """Empty the caches of upstream's questions about the device."""
    for value in vars(common).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


RTX = Machine("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 97887, 8)
H200 = Machine("NVIDIA H200", (9, 0), 143771, 8)
B200 = Machine("NVIDIA B200", (10, 0), 183359, 8)
BY_SUFFIX = {
    "8x-rtx-pro-6000": (RTX,),
    "8x-h200": (H200,),
    "1x-gpu": (RTX, H200, B200),
}
