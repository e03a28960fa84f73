"""Will upstream's first start of several ranks compile FlashInfer's fused all-reduce? A look at files, nothing imported.

Upstream switches it on for DeepSeek-type models on SM90 and SM100. On SM90 it takes the ``trtllm`` backend, whose
module is compiled at its first use: behind the first NCCL barrier of the start, without a log line, one rank at the
compiler and the others waiting. Nothing of FlashInfer is imported here: that would ask a GPU for its architecture.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULE = "trtllm_comm"
#: What FlashInfer 0.6.15 compiles it from (flashinfer/jit/comm.py).
SOURCES = ("trtllm_allreduce.cu", "trtllm_allreduce_fusion.cu", "trtllm_moe_allreduce_fusion.cu")
#: Compiles it as a start would, on a machine with the GPUs it is for.
COMMAND = 'python -c "from flashinfer.jit.comm import gen_trtllm_comm_module as g; g().build(verbose=True)"'


def look(environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """What there is of the module; None without FlashInfer.

    Returns:
        ``version`` of FlashInfer; ``built``: its library is there, compiled here earlier or shipped; ``sources``: how
        many of the ``wanted`` are installed; ``compiler``: an ``nvcc`` is in reach.
    """
    package = _folder("flashinfer")
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None
    if package is None:
        return None
    base = Path(environment.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    library = f"{MODULE}/{MODULE}.so"
    places = [(base / ".cache" / "flashinfer" / version, f"*/cached_ops/{library}")]
    places.append((package / "data" / "aot", library))
    shipped = _folder("flashinfer_jit_cache")
    if shipped is not None:
        places.append((shipped, f"*/{library}"))
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
    return {
        "version": version,
        "built": any(next(folder.glob(pattern), None) is not None for folder, pattern in places),
        "sources": sum((package / "data" / "csrc" / name).is_file() for name in SOURCES),
        "wanted": len(SOURCES),
        "compiler": bool(shutil.which("nvcc") or (Path(home) / "bin" / "nvcc").is_file()),
    }


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None
