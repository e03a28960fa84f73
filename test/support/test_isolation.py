"""The first test leaves a log handler behind; the second finds none (``_root_logger`` in ``test/conftest.py``)."""

from __future__ import annotations

import logging

LEFT = logging.NullHandler()


def test_a_handler_is_left_behind() -> None:
    logging.getLogger().addHandler(LEFT)
    assert LEFT in logging.getLogger().handlers


def test_and_the_next_test_does_not_see_it() -> None:
    assert LEFT not in logging.getLogger().handlers
