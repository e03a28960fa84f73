"""Variables of the switch to plain decode (``--speculative-auto``), for benches and tests."""

from __future__ import annotations

from sglang.srt.verify_settings.declare import Setting

_READER = "sglang.srt.speculative.auto, in every rank"

SETTINGS = (
    Setting(
        "SGLANG_SPEC_AUTO_ON_CPU",
        "flag",
        "0",
        "The switch works on a CPU too, where it gains nothing",
        _READER,
    ),
    Setting(
        "SGLANG_SPEC_AUTO_ON_SIMULATED",
        "flag",
        "0",
        "The switch works with simulated acceptance too, which otherwise measures cycles",
        _READER,
    ),
    Setting(
        "SGLANG_SPEC_AUTO_SCRIPT",
        "int",
        "",
        "The switch is turned every so many steps instead of by live times, for tests",
        _READER,
        least=0,
    ),
)
