"""Variables of the cycle graph."""

from __future__ import annotations

from sglang.srt.verify_settings.declare import Setting

SETTINGS = (
    Setting(
        "SGLANG_SPEC_DRAFT_PREFETCH",
        "int",
        "0",
        "Megabytes (MiB) of the draft's next weights that are asked into the L2 cache ahead of their use; 0: none",
        "sglang.srt.speculative.cycle_graph.prefetch, in every rank",
        least=0,
        most=256,
    ),
)
