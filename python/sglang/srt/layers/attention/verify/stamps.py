# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Time stamps that a traced launch leaves: which stage of which block was reached when, on which multiprocessor.

A traced launch gets a tensor ``trace`` of int64, [programs, WIDTH], one record a program (split: work item times row
blocks; merge: row times column blocks). An ordinary launch passes None and is the same machine code as without this
file. ``benchmark/attention_trace.py`` makes a timeline of the records.

Clocks count cycles of one multiprocessor. Each record also holds the device-wide timer, which may tick as seldom as once a
microsecond, next to its first and last clock: enough to lay the clocks of all multiprocessors on one axis.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import core
from triton.language.extra import cuda

# Fields of a record, in order (``Stamp`` in fused_work.cuh); what a stage does not have stays as the caller left it. The last
# two are those of one launch: its results sent to the blocks that merge, and theirs seen. A split in CUDA C++ has other things
# there, before ``products_done``: the scores of its last tile known, and their softmax done.
FIELDS = (
    "multiprocessor",
    "timer_first",
    "start",
    "lengths_read",
    "slots_read",
    "first_copies_sent",
    "last_copies_sent",
    "wait_over",
    "inputs_there",
    "first_keys_there",
    "last_keys_there",
    "products_done",
    "written",
    "timer_last",
    "work",
    "left_for_others",
    "others_there",
)
WIDTH = 24
RECORD = gl.constexpr(WIDTH)
MULTIPROCESSOR = gl.constexpr(FIELDS.index("multiprocessor"))
TIMER_FIRST = gl.constexpr(FIELDS.index("timer_first"))
START = gl.constexpr(FIELDS.index("start"))
LENGTHS_READ = gl.constexpr(FIELDS.index("lengths_read"))
SLOTS_READ = gl.constexpr(FIELDS.index("slots_read"))
FIRST_COPIES_SENT = gl.constexpr(FIELDS.index("first_copies_sent"))
LAST_COPIES_SENT = gl.constexpr(FIELDS.index("last_copies_sent"))
WAIT_OVER = gl.constexpr(FIELDS.index("wait_over"))
INPUTS_THERE = gl.constexpr(FIELDS.index("inputs_there"))
FIRST_KEYS_THERE = gl.constexpr(FIELDS.index("first_keys_there"))
LAST_KEYS_THERE = gl.constexpr(FIELDS.index("last_keys_there"))
PRODUCTS_DONE = gl.constexpr(FIELDS.index("products_done"))
WRITTEN = gl.constexpr(FIELDS.index("written"))
TIMER_LAST = gl.constexpr(FIELDS.index("timer_last"))
WORK = gl.constexpr(FIELDS.index("work"))


@core.extern
def _clock(_semantic=None):
    return core.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
    )


@core.extern
def _clock_after(value, _semantic=None):
    # The clock is read under a predicate that depends on the value, so not before the value is there.
    return core.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $1, 0x80000001; mov.u64 $0, 0; @p mov.u64 $0, %clock64;}",
        "=l,r",
        [value],
        dtype=core.int64,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


@gluon.jit
def _record(trace):
    return trace + (gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)) * RECORD


@gluon.jit
def stamp_start(trace):
    """First stamp of a program: clock, timer, multiprocessor."""
    record = _record(trace)
    gl.store(record + TIMER_FIRST, cuda.globaltimer())
    gl.store(record + START, _clock())
    gl.store(record + MULTIPROCESSOR, cuda.smid().to(gl.int64))


@gluon.jit
def stamp(trace, FIELD: gl.constexpr):
    """The stage of FIELD is reached."""
    gl.store(_record(trace) + FIELD, _clock())


@gluon.jit
def stamp_after(trace, FIELD: gl.constexpr, value):
    """The int32 scalar ``value`` is there."""
    gl.store(_record(trace) + FIELD, _clock_after(value))


@gluon.jit
def stamp_end(trace, work):
    """Last stamp of a program: clock, timer, and the amount of work it had."""
    record = _record(trace)
    gl.store(record + TIMER_LAST, cuda.globaltimer())
    gl.store(record + WRITTEN, _clock())
    gl.store(record + WORK, work.to(gl.int64))
