"""Replaces router logits by noise inside the engine processes of a slice.

Python imports a module of this name at start when its folder is on the path, which reaches the spawned
scheduler without touching the package under test: the same file serves the fork and clean upstream. It
adds one small kernel a MoE layer to every variant.

Environment: ``BENCH_VERIFY_ROUTER=random`` switches it on; ``BENCH_VERIFY_UNION`` names a file that takes
the distinct experts of eager passes, one ``tokens distinct`` pair a line (graph replays cannot be counted).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

GATE = "sglang.srt.models.deepseek_v2"
TOPK = "sglang.srt.layers.moe.topk"
LARGEST_COUNTED = 16


def patch_gate(module: Any) -> None:
    """Make every MoE gate return standard normal logits; the shape, type and place stay its own."""
    original = module.MoEGate.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs).normal_()

    module.MoEGate.forward = forward


def patch_topk(module: Any) -> None:
    """Write the distinct experts of small eager passes to the union file."""
    path = os.environ.get("BENCH_VERIFY_UNION", "")
    if not path:
        return
    import torch

    for name in ("forward_cuda", "forward_native", "forward_cpu"):
        original = getattr(module.TopK, name)

        def forward(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            output = _original(self, *args, **kwargs)
            ids = getattr(output, "topk_ids", None)
            if ids is None or ids.shape[0] > LARGEST_COUNTED:
                return output
            if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"{ids.shape[0]} {len(set(ids.flatten().tolist()))}\n")
            return output

        setattr(module.TopK, name, forward)


PATCHES = {GATE: patch_gate, TOPK: patch_topk}


class _Loader(importlib.abc.Loader):
    """Runs a module's own loader, then its patch."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def create_module(self, spec: Any) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        PATCHES[self._name](module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the two modules as Python would, and wraps their loaders."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


if os.environ.get("BENCH_VERIFY_ROUTER") == "random":
    sys.meta_path.insert(0, _Finder())
