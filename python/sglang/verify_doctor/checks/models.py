"""A target and its draft: whether they fit each other, and this machine's memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang.verify_doctor.facts.document import section
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning

GIB = 1 << 30
# What upstream leaves to weights and cache by default, and to everything else.
MEMORY_SHARE = 0.88


def pair(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """What the checkpoints are, and the rule that they break together."""
    found = section(facts, "models")
    if found.get("error"):
        return [
            warning(
                "model",
                f"its files are of a form that cannot be judged ({found['error']}), so nothing is said about them",
                "look at config.json of target and draft; if they are right, report this line",
            )
        ]
    findings = []
    for about in ("target", "draft"):
        side = section(found, about)
        if side:
            findings.append(ok("draft" if about == "draft" else "model", describe(side)))
    if found.get("fault"):
        broken = section(found, "fault")
        about = "draft" if section(found, "draft") else "model"
        findings.append(fault(about, f"{broken['value']} {broken['limit']}", str(broken["remedy"])))
    elif section(found, "draft"):
        layers = found.get("captures") or []
        text = f", reads the input of layers {', '.join(map(str, layers))}" if layers else ""
        findings.append(ok("draft", f"fits the target{text}"))
    findings += [
        warning("draft", text, "use a draft trained for this target") for text in found.get("remarks") or []
    ]
    return findings


def describe(side: Mapping[str, Any]) -> str:
    """One checkpoint in one line."""
    numbers = side["numbers"]
    parts = [f"{side['name']}: {side['architecture']}", f"{side['attention']} attention"]
    parts.append(f"{numbers.get('num_hidden_layers', '?')} layers")
    if numbers.get("n_routed_experts"):
        parts.append(f"{numbers.get('num_experts_per_tok', '?')} of {numbers['n_routed_experts']} experts")
    parts.append(str(side["quantization"] or side["dtype"] or "dtype not stated"))
    parts.append(f"{side['weight_bytes'] / GIB:.2f} GiB of weights")
    if side.get("context"):
        parts.append(f"context {side['context']:,}")
    return ", ".join(parts)


def cache_bytes(side: Mapping[str, Any], ranks: int, value_bytes: int = 2) -> int | None:
    """Bytes of KV cache that one token takes on one rank; None where the numbers are not stated.

    A latent head (MLA) is kept whole on each rank; per-head keys and values are divided, but a head is never split.
    """
    numbers = side["numbers"]
    layers = numbers.get("num_hidden_layers")
    if layers is None:
        return None
    if side["attention"] == "MLA":
        return int(layers * (numbers["kv_lora_rank"] + numbers["qk_rope_head_dim"]) * value_bytes)
    heads = numbers.get("num_attention_heads")
    if not heads:
        return None
    width = numbers.get("head_dim") or numbers.get("hidden_size", 0) // heads
    shared = max(math.ceil(numbers.get("num_key_value_heads", heads) / ranks), 1)
    return int(layers * 2 * shared * width * value_bytes)


def memory(facts: Mapping[str, Any], mode: str) -> list[Finding]:
    """Weights and cache against the memory there is, over all the GPUs of the machine."""
    found = section(facts, "models")
    if section(facts, "deployment", "memory"):
        return []  # The plan of the deployment is finer.
    sides = [section(found, name) for name in ("target", "draft") if section(found, name)]
    if not sides:
        return []
    weights = sum(int(side["weight_bytes"]) for side in sides)
    if not weights:
        return [note("memory plan", "no weights on this disk, so there is nothing to plan with")]
    if mode == "cpu":
        free = section(facts, "host").get("available_bytes")
        return _host(weights, free) if isinstance(free, int) else []
    gpus = section(facts, "nvidia").get("gpus") or []
    sizes = [int(gpu["memory_mib"]) << 20 for gpu in gpus if gpu.get("memory_mib")]
    return _devices(weights, sides, min(sizes), len(sizes)) if sizes else []


def _host(weights: int, free: int) -> list[Finding]:
    text = f"{weights / GIB:.2f} GiB of weights, {free / GIB:.1f} GiB free"
    if weights > free:
        return [fault("memory plan", text, "use a smaller or quantised model, or a machine with more memory")]
    return [ok("memory plan", text)]


def _devices(weights: int, sides: list[Mapping[str, Any]], size: int, count: int) -> list[Finding]:
    share = weights / count
    room = MEMORY_SHARE * size - share
    text = f"{share / GIB:.1f} GiB of weights on each of {count} GPUs with {size / GIB:.1f} GiB"
    if room <= 0:
        needed = math.ceil(weights / (MEMORY_SHARE * size))
        return [fault("memory plan", text, f"take at least {needed} such GPUs, or a quantised checkpoint")]
    tokens = [cache_bytes(side, count) for side in sides]
    if None in tokens:
        return [ok("memory plan", text)]
    each = sum(value for value in tokens if value is not None)
    return [
        ok(
            "memory plan",
            f"{text}, {room / GIB:.1f} GiB left for the cache at {each / 1024:.1f} KiB a token (16-bit): about "
            f"{int(room / each):,} tokens, less what graphs and activations take",
        )
    ]
