"""Which paths are in force: the KV-split plans of verify attention, and the all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.fork import fallbacks

# The attribute under which verify attention keeps its decisions on a backend.
BINDING = "fork_verify_binding"
# The attribute under which a group keeps the one-shot communicator, and the path its refusals are counted under.
ONE_SHOT = "_one_shot_communicator"
ONE_SHOT_PATH = "one-shot-all-reduce"
NESTED = ("prefill_backend", "decode_backend", "attn_backends")


def kv_plans(scheduler: Any) -> list[dict[str, Any]]:
    """Each admitted or refused attention shape of this process: batch, tokens, kernel, splits and the reason in words."""
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    for role, backend in _backends(scheduler):
        binding = getattr(backend, BINDING, None)
        for request, (admission, plan) in list(getattr(binding, "decisions", {}).items()):
            reason = plan.reason if plan is not None else str(getattr(admission, "reason", ""))
            entry = {
                "role": role,
                "kind": str(request.kind),
                "batch": int(request.batch),
                "tokens": int(request.tokens),
                "used": bool(plan is not None and plan.use),
                "form": str(getattr(plan, "form", "stock kernel")),
                "items": int(plan.items) if plan is not None else 0,
                "reason": reason,
            }
            if (key := repr(entry)) not in seen:
                seen.add(key)
                found.append(entry)
    return found


def _backends(scheduler: Any) -> Iterator[tuple[str, Any]]:
    draft = getattr(getattr(scheduler, "draft_worker", None), "draft_worker", None)
    roots = (
        (
            "target",
            getattr(
                getattr(getattr(scheduler, "tp_worker", None), "model_runner", None), "attn_backend", None
            ),
        ),
        ("draft", getattr(draft, "draft_attn_backend", None)),
        ("draft_extend", getattr(draft, "draft_extend_attn_backend", None)),
    )
    for role, root in roots:
        if root is None:
            continue
        yield role, root
        for name in NESTED:
            nested = getattr(root, name, None)
            for item in nested if isinstance(nested, (list, tuple)) else [nested]:
                if item is not None:
                    yield role, item


def all_reduce(scheduler: Any) -> str:
    """How this rank reduces: the fork's one-shot kernels and upstream's paths that are switched on, in the order asked."""
    group = getattr(scheduler, "tp_group", None)
    size = int(getattr(group, "world_size", 1) or 1)
    if size == 1:
        return "none: one rank"
    paths = [_one_shot(group)]
    for name, label in (
        ("ca_comm", "custom"),
        ("qr_comm", "quick"),
        ("torch_symm_mem_comm", "symmetric memory"),
        ("pynccl_comm", "pynccl in graphs"),
    ):
        communicator = getattr(group, name, None)
        if communicator is not None and not getattr(communicator, "disabled", False):
            paths.append(f"{label} ({type(communicator).__name__})")
    text = f"{size} ranks: " + (", then ".join(path for path in paths if path) or "torch.distributed")
    if not paths[0] and (refused := fallbacks.snapshot().get(ONE_SHOT_PATH)):
        text += f"; no one-shot: {', '.join(refused)}"
    return text


def _one_shot(group: Any) -> str:
    """The fork's communicator of a group with its launches by kind and method (those inside replays are not counted)."""
    communicator = getattr(group, ONE_SHOT, None)
    if communicator is None:
        return ""
    calls = getattr(communicator, "calls", {})
    counts = ", ".join(f"{kind} {method} {count}" for (kind, method), count in sorted(calls.items()))
    return f"one-shot where its table says so (launches: {counts or 'none yet'})"
