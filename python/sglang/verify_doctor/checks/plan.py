"""A deployment: what the server's own resolution made of it, and whether its memory suffices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning

GIB = 1 << 30
# What can be given to weights and cache at most, what upstream gives by default, and a cache worth having.
FRACTION_MOST, FRACTION_USUAL, CACHE_SHARE = 0.95, 0.88, 0.08


def resolution(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """What will run where and why, or what the server would refuse."""
    found = section(facts, "deployment")
    if not found:
        return []
    if "trust_remote_code" in str(found.get("error", "")):
        return [
            fault(
                "deployment",
                "the checkpoint brings code of its own, which the server runs only when told to",
                "add --trust-remote-code if you trust its author",
            )
        ]
    if "error" in found:
        # Asked whether it would start, "not known" is no yes.
        cure = str(found.get("cure") or "run the doctor where the fork and its packages are installed")
        return [fault("deployment", f"cannot be resolved: {found['error']}", cure)]
    findings = []
    broken = section(found, "fault")
    if broken:
        findings.append(fault("deployment", str(broken["found"]), str(broken["cure"])))
    if found.get("undescribed"):
        findings.append(
            warning(
                "deployment",
                f"the server resolves it, but what would run where is not told ({found['undescribed']})",
                "report this line; the server itself says it in its log when it starts",
            )
        )
    findings += [_row(row) for row in found.get("rows") or []]
    findings += [note("deployment", str(text)) for text in found.get("notes") or []]
    return findings


def _row(row: Mapping[str, Any]) -> Finding:
    text = f"{row['what']}: {row['why']}" if row.get("why") else str(row["what"])
    if row["what"] == "refused":
        return fault(
            str(row["about"]),
            text,
            "give the draft a backend of its own: --speculative-draft-attention-backend",
        )
    if row["what"] == "not known":
        return note(str(row["about"]), text)
    return ok(str(row["about"]), text)


def memory(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """One rank's memory, part by part."""
    plan = section(facts, "deployment", "memory")
    if not plan:
        return []
    total, parts = int(plan["total_bytes"]), section(plan, "parts")
    sources = section(plan, "sources")
    text = (
        f"{plan['ranks']} ranks of {total / GIB:.1f} GiB, {plan['fraction']:.3f} of it for weights and cache"
    )
    findings = []
    if not plan["weights_known"]:
        findings.append(
            note("memory plan", f"{text}; the size of the weights is not known, so nothing is promised")
        )
    elif plan["overrun_bytes"]:
        findings.append(_overrun(plan, text))
    else:
        findings.append(
            ok("memory plan", f"{text}: room for about {int(plan['tokens']):,} tokens, all requests together")
        )
        if plan["tokens"] < plan.get("context", 0):
            findings.append(
                note("memory plan", f"that is less than one request of {plan['context']:,} tokens")
            )
    for name, size in parts.items():
        if size:
            source = f" ({sources[name]})" if name in sources else ""
            findings.append(ok("memory plan", f"{_size(int(size))} {name}{source}"))
    findings.append(
        ok(
            "memory plan",
            f"{_size(int(plan['set_aside_bytes']))} set aside for activations, graphs and buffers",
        )
    )
    return findings


def _overrun(plan: Mapping[str, Any], text: str) -> Finding:
    """Weights that leave no room for a cache: more of the memory, or more of it, or less to keep."""
    total, over = int(plan["total_bytes"]), int(plan["overrun_bytes"])
    needed = plan["fraction"] + over / total
    found = f"{text}: weights alone are {over / GIB:.1f} GiB more than that"
    if needed < FRACTION_MOST:
        cure = f"give --mem-fraction-static {min(needed + CACHE_SHARE, FRACTION_MOST):.2f}, and few running requests"
        return fault("memory plan", found, f"{cure}; the rest has to hold activations and graphs")
    least = math.ceil(int(plan["ranks"]) * needed / FRACTION_USUAL)
    return fault("memory plan", found, f"take at least {least} such GPUs, or a quantised checkpoint")


def _size(size: int) -> str:
    return f"{size / GIB:7.2f} GiB" if size >= GIB // 100 else f"{size / (1 << 20):7.2f} MiB"
