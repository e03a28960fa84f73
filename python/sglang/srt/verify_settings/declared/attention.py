"""Variables of the attention kernels."""

from __future__ import annotations

from sglang.srt.verify_settings.declare import Setting

SETTINGS = (
    Setting(
        "SGLANG_FORK_FUSED_ATTENTION",
        "choice",
        "auto",
        "One-launch MLA attention: auto (where it is measured to be faster), on (wherever it is right) or off",
        "sglang.srt.layers.attention.verify.plan, in every rank",
        choices=("auto", "on", "off"),
    ),
    Setting(
        "SGLANG_FORK_WARPGROUP_ATTENTION",
        "choice",
        "auto",
        "MLA attention of Hopper in two launches of CUDA C++: auto (where it is measured to be faster), on (wherever it is right) or off",
        "sglang.srt.layers.attention.verify.plan, in every rank",
        choices=("auto", "on", "off"),
    ),
    Setting(
        "SGLANG_FORK_KERNEL_CACHE",
        "path",
        "(in the user's cache)",
        "Where kernels that are compiled at run time are kept",
        "sglang.srt.layers.attention.verify.fused_build, in every rank",
    ),
)
