"""Where the milliseconds of a speculative cycle go, and whether speculation wins.

A cycle is one round of draft, verify, accept and draft extend. Its boundaries are marked on the device
timeline, so the phases and the gap before the next cycle sum to the wall time by construction::

    |draft ........|verify ...............|sample ..|draft_extend .....|host_gap|draft ...

Modules: ``clock`` marks and reads boundaries without a host synchronisation, ``totals`` adds them up,
``accept`` counts kept tokens, ``breakeven`` is the arithmetic, ``alarm`` watches for a collapse,
``collector`` ties them together for one process, ``hooks`` are what patched upstream lines call,
``export`` and ``metrics`` publish. The arithmetic modules need only the standard library.
"""
