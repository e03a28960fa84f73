"""The environment record: everything about a machine and a process that has ever moved a figure.

A figure that cannot be reproduced is usually one whose environment nobody wrote down: a driver, a
link that trained to fewer lanes, an NCCL variable that never reached the workers, a patch that was
on. The record is taken without importing torch and without creating a GPU context, every probe is
bounded in time, and a probe that fails leaves its field empty rather than stopping the bench.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.bench_verify import gpu
from sglang.bench_verify.gpu import Gpu, Load

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "numpy",
)
VARIABLES = re.compile(
    r"^(NCCL_|SGLANG_|SGL_|CUDA_|TORCH_|TORCHDYNAMO_|TORCHINDUCTOR_|PYTORCH_|TRITON_|OMP_|MKL_|UCX_|GLOO_|FLASHINFER_|NVIDIA_)"
)
KERNEL_SETTINGS = re.compile(
    r"^(iommu|amd_iommu|intel_iommu|pci|pcie_|mitigations|isolcpus|nohz|rcu_nocbs|hugepages|default_hugepagesz|"
    r"transparent_hugepage|numa|intel_pstate|amd_pstate|intel_idle|processor\\.|idle=|nosmt|nvidia|vfio)"
)
# Values that differ on every start and say nothing about speed.
VOLATILE = re.compile(
    r"(_DIR|_PATH|_FILE|_HOME|CACHE|(?<!SUP)PORT|VISIBLE_DEVICES|TOKEN|KEY|SECRET|PASSWORD)"
)


@dataclass(frozen=True)
class Rank:
    """What one worker process sees, read back inside it (not what was exported to it)."""

    rank: int
    pid: int = 0
    device: str = ""
    nccl_version: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    differs: Sequence[str] | None = None
    nccl_log: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Rank:
        """From a rank's own record; what a newer server adds is ignored."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in item.items() if name in known})


@dataclass
class Environment:
    """The record. Empty strings and None mean "could not be read"."""

    taken: str = ""
    command: str = ""
    commit: str = ""
    fork_version: str = ""
    base_version: str = ""
    topics: dict[str, str] = field(default_factory=dict)
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    cuda: str = ""
    cuda_driver: str = ""
    nccl_version: str = ""
    host: str = ""
    cpu: str = ""
    cpu_count: int = 0
    kernel: str = ""
    kernel_command_line: str = ""
    uptime_s: float | None = None
    container: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    topology: str = ""
    load: Load = field(default_factory=Load)
    variables: dict[str, str] = field(default_factory=dict)
    ranks: list[Rank] = field(default_factory=list)
    server_arguments: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Environment:
        """Build from a parsed record; fields of a newer version are ignored, missing ones stay empty."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        values = {name: value for name, value in item.items() if name in known}
        values["gpus"] = [Gpu(**entry) for entry in item.get("gpus", [])]
        values["ranks"] = [Rank.from_json(rank) for rank in item.get("ranks", [])]
        values["load"] = Load(**{name: _tuple(value) for name, value in item.get("load", {}).items()})
        return cls(**values)


def capture(command: str | None = None, root: str | Path | None = None) -> Environment:
    """Take the record of this machine and process.

    Args:
        command: the command to store; default is this process's own.
        root: a directory inside the git checkout whose commit is wanted; default is this file's.
    """
    record = Environment(
        taken=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        command=command if command is not None else own_command(),
        commit=_commit(Path(root) if root is not None else Path(__file__).resolve().parent),
        python=platform.python_version(),
        packages=_packages(),
        cuda=_torch_constant("cuda"),
        nccl_version=_nccl_version(),
        host=platform.machine() + " " + platform.system(),
        cpu=_cpu_name(),
        cpu_count=os.cpu_count() or 0,
        kernel=platform.release(),
        kernel_command_line=kernel_settings(_read("/proc/cmdline")),
        uptime_s=_uptime(),
        container=_container(),
        variables=variables(os.environ),
    )
    _add_fork(record)
    record.gpus = gpu.read_gpus()
    if record.gpus:
        record.topology = gpu.topology()
        record.cuda_driver = gpu.driver_cuda_version()
    return record


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that can move a figure, without paths, ports and secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if VARIABLES.match(name) and not VOLATILE.search(name)
    }


def own_command() -> str:
    """This process's command line with machine-specific folders shortened, so that it can be published."""
    return shlex.join([Path(sys.executable).name, *(portable(word) for word in sys.orig_argv[1:])])


def portable(word: str) -> str:
    """An absolute path as seen from the working directory, or its last part where it lies elsewhere."""
    if not word.startswith("/"):
        return word
    path = Path(word)
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return path.name


def kernel_settings(command_line: str) -> str:
    """The kernel settings that reach a GPU, its link or the processor; the rest is nobody's business."""
    return " ".join(word for word in command_line.split() if KERNEL_SETTINGS.match(word))


@contextlib.contextmanager
def under_load(record: Environment, every_s: float = 0.5) -> Iterator[None]:
    """Sample clocks, power and link of every GPU while the block runs; medians go to ``record.load``.

    On a machine without an NVIDIA driver this does nothing.
    """
    if not record.gpus:
        yield
        return
    sampler = gpu.Sampler(every_s)
    sampler.start()
    try:
        yield
    finally:
        record.load = sampler.stop()


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _uptime() -> float | None:
    words = _read("/proc/uptime").split()
    return float(words[0]) if words else None


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor()


def _container() -> str:
    """Kind of container, and the image when the image says so itself."""
    kind = os.environ.get("container", "")  # noqa: SIM112 - the name systemd and podman set
    if not kind and Path("/.dockerenv").exists():
        kind = "docker"
    if not kind and (found := re.search(r"(docker|kubepods|containerd|lxc|podman)", _read("/proc/1/cgroup"))):
        kind = found.group(1)
    image = os.environ.get("SGLANG_FORK_IMAGE", "")
    return " ".join(part for part in (kind, image) if part)


def _commit(root: Path) -> str:
    # An image or a packed tree has no git, or a checkout beside it is not what runs: whoever packed it says which commit it was.
    packed = os.environ.get("SGLANG_FORK_COMMIT", "")
    if packed:
        return packed
    text = gpu.probe("git", "-C", str(root), "rev-parse", "HEAD").strip()
    if text and gpu.probe("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no").strip():
        text += "+changes"
    return text


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _torch_constant(name: str) -> str:
    """A constant of torch/version.py, read as text: importing torch here would cost seconds."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        path = importlib.metadata.distribution("torch").locate_file("torch/version.py")
        found = re.search(rf"^{name}[^=\n]*=\s*['\"]([^'\"]+)['\"]", _read(str(path)), re.MULTILINE)
        return found.group(1) if found else ""
    return ""


def _nccl_version() -> str:
    torch = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(Exception):
            return ".".join(str(part) for part in torch.cuda.nccl.version())
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _add_fork(record: Environment) -> None:
    """Base, version and topic states of the fork, as this interpreter runs it."""
    try:
        from sglang.fork import report
    except ImportError:
        return
    state = report()
    if state.composed:
        record.base_version, record.fork_version = state.base, state.version
        record.topics = {topic.name: topic.state for topic in state.topics}
