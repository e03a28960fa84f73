"""What one test leaves behind the next does not find (``_root_logger``, ``_environment`` in ``test/conftest.py``)."""

from __future__ import annotations

import logging
import os
import signal

LEFT = logging.NullHandler()
BEFORE = dict(os.environ)


def test_a_handler_is_left_behind() -> None:
    logging.getLogger().addHandler(LEFT)
    assert LEFT in logging.getLogger().handlers


def test_and_the_next_test_does_not_see_it() -> None:
    assert LEFT not in logging.getLogger().handlers


def test_variables_are_left_behind() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["PATH"] = "/nowhere"
    os.environ.pop("HOME", None)


def test_and_the_next_test_has_the_environment_of_the_run() -> None:
    assert "LEFT_BEHIND" not in os.environ
    assert {os.environ.get(name) for name in ("PATH", "HOME")} == {
        BEFORE.get(name) for name in ("PATH", "HOME")
    }


def test_what_a_test_starts_can_be_told_ctrl_c() -> None:
    """Also in a run that a shell has started behind an ``&``."""
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
