"""Variables of the fork as a whole."""

from __future__ import annotations

from sglang.srt.verify_settings.declare import Setting

SETTINGS = (
    Setting(
        "SGLANG_FORK_DISABLE",
        "list",
        "",
        "Topics that are switched off, so that stock behaviour returns",
        "sglang.fork.topics, in every process",
    ),
    Setting(
        "SGLANG_FORK_NCCL_PROFILE",
        "text",
        "off",
        "Recommended NCCL settings to fill in where the user set none: off, auto, or the name of a profile",
        "sglang.srt.verify_settings.hooks, in the launcher; --nccl-profile wins",
    ),
    Setting(
        "SGLANG_FORK_LAUNCHED_WITH",
        "text",
        "",
        "Written by the launcher: the settings that its ranks must find; not for users",
        "sglang.srt.verify_settings.reach, in every rank",
    ),
    Setting(
        "SGLANG_FORK_WHEELS",
        "path",
        "",
        "A directory with upstream's wheels, for composing without a network",
        "patches.engine, while building",
    ),
    Setting(
        "SGLANG_FORK_COMMIT",
        "text",
        "",
        "The commit that runs where no checkout says it, for bench rows; it goes before git's",
        "sglang.bench_verify.environment",
    ),
    Setting(
        "SGLANG_FORK_IMAGE",
        "text",
        "",
        "The container image, for bench rows",
        "sglang.bench_verify.environment",
    ),
    Setting(
        "SGLANG_SPEC_BASELINE",
        "path",
        "",
        "File of measured decode times, against which a server judges its speculation",
        "sglang.srt.speculative.stats",
    ),
    Setting(
        "SGLANG_SPEC_STATS_EVERY",
        "int",
        "1 on a CPU, 4 on a GPU",
        "One cycle in so many is timed",
        "sglang.srt.speculative.stats",
        least=1,
    ),
)
