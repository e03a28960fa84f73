"""Fixtures: a make-believe checkout, and the real upstream wheel."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import REPOSITORY, Checkout

from patches.engine.fetch import fetch, pick
from patches.engine.model import Sources
from patches.engine.project import Project
from patches.engine.survey import archive_sources


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """An empty make-believe checkout."""
    return Checkout(tmp_path / "checkout")


@pytest.fixture(scope="session")
def project() -> Project:
    """This repository."""
    return Project(REPOSITORY)


@pytest.fixture(scope="session")
def archive(project: Project) -> Path:
    """The pinned upstream wheel, from the named directory, the cache, or the index."""
    pins = project.pins()
    return fetch(pins, pick(pins))


@pytest.fixture(scope="session")
def sources(archive: Path) -> Sources:
    """Upstream's files."""
    return archive_sources(archive)
