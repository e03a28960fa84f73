"""Whether this machine can take the server at all: is the port free, do the weights fit in its memory.

Both are known in a second here and would otherwise show after the weights are loaded (the port is bound
last), or as a kill without a word.
"""

from __future__ import annotations

import errno
import functools
import socket
from collections.abc import Callable
from pathlib import Path

from sglang.srt.speculative.arguments.faults import ArgumentFault

GIB = 1 << 30
PROC_MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def check_port(host: str | None, port: int) -> None:
    """Refuse a port that cannot be bound on ``host``.

    The bind is the HTTP server's own kind (address reuse on), so a port in TIME_WAIT passes here as it does there.

    Raises:
        ArgumentFault: out of range, taken, or not ours to bind.
    """
    if not 0 < port < 65536:
        raise ArgumentFault(
            f"--port {port}", "must be from 1 to 65535", "give --port 30000", code="port-range"
        )
    reason = _bind_problem(host or "127.0.0.1", port)
    if reason is None:
        return
    raise ArgumentFault(
        f"--port {port}",
        f"cannot be bound on {host or '127.0.0.1'}: {reason}",
        "give another --port, or stop what listens there",
        code="port-taken",
    )


def check_page_size(size: int | None) -> None:
    """Refuse a page of no tokens, by which upstream would divide.

    Raises:
        ArgumentFault: below 1; None, which leaves the choice to upstream, passes.
    """
    if size is not None and size < 1:
        raise ArgumentFault(
            f"--page-size {size}",
            "must be at least 1",
            "give --page-size 1, or leave it out",
            code="page-size",
        )


def _bind_problem(host: str, port: int) -> str | None:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        return f"the host is unknown ({error.strerror})"
    for family, kind, protocol, _, address in addresses[:1]:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                return _reason(error)
    return None


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process listens there"
    if error.errno == errno.EACCES:
        return "ports below 1024 need more rights"
    return str(error.strerror or error)


def available_bytes(
    meminfo: Path = PROC_MEMINFO, limit: Path = CGROUP_LIMIT, used: Path = CGROUP_USED
) -> int | None:
    """Bytes that a new process can take on this host, the container's limit included; None if unknown."""
    free = parse_meminfo(_read(meminfo)).get("MemAvailable")
    ceiling, current = _read(limit).strip(), _read(used).strip()
    if ceiling.isdigit() and current.isdigit():
        room = max(int(ceiling) - int(current), 0)
        free = room if free is None else min(free, room)
    return free


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` as bytes by name."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def device_bytes(device: str) -> int | None:
    """Memory of the smallest accelerator in sight; None where upstream cannot tell."""
    from sglang.srt.utils import get_device_memory_capacity

    return _asked(get_device_memory_capacity, device)


@functools.cache
def _asked(ask: Callable[[str], float | None], device: str) -> int | None:
    # Upstream asks nvidia-smi, which takes up to seconds without the driver's persistence mode; a start by the command line
    # is checked twice.
    try:
        mebibytes = ask(device)
    except (OSError, RuntimeError, ValueError):
        return None
    return int(mebibytes * (1 << 20)) if mebibytes else None


def check_memory(
    weights: int, room: int | None, *, place: str, path: str, ranks: int = 1, widening: float = 1.0
) -> None:
    """Refuse weights that cannot fit, whatever else is tuned.

    Args:
        weights: bytes of target and draft on disk.
        room: bytes of memory that one rank has (a GPU's total, or what the host has free); None: unknown.
        place: what that memory is, for the message.
        path: the target, for the message.
        ranks: over how many memories the weights are divided.
        widening: how much larger a weight becomes by ``--dtype`` (2 from bfloat16 to float32).

    Raises:
        ArgumentFault: the share of one rank is larger than ``room``.
    """
    if room is None or weights <= 0:
        return
    share = weights * widening / ranks
    if share <= room:
        return
    divided = f" on each of {ranks} ranks" if ranks > 1 else ""
    raise ArgumentFault(
        f"--model-path {path}",
        f"needs {share / GIB:.2f} GiB for weights alone{divided}, but {place} has {room / GIB:.2f} GiB",
        "use more ranks (--tp-size), a smaller or quantised model, or a machine with more memory",
        code="memory",
    )


def check_devices(needed: int, visible: int) -> None:
    """Refuse more ranks than there are GPUs to put them on.

    Args:
        needed: one more than the highest GPU number that the ranks of this host take.
        visible: GPUs that this process can see.
    """
    if needed <= visible:
        return
    if visible == 0:
        raise ArgumentFault(
            "--device cuda",
            "needs a GPU, and none is visible to this process",
            "give --device cpu, unset CUDA_VISIBLE_DEVICES, or look at what python -m sglang.verify_doctor says",
            code="devices",
        )
    raise ArgumentFault(
        f"--tp-size, --pp-size, --dp-size and --base-gpu-id together take {needed} GPUs",
        f"but only {visible} are visible to this process",
        f"give values whose product is at most {visible}, or make more GPUs visible (CUDA_VISIBLE_DEVICES)",
        code="devices",
    )
