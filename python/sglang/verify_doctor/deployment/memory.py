"""The plan of one rank's memory in bytes: weights, cache, attention buffers, what is set aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.verify_doctor.deployment import attention, switch, weights
from sglang.verify_doctor.deployment.subject import Deployment, Side

# What is gone before the first weight: driver, CUDA context, modules, communicator. One H200 of 140.4 GiB had 138.5
# GiB free by then.
CONTEXT_BYTES = 2 << 30


def plan(it: Deployment) -> dict[str, Any] | None:
    """Parts of one rank's memory in bytes, ``tokens`` of cache that fit, ``sources`` of each part, and what overruns.

    None on a CPU, whose memory is not divided beforehand. Weights and cache come from the model's shape, buffers from
    the functions that allocate them, the reserve from upstream's own fraction. Activations are within the reserve.
    """
    if it.gpu is None or it.target is None:
        return None
    args, total = it.args, it.gpu.memory_mib << 20
    fraction = float(args.mem_fraction_static or 0.88)
    sides: list[tuple[str, Side, str]] = [("target", it.target, str(args.model_path))]
    if it.draft is not None:
        sides.append(("draft", it.draft, str(args.speculative_draft_model_path)))
    parts: dict[str, int] = {}
    sources: dict[str, str] = {}
    known = True
    for name, side, path in sides:
        folder = Path(path)
        found = weights.of(folder if folder.is_dir() else None, side.config, int(args.tp_size))
        sources[f"weights, {name}"] = found.source
        parts[f"weights, {name}"] = found.rank_bytes or 0
        known = known and found.rank_bytes is not None
    token_bytes = sum(cache_bytes(side) for _, side, _ in sides)
    held = sum(parts.values()) + CONTEXT_BYTES
    room = int(fraction * total) - held
    limit = args.max_total_tokens
    tokens = max(min(room // token_bytes, limit or room), 0) if token_bytes else 0
    parts["KV cache"] = tokens * token_bytes
    sources["KV cache"] = f"{token_bytes / 1024:.2f} KiB a token on a rank"
    parts["context"] = CONTEXT_BYTES
    sources["context"] = "assumed, after one H200"
    parts |= buffers(it)
    sources["attention buffers, fork"] = "the kernels' own plans, largest batch captured"
    sources["attention buffers, upstream"] = "sizes in upstream's Triton backend"
    reserve = total - int(fraction * total)
    parts["graphs, as upstream reserves"] = _graphs(args)
    sources["graphs, as upstream reserves"] = "upstream's estimate, within what is set aside"
    for part in switch.plan(it, int(tokens), token_bytes):
        parts[part.name], sources[part.name] = part.bytes, part.source
    return {
        "total_bytes": total,
        "parts": parts,
        "sources": sources,
        "set_aside_bytes": reserve,
        "fraction": fraction,
        "tokens": int(tokens),
        "token_bytes": token_bytes,
        "context": it.target.context,
        "weights_known": known,
        "overrun_bytes": max(-room, 0),
        "ranks": int(args.tp_size),
    }


def cache_bytes(side: Side) -> int:
    """Bytes of one token's keys and values in all layers, on one rank."""
    size = int(side.kv_dtype.itemsize)
    each = side.qk_dim if side.latent else side.kv_heads * (side.qk_dim + side.v_dim)
    return side.layers * each * size


def _graphs(args: Any) -> int:
    try:
        return int(args.reserve_for_graph_mb() * (1 << 20))
    except Exception:
        return 0


def buffers(it: Deployment) -> dict[str, int]:
    """What attention allocates once for captured graphs, for the target and the draft together."""
    largest = max(it.batches, default=0)
    backends = {str(name) for name in it.args.get_attention_backends()}
    if not largest or attention.OURS not in backends or it.gpu is None:
        return {}
    found = {"attention buffers, fork": 0, "attention buffers, upstream": 0}
    for side in (it.target, it.draft):
        if side is None:
            continue
        found["attention buffers, fork"] += _ours(it, side, largest)
        rows = largest * it.draft_tokens
        splits = int(it.args.triton_attention_num_kv_splits or 8)
        # fp32 partial results and their log-sum-exps, and one 8-byte cache index a row and position.
        found["attention buffers, upstream"] += rows * side.q_heads * splits * (side.v_dim + 1) * 4
        found["attention buffers, upstream"] += rows * side.context * 8
    return found


def _ours(it: Deployment, side: Side, largest: int) -> int:
    from dataclasses import replace

    from sglang.srt.layers.attention.verify.admission import admit
    from sglang.srt.layers.attention.verify.plan import make_plan
    from sglang.srt.layers.attention.verify.workspace import Needs

    assert it.gpu is not None
    traits = attention.traits(it, it.gpu)
    needs = Needs()
    for tokens in {1, it.draft_tokens}:
        one = attention.request(it, it.gpu, side, tokens)
        for batch in it.batches:
            request = replace(one, batch=batch)
            if admit(request).ok:
                needs = needs | Needs.of(make_plan(request, traits, side.context))
    return needs.total_bytes
