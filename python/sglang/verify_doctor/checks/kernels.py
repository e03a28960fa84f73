"""Which attention configuration each GPU gets, from the table that the kernels' plans are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.layers.attention.verify.table import (
    FORMS,
    FUSED_FROM,
    FUSED_VARIABLE,
    MEASURED_FAMILIES,
    WARPGROUP_BATCH,
    WARPGROUP_VARIABLE,
    arch_family,
    choose_tile,
    fused_use,
    warpgroup_use,
)
from sglang.verify_doctor.facts import nvidia
from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, note, ok

# Rows that are shown: a verify of 3 tokens with 8 heads a rank, over each kind of cache (value dims, bytes a value).
SHOWN = (("MLA bf16", "mla", 512, 2), ("MLA fp8", "mla", 512, 1), ("GQA bf16", "gqa", 128, 2))
ROWS = 24


def settings(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Values of ``SGLANG_FORK_FUSED_ATTENTION`` and ``SGLANG_FORK_WARPGROUP_ATTENTION`` on the recorded machine."""
    chosen = section(facts, "environment")
    return str(chosen.get(FUSED_VARIABLE) or "auto"), str(chosen.get(WARPGROUP_VARIABLE) or "auto")


def attention(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """The tiles of every capability present."""
    if mode != "gpu":
        return []
    gpus = section(facts, "nvidia").get("gpus") or section(facts, "torch").get("devices") or []
    findings = []
    for pair in sorted({pair for gpu in gpus if (pair := nvidia.capability(gpu.get("capability")))}):
        if pair < (9, 0):
            findings.append(
                note("kernels", f"capability {pair[0]}.{pair[1]}: the stock kernels (split-KV needs 9.0)")
            )
            continue
        family = arch_family(pair)
        fused, warpgroup = settings(facts)
        tiles = "; ".join(
            f"{name} {_text(pair, kind, dim, size, fused, warpgroup)}" for name, kind, dim, size in SHOWN
        )
        known = {"generic": "no row of its own in the table"}.get(
            family,
            "measured" if family in MEASURED_FAMILIES else "compiled ahead of time and checked, never run",
        )
        make = ok if family in MEASURED_FAMILIES else note
        findings.append(make("kernels", f"{family} ({known}): {tiles}; compiled at first use and cached"))
    return findings


def _text(capability: tuple[int, int], kind: str, dim: int, size: int, fused: str, warpgroup: str) -> str:
    """The form of small batches, and from which batch on another takes over."""
    family = arch_family(capability)
    tile = choose_tile(family, kind, ROWS, dim, size, True)
    use = fused_use(family, fused) if kind == "mla" else "no"
    if use == "always":
        return FORMS["fused"]
    text = f"{tile.kernel} {tile.block_n}x{tile.block_r}, {tile.num_warps} warps"
    small = warpgroup_use(capability, warpgroup) if kind == "mla" and size == 2 else "no"
    if small == "measured":
        return f"{FORMS['warpgroup']} up to batch {WARPGROUP_BATCH}, then {text}"
    if small == "always":
        return FORMS["warpgroup"]
    if use == "measured" and size in FUSED_FROM:
        text += f", from batch {FUSED_FROM[size]} on {FORMS['fused']}"
    return text
