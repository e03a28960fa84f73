"""What holds for every test: how files are dealt to parallel workers, and that no test leaves its logging or its environment behind."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Files whose tests share a fixture of the session, servers that would otherwise be started once a worker.
TOGETHER = ("test/engine/differential/",)
# Tests that share nothing and mostly compile: dealt one by one.
SINGLY = ("test/gpu/test_verify_attention.py",)


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start, also where a shell has started this run behind an ``&``, deaf to it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Shared machines stall for longer than any deadline; a slow example says nothing about the code. `make test` draws the same
# examples from the same tree, so that it judges the change; `make test-properties` searches.
_ANYWHERE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeat", derandomize=True, **_ANYWHERE)
settings.register_profile("search", print_blob=True, **_ANYWHERE)
settings.load_profile("repeat")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal whole files, so that what a module shares is made once; folders of ``TOGETHER`` go to one worker."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SINGLY):
                return nodeid
            shared = [folder for folder in TOGETHER if nodeid.startswith(folder)]
            return shared[0] if shared else str(super()._split_scope(nodeid))

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those that start servers: what is left for the end is short, and workers end together."""
    long, server = (
        {item.path for item in items if item.get_closest_marker(name)} for name in ("long", "server")
    )
    items.sort(key=lambda item: (item.path not in long, item.path not in server))


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """Upstream configures the root logger while it parses arguments; its handler would keep this test's stream."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Upstream's arguments write variables too; a server that a later test starts would inherit them."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    for name in before.keys() | after.keys():
        if name != "PYTEST_CURRENT_TEST" and before.get(name) != after.get(name):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
