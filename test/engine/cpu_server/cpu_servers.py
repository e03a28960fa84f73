"""Servers that the tests of this folder share; each is started once a session and always taken down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "test" / "engine")]

import forced_acceptance  # noqa: E402
import tiny_models  # noqa: E402
from served import Served, speculative_flags  # noqa: E402

PAIRS: dict[str, Callable[..., tiny_models.ModelPair]] = {
    "kimi": tiny_models.write_kimi_pair,
    "llama": tiny_models.write_llama_pair,
}


@dataclass(frozen=True)
class Setup:
    """One server: which model, and how it is served. Steps of 0 serve it plainly."""

    name: str
    pair: str
    steps: int = 0
    topk: int = 1
    tokens: int = 0
    flags: tuple[str, ...] = ()
    draft_vocab: int = tiny_models.VOCAB


@dataclass(frozen=True)
class Running:
    """A server that is up, its model, and the file through which a draft is made right."""

    server: Served
    models: tiny_models.ModelPair
    known: Path
    setup: Setup


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Setup], Running]]:
    """Give a function that starts a setup, replacing the one before: two cores carry one server at a time."""
    current: dict[str, Running] = {}
    with ExitStack() as stack:

        def start(setup: Setup) -> Running:
            if setup.name in current:
                return current[setup.name]
            stack.pop_all().close()
            current.clear()
            folder = tmp_path_factory.mktemp(setup.name)
            models = PAIRS[setup.pair](folder, draft_vocab=setup.draft_vocab)
            flags = ["--dtype=float32", "--max-total-tokens=4096", "--max-running-requests=8", *setup.flags]
            flags.append(
                "--sleep-on-idle"
            )  # an idle scheduler that polls takes a core from the test beside it
            environment = {}
            if setup.steps:
                flags += speculative_flags(
                    models.draft, steps=setup.steps, topk=setup.topk, tokens=setup.tokens
                )
                environment = forced_acceptance.environment(folder, folder / "known.json")
            server = Served(models.target, folder / "server.log", flags, environment=environment)
            stack.enter_context(server)
            current[setup.name] = Running(server, models, folder / "known.json", setup)
            return current[setup.name]

        yield start
