"""A GPU machine of the facts, put in the place of this one while arguments are resolved.

Upstream asks torch and the driver what the machine is; every question that the resolution of arguments asks is
answered from the facts. Nothing that touches a device is stood in for: such a call fails, and the doctor says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section

# Streaming multiprocessors, where the facts (without torch) do not count them.
_MULTIPROCESSORS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "RTX PRO 6000": 188, "NVIDIA B200": 148}
# Packages that upstream looks for before it chooses a backend.
_LOOKED_FOR = {"flashinfer": "flashinfer-python", "flash_attn": "flash-attn", "flash_mla": "flash-mla"}


@dataclass(frozen=True)
class Machine:
    """What upstream asks: all GPUs are taken to be like the smallest. ``memory_mib`` is of one GPU."""

    name: str
    capability: tuple[int, int]
    memory_mib: int
    gpus: int
    multiprocessors: int
    shared_memory: int
    cuda: str
    packages: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Machine:
        """From ``as_dict``."""
        pair = content["capability"]
        return cls(
            **{
                **content,
                "capability": (int(pair[0]), int(pair[1])),
                "packages": tuple(content["packages"]),
            }
        )

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Machine | None:
        """The machine of a facts document; None where it has no GPU."""
        gpus = list(section(facts, "nvidia").get("gpus") or [])
        devices = list(section(facts, "torch").get("devices") or [])
        count = len(devices) or len(gpus)
        first = (gpus or devices or [{}])[0]
        pair = nvidia.capability(first.get("capability"))
        if not count or pair is None:
            return None
        sizes = [int(gpu["memory_mib"]) for gpu in gpus if gpu.get("memory_mib")]
        sizes += [int(device["memory_bytes"]) >> 20 for device in devices if not sizes]
        if not sizes:
            return None
        name = str(first.get("name") or "GPU")
        counted = [int(device["multiprocessors"]) for device in devices if device.get("multiprocessors")]
        known = next((value for part, value in _MULTIPROCESSORS.items() if part in name), 0)
        shared = [
            int(device["shared_memory_optin_bytes"])
            for device in devices
            if device.get("shared_memory_optin_bytes")
        ]
        pins = section(facts, "packages").get("pins") or []
        return cls(
            name=name,
            capability=pair,
            memory_mib=min(sizes),
            gpus=count,
            multiprocessors=min(counted, default=known),
            shared_memory=min(shared, default=0),
            cuda=str(section(facts, "torch").get("cuda") or "13.0"),
            packages=tuple(row["name"] for row in pins if row.get("installed")),
        )

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Let torch and upstream report this machine; what upstream remembers of the real one is forgotten.

        Modules that import GPU-only packages where they see a GPU are imported beforehand.
        """
        import torch
        from sglang.srt import server_args
        from sglang.srt import utils as utilities
        from sglang.srt.layers.quantization import fp8_utils  # noqa: F401
        from sglang.srt.utils import common

        find_spec = importlib.util.find_spec

        def found(name: str, package: str | None = None) -> Any:
            if name in _LOOKED_FOR:
                return find_spec("sglang") if _LOOKED_FOR[name] in self.packages else None
            return find_spec(name, package)

        with ExitStack() as stack:

            def put(owner: Any, name: str, value: Any) -> None:
                old = getattr(owner, name)
                setattr(owner, name, value)
                stack.callback(setattr, owner, name, old)

            chosen = os.environ.get("SGLANG_USE_CPU_ENGINE")
            os.environ["SGLANG_USE_CPU_ENGINE"] = "0"
            stack.callback(os.environ.__setitem__, "SGLANG_USE_CPU_ENGINE", chosen or "0")
            put(torch.cuda, "is_available", lambda: True)
            put(torch.cuda, "device_count", lambda: self.gpus)
            put(torch.cuda, "get_device_capability", lambda *_: self.capability)
            put(torch.cuda, "get_device_name", lambda *_: self.name)
            put(torch.version, "cuda", self.cuda)
            put(importlib.util, "find_spec", found)
            for module in (server_args, utilities, common):
                put(module, "get_device_memory_capacity", lambda *_: self.memory_mib)
            _forget(common)
            stack.callback(_forget, common)
            yield


def _forget(module: Any) -> None:
    """Empty the caches of upstream's questions about the device."""
    for value in vars(module).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
