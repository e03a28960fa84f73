"""Passing one file descriptor from every process to every other one over Unix sockets."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

LIMIT_S = 20.0


@contextlib.contextmanager
def exchange_descriptors(
    gather: Callable[[Any], list[Any]], rank: int, ranks: int, descriptor: int | None
) -> Iterator[dict[int, int]]:
    """Give ``descriptor`` to every other rank; yields theirs by rank. All of them are closed at the end.

    Collective. With None on one rank (it has nothing to give) all must pass None, and nothing is passed.

    Args:
        gather: all-gather of a picklable value among the ranks.
        rank, ranks: of this process.
        descriptor: an open file descriptor, owned and closed here.

    Raises:
        OSError: a rank can open no socket, or did not connect or answer within 20 s; it is named.
    """
    received: dict[int, int] = {}
    try:
        if descriptor is None:
            yield received
            return
        # An abstract name: nothing to remove, and a fresh one cannot be there already.
        name = f"\0sglang-one-shot-{os.getpid()}-{secrets.token_hex(8)}"
        with contextlib.ExitStack() as stack:
            server, refused = None, ""
            try:
                server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                server.bind(name)
                server.listen(ranks)
            except (
                OSError
            ) as error:  # a sandbox without such sockets: the others wait for a name all the same
                server, refused = None, str(error)
            names = gather((name, refused))
            mute = [f"rank {n} has no socket: {problem}" for n, (_, problem) in enumerate(names) if problem]
            if mute or server is None:
                raise OSError("; ".join(mute))
            giver = threading.Thread(target=_give, args=(server, ranks - 1, descriptor), daemon=True)
            giver.start()
            for other in range(ranks):
                if other != rank:
                    received[other] = _take(names[other][0], other)
            giver.join(LIMIT_S)
        yield received
    finally:
        for fd in received.values():
            os.close(fd)
        if descriptor is not None and descriptor >= 0:
            os.close(descriptor)


def _give(server: socket.socket, takers: int, descriptor: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    given = 0
    while given < takers and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the taker reports what it did not get
            server.settimeout(max(0.1, deadline - time.monotonic()))
            taker, _address = server.accept()
            with taker:
                credentials = taker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                # An abstract name is open to every user: a stranger gets nothing, and takes nobody's turn.
                if struct.unpack("3i", credentials)[1] == os.getuid():
                    socket.send_fds(taker, [b"fd"], [descriptor])
                    given += 1


def _take(name: str, other: int) -> int:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as giver:
            giver.settimeout(LIMIT_S)
            giver.connect(name)
            _data, fds, _flags, _address = socket.recv_fds(giver, 16, 1)
    except OSError as error:
        raise OSError(f"file descriptor of rank {other}: {error}") from error
    if not fds:
        raise OSError(f"rank {other} sent no file descriptor")
    return fds[0]
