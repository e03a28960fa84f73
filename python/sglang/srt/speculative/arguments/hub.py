"""A path that may name a repository on the model hub: its configuration, or a quick and clear refusal."""

from __future__ import annotations

import difflib
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from sglang.srt.speculative.arguments import checkpoint
from sglang.srt.speculative.arguments.faults import ArgumentFault, one_line

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def config_directory(option: str, path: str, revision: str | None) -> Path | None:
    """Where the hub's cache keeps a repository's ``config.json``, fetched if need be; None where that says nothing.

    Raises:
        ArgumentFault: the repository is neither in the cache nor to be had.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    # The hub's client tries five times, with pauses that add up to half a minute and a line of log for each.
    cached_only = not has_address(constants.ENDPOINT)
    try:
        file = hf_hub_download(path, checkpoint.CONFIG_NAME, revision=revision, local_files_only=cached_only)
        return Path(file).parent
    except LocalEntryNotFoundError as error:
        raise _unreachable(option, path, "it is not in the cache and the hub cannot be reached") from error
    except EntryNotFoundError:
        return None  # A repository without config.json may be of a kind that only upstream knows.
    except (OSError, ValueError) as error:
        raise _unreachable(option, path, one_line(error)) from error


def has_address(endpoint: str) -> bool:
    """Whether the name in ``endpoint`` resolves; behind a proxy, which resolves names itself, taken for granted."""
    host = urlsplit(endpoint).hostname
    if host is None or any(os.environ.get(name) for name in PROXIES):
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def near_directory(path: str) -> str | None:
    """The checkpoint directory here whose name is nearest to ``path``'s, or None: most such paths are slips."""
    place = Path(path)
    names = [file.parent.name for file in place.parent.glob(f"*/{checkpoint.CONFIG_NAME}")]
    near = difflib.get_close_matches(place.name, names, n=1)
    return str(place.parent / near[0]) if near else None


def _unreachable(option: str, path: str, reason: str) -> ArgumentFault:
    near = near_directory(path)
    correct = f"correct the path ({near} is here)" if near else "correct the path"
    return ArgumentFault(
        f"{option} {path}",
        f"is no directory on this machine, and no such repository could be fetched ({reason})",
        f"{correct}, or download the checkpoint and give its directory",
        code="path-unreachable",
    )
