"""Which attention kernel runs where, from the functions that decide at run time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.verify_doctor.deployment.drafting import draft_backend
from sglang.verify_doctor.deployment.machine import Machine
from sglang.verify_doctor.deployment.subject import Deployment, Row, Side

if TYPE_CHECKING:
    from sglang.srt.layers.attention.verify.admission import AttentionRequest, BackendFacts
    from sglang.srt.layers.attention.verify.plan import DeviceTraits, SplitPlan

OURS = "triton"
STOCK = "triton, stock kernel"


def rows(it: Deployment) -> list[Row]:
    """Prefill, then decode or verify and both sides of the draft."""
    prefill, decode = (str(name) for name in it.args.get_attention_backends())
    found = [("attention, prefill", prefill, "as given, or the server's choice for this model and machine")]
    if not it.args.speculative_algorithm:
        found.append(("attention, decode", *_path(it, it.target, decode, 1, "decode")))
        return found
    verify = decode if it.args.speculative_attention_mode == "decode" else prefill
    found.append(("attention, verify", *_path(it, it.target, verify, it.draft_tokens, "verify")))
    for about, kind, tokens in (("draft", "decode", 1), ("draft extend", "draft_extend", it.draft_tokens)):
        backend, refused = draft_backend(it.args, kind)
        if refused:
            found.append((f"attention, {about}", "refused", refused))
        elif backend is None:
            found.append((f"attention, {about}", "none", "one step: the draft runs in its extend only"))
        else:
            found.append((f"attention, {about}", *_path(it, it.draft, backend, tokens, about)))
    return found


def _path(it: Deployment, side: Side | None, backend: str, tokens: int, what: str) -> tuple[str, str]:
    """Which kernel a backend runs for rows of this width, with the reason."""
    if it.gpu is None:
        return f"PyTorch ({backend})", "a CPU has no captured graphs and no Triton kernels"
    if backend != OURS:
        text = "the fork's split-KV kernels are in the triton backend"
        if what in ("verify", "draft extend"):
            text += "; --attention-backend triton takes them"
        return f"{backend}, upstream's kernel", text
    if side is None:
        return OURS, "the configuration of the model could not be read"
    from sglang.fork import enabled
    from sglang.srt.layers.attention.verify.admission import admit, admit_backend, admit_one_launch
    from sglang.srt.layers.attention.verify.plan import by_batch

    if not enabled("verify-attention"):
        return STOCK, "the topic verify-attention is off"
    tree = (it.args.speculative_eagle_topk or 1) > 1
    if tree and what == "verify":
        return STOCK, "tree drafts (topk above 1) are served by the stock kernel"
    whole = admit_backend(backend_facts(it, side, draft=what.startswith("draft")))
    if not whole.ok:
        return STOCK, whole.reason
    step = what.startswith("draft") and tokens == 1 and not tree
    asked = request(it, it.gpu, side, tokens, mask="full" if tree else "none", draft_step=step)
    admitted = admit(asked)
    if not admitted.ok:
        return STOCK, admitted.reason
    device = traits(it, it.gpu)
    forms = by_batch(asked, device, side.context, it.batches or [1])
    used = [plan.use for *_, plan in forms]
    if not any(used):
        return STOCK, forms[0][2].reason
    why = "; ".join(
        plan.reason if len(forms) == 1 else f"batch {first}: {plan.reason}" for first, _, plan in forms
    )
    alone = admit_one_launch(it.args)
    if not alone.ok and set_traits(it, it.gpu).fused != "no":
        why += f"; not in one launch: {alone.reason}"
    return f"triton, the fork's split-KV kernel: {_forms(forms)}", f"{why}; compiled at first use"


def _forms(forms: list[tuple[int, int, SplitPlan]]) -> str:
    """One form, or each with the captured batch sizes that it serves."""
    if len(forms) == 1:
        return forms[0][2].form
    return ", ".join(
        f"batch {first}{'' if first == last else f' to {last}'} {plan.form}" for first, last, plan in forms
    )


def request(it: Deployment, gpu: Machine, side: Side, tokens: int, **facts: Any) -> AttentionRequest:
    """What the attention path is asked for one request of ``tokens`` rows."""
    from sglang.srt.layers.attention.verify.admission import AttentionRequest

    return AttentionRequest(
        kind="mla" if side.latent else "gqa",
        batch=1,
        tokens=tokens,
        q_heads=side.q_heads,
        kv_heads=side.kv_heads,
        qk_dim=side.qk_dim,
        v_dim=side.v_dim,
        q_dtype=side.dtype,
        kv_dtype=side.kv_dtype,
        capability=gpu.capability,
        page_size=int(it.args.page_size or 1),
        **facts,
    )


def backend_facts(it: Deployment, side: Side, *, draft: bool) -> BackendFacts:
    """What the hook of a Triton backend will find on this side, as far as arguments and configuration settle it."""
    from sglang.srt.layers.attention.verify.admission import BackendFacts

    args, config = it.args, side.config
    hybrid = bool(getattr(config, "is_hybrid_swa", False))
    window = getattr(config, "sliding_window_size" if hybrid else "attention_chunk_size", None)
    return BackendFacts(
        context_parallel=int(args.dcp_size) > 1,
        deterministic=bool(args.enable_deterministic_inference),
        window_pool=hybrid and not args.disable_hybrid_swa_memory,
        window=window,
        virtual_slots=bool(args.enable_unified_memory),
        multi_layer_draft=draft and bool(args.enable_multi_layer_eagle),
    )


def set_traits(it: Deployment, gpu: Machine) -> DeviceTraits:
    """The device as its environment has it, whatever the server's arguments are."""
    from sglang.srt.layers.attention.verify.plan import planned_traits
    from sglang.verify_doctor.checks.kernels import settings

    return planned_traits(gpu.capability, gpu.multiprocessors or 1, *settings(it.facts))


def traits(it: Deployment, gpu: Machine) -> DeviceTraits:
    """The device as the plans of this server see it: without the one launch where attention shares the device."""
    from sglang.srt.layers.attention.verify.admission import admit_one_launch

    found = set_traits(it, gpu)
    return found if admit_one_launch(it.args).ok else replace(found, fused="no")
