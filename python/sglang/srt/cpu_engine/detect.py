"""Is there an accelerator that this process could use? Answered without importing torch.

Thread counts and the choice of engine must be in the environment before torch is loaded, so torch cannot be asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Finding", "find_accelerator"]


@dataclass(frozen=True)
class Finding:
    """Whether an accelerator was found, and the evidence in one phrase."""

    found: bool
    reason: str


#: Device nodes that the drivers of accelerators create, relative to the root of the file system.
NODES = {
    "dev/nvidiactl": "NVIDIA driver",
    "dev/dxg": "GPU of a Windows host",
    "dev/nvhost-gpu": "NVIDIA Tegra driver",
    "dev/kfd": "ROCm driver",
    "dev/davinci_manager": "Ascend driver",
    "dev/accel/accel0": "accelerator driver",
    "dev/accel0": "accelerator driver",
    "dev/mtgpu.0": "MUSA driver",
}


def _torch_build() -> str:
    """Return the local version of the installed torch ("+xpu" gives "xpu"), or ""."""
    try:
        return metadata.version("torch").partition("+")[2]
    except metadata.PackageNotFoundError:
        return ""


def find_accelerator(
    environment: Mapping[str, str] = os.environ, root: Path = Path("/"), torch_build: str | None = None
) -> Finding:
    """Look for an accelerator.

    Args:
        environment: where `CUDA_VISIBLE_DEVICES` is read.
        root: root of the file system (tests give another).
        torch_build: local version of torch; None reads the installed one's.

    Returns:
        found=False only where nothing speaks for an accelerator: a wrong "none" would put a CPU path on a GPU
        machine, a wrong "found" merely leaves upstream as it is.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1")
    build = _torch_build() if torch_build is None else torch_build
    if build == "cpu":
        return Finding(False, "torch +cpu can use no accelerator")
    for node, name in NODES.items():
        if (root / node).exists():
            if hidden and name == "NVIDIA driver":
                continue
            return Finding(True, f"{name} (/{node})")
    # Integrated graphics have a render node on any desktop; it counts only if this torch could use it.
    if build.startswith("xpu") and (root / "dev/dri").exists():
        return Finding(True, f"torch +{build} and /dev/dri")
    if hidden:
        return Finding(False, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")
    return Finding(False, "no accelerator driver")
