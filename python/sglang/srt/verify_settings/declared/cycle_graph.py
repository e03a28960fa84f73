"""Variables of the cycle graph."""

from __future__ import annotations

from sglang.srt.verify_settings.declare import Setting

SETTINGS = (
    Setting(
        "SGLANG_SPEC_PROJECT_AHEAD",
        "int",
        "0",
        "The draft's projection of packed states runs inside verify, on so many thread blocks; 0 leaves it to the draft",
        "sglang.srt.speculative.cycle_graph.ahead, in every rank",
        least=0,
        most=1024,
    ),
)
