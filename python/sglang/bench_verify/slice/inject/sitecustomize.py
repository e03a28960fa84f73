"""Gives every row of a pass its own experts, inside the engine processes of a slice.

Python imports a module of this name at start when its folder is on the path, which reaches the spawned
scheduler without touching the package under test: the same file serves the fork and clean upstream. A
site's own file of this name, further down the path, is run as well.

The gate still computes its logits; what it returns is noise that differs by layer and row and stays the
same from step to step. So a pass of three tokens reads the union of three independent choices, no kernel
is added, and a captured graph replays it. Experts do not stay in cache between steps: the weights of one
step are many times larger than it.

Environment: ``BENCH_VERIFY_ROUTER=random`` switches it on; ``BENCH_VERIFY_UNION`` names a file that takes
the distinct experts of eager passes, one ``tokens distinct`` pair a line (graph replays cannot be counted,
the passes that warm up a capture can).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

GATE = "sglang.srt.models.deepseek_v2"
TOPK = "sglang.srt.layers.moe.topk"
LARGEST_COUNTED = 64
LARGEST_PASS = 16384


def patch_gate(module: Any) -> None:
    """Make every MoE gate return standard normal logits in the shape, type and place of its own."""
    import torch

    original = module.MoEGate.forward
    gates = 0

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal gates
        logits = original(self, *args, **kwargs)
        noise = getattr(self, "bench_noise", None)
        if noise is None or noise.shape[0] < logits.shape[0]:
            # The first pass of a gate is an eager one: nothing is allocated while a graph is captured.
            gates += 1
            generator = torch.Generator().manual_seed(gates)
            rows = max(LARGEST_PASS, logits.shape[0])
            noise = torch.randn(rows, logits.shape[1], generator=generator).to(logits)
            self.bench_noise = noise
        return noise[: logits.shape[0]]

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


def run_next() -> None:
    """Run the ``sitecustomize`` that this file hides."""
    own = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("BENCH_VERIFY_ROUTER") == "random":
    sys.meta_path.insert(0, _Finder())
    run_next()
