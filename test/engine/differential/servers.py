"""The two servers that are compared, and a client that treats an HTTP error as an answer."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

from plugin_entry import declare  # noqa: E402
from served import Served, ServerError, speculative_flags  # noqa: E402

from . import forced_drafts, overlapped_cpu  # noqa: E402

TARGET, DRAFT = ROOT / "models/nano", ROOT / "models/nano-eagle3"
REQUEST_LIMIT_S = 600.0
CONTEXT = 256

# float32, so that a verify of three rows and a decode of one round alike up to the last bits.
COMMON = (
    "--device=cpu",
    "--dtype=float32",
    "--enable-custom-logit-processor",
    "--enable-return-hidden-states",
    f"--context-length={CONTEXT}",
    "--max-total-tokens=4096",
    "--max-running-requests=16",
    "--log-level=warning",
    "--sleep-on-idle",  # an idle scheduler that polls takes a core from the test beside it
)


@dataclass(frozen=True)
class Answer:
    """Status and decoded body; ``body`` is text where it is not JSON."""

    status: int
    body: Any


class Asked(Served):
    """A server whose refusals are answers too."""

    def ask(self, path: str, body: Any = None, limit: float = REQUEST_LIMIT_S) -> Answer:
        """POST ``body`` as JSON, or GET without one."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=limit) as response:
                return Answer(response.status, _decoded(response.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _decoded(error.read()))

    def stream(self, path: str, body: Any) -> tuple[int, list[Any]]:
        """Status and events of a streamed answer; a refusal's body is its one event."""
        try:
            return 200, list(self.events(path, body | {"stream": True}, REQUEST_LIMIT_S))
        except ServerError:
            refused = self.ask(path, body | {"stream": True})
            return refused.status, [refused.body]

    def url(self, path: str) -> str:
        """Absolute address of a path."""
        return f"http://127.0.0.1:{self.port}{path}"

    def load(self) -> dict[str, Any]:
        """Running and waiting requests and used KV slots, as the scheduler counts them."""
        loads: dict[str, Any] = self.get("/v1/loads")["loads"][0]
        return loads


@contextmanager
def plain_server(folder: Path, *flags: str, off: str = "") -> Iterator[Asked]:
    """The reference: the same build without speculation; ``off`` names topics to switch off.

    Without overlap, because upstream's overlapped penalties lag one token (docs/semantics.md).
    """
    environment = _environment([HERE], off)
    arguments = [*COMMON, "--disable-overlap-schedule", *flags]
    with Asked(TARGET, folder / "plain.log", arguments, environment=environment) as server:
        assert isinstance(server, Asked)
        yield server


@contextmanager
def eagle_server(
    folder: Path, *flags: str, off: str = "", overlap: bool = False, plugins: Sequence[str] = ()
) -> Iterator[Asked]:
    """EAGLE-3 with the plugin for scripted drafts; ``overlap`` schedules as GPU servers do.

    ``plugins`` are further ones that the caller has installed into ``folder / "plugin"``.
    """
    place = folder / "plugin"
    declare(place, forced_drafts.ENTRY)
    if overlap:
        declare(place, overlapped_cpu.ENTRY)
    environment = _environment([place, HERE], off) | {
        "SGLANG_PLUGINS": ",".join([forced_drafts.ENTRY, overlapped_cpu.ENTRY, *plugins])
    }
    arguments = [*COMMON, *speculative_flags(DRAFT), *flags]
    with Asked(TARGET, folder / "eagle.log", arguments, environment=environment) as server:
        assert isinstance(server, Asked)
        log = server.log.read_text(errors="replace")
        if forced_drafts.MARK not in log or (overlap and overlapped_cpu.MARK not in log):
            raise RuntimeError(f"a test plugin was not loaded:\n{server.log_tail()}")
        yield server


def _environment(paths: Sequence[Path], off: str) -> dict[str, str]:
    joined = os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH", "")]))
    return {"OMP_NUM_THREADS": "1", "SGLANG_FORK_DISABLE": off, "PYTHONPATH": joined}


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
