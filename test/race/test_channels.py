"""Calls in packets whose shapes differ: no order of events leaves a rank waiting, whatever the counters of channels are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import channels
import pytest
from sglang.srt.distributed.one_shot.protocol import SAFE

#: CTAs of a call: one, two, one of two without data (the last of a row that the others hold), the other one alone.
SHAPES: tuple[channels.Shape, ...] = ({0: True}, {0: True, 1: True}, {0: True, 1: False}, {0: False, 1: True})


@pytest.mark.parametrize("shapes", list(product(SHAPES, repeat=4)), ids=str)
def test_calls_of_any_shapes_end(shapes: tuple[channels.Shape, ...]) -> None:
    assert channels.stuck(shapes, SAFE) == ""


def test_calls_that_overlap_do_not() -> None:
    """Counters of a channel that had no data in between: only the order of kernels keeps what was sent."""
    shapes = [{0: True}, {0: False, 1: True}, {0: True}]
    assert channels.stuck(shapes, SAFE) == ""
    assert "channel 0: epoch 1, the slot holds 3" in channels.stuck(shapes, replace(SAFE, kernel_order=False))


def test_one_buffer_is_too_few() -> None:
    assert channels.stuck([{0: True}, {0: True}], replace(SAFE, buffers=1)) != ""


def test_counters_that_drift_apart_leave_the_last_call_waiting() -> None:
    """Each call takes what the next one of the other rank sends, until there is none."""
    assert channels.stuck([{0: True}] * 3, SAFE, drift=1) != ""
