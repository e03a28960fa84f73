"""Torch and the compiled kernels, each looked at in a process of its own.

Loading them can fail in every way there is: a missing driver library, an undefined symbol, a crash, a hang.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

LIMIT_S = 120.0
ERROR_LENGTH = 200
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/'\":,;()\[\]]+/)+")

_TORCH = """
import ctypes, json, sys
out = {}
try:
    ctypes.CDLL("libcuda.so.1")
    out["driver_library"] = True
except OSError:
    out["driver_library"] = False
import torch
out["version"] = torch.__version__
out["cuda"] = torch.version.cuda
out["hip"] = torch.version.hip
out["threads"] = torch.get_num_threads()
try:
    out["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
except Exception as error:
    out["nccl"] = None
try:
    out["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
except Exception:
    out["cpu_capability"] = None
devices = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        devices.append({
            "name": p.name,
            "capability": [p.major, p.minor],
            "memory_bytes": p.total_memory,
            "multiprocessors": p.multi_processor_count,
            "shared_memory_optin_bytes": getattr(p, "shared_memory_per_block_optin", None),
        })
    out["architectures"] = torch.cuda.get_arch_list()
out["devices"] = devices
json.dump(out, sys.stdout)
"""

_KERNELS = """
import importlib, importlib.util, json, sys
out = {"portable": importlib.util.find_spec("sgl_kernel_portable") is not None}
spec = importlib.util.find_spec("sgl_kernel")
out["present"] = spec is not None
if spec is not None:
    try:
        module = importlib.import_module("sgl_kernel")
        out["loads"] = True
        out["version"] = getattr(module, "__version__", None)
        out["is_portable"] = "portable" in (getattr(module, "__file__", "") or module.__name__)
    except BaseException as error:
        out["loads"] = False
        out["error"] = " ".join(f"{type(error).__name__}: {error}".split())
json.dump(out, sys.stdout)
"""


def torch() -> dict[str, Any]:
    """Version, CUDA, NCCL as loaded, devices; or ``{"error": text}``."""
    return _without_places(run(_TORCH))


def kernels() -> dict[str, Any]:
    """Whether ``sgl_kernel`` is there, loads, and is the compiled or the portable one; or ``{"error": text}``."""
    return _without_places(run(_KERNELS))


def _without_places(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with the folders left out of its error: facts hold no paths, and the file's name is what helps."""
    if isinstance(answer.get("error"), str):
        text = _FOLDERS.sub("", answer["error"])
        answer["error"] = text if len(text) <= ERROR_LENGTH else f"{text[: ERROR_LENGTH - 3].rstrip()}..."
    return answer


def run(program: str, limit_s: float = LIMIT_S, request: Any = None) -> dict[str, Any]:
    """Run a program that prints one JSON object; any failure is told as ``{"error": text}``.

    ``request`` reaches the program as JSON on its standard input.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            input=None if request is None else json.dumps(request),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=os.environ | {"PYTHONFAULTHANDLER": "0"},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:.0f} s"}
    except OSError as error:
        return {"error": str(error)}
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": _last_words(done)}
    return answer if isinstance(answer, dict) else {"error": "the probe printed no object"}


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"the process was killed by signal {-done.returncode}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    ended = f"the process ended with status {done.returncode}"
    return (
        f"{lines[-1][:400]} ({ended})" if lines and done.returncode else lines[-1][:400] if lines else ended
    )
