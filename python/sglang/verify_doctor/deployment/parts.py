"""Rows of the parts of the fork that decide at run time, from the functions that decide there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.fork import topics
from sglang.verify_doctor.deployment.drafting import draft_backend
from sglang.verify_doctor.deployment.subject import Deployment, Row

if TYPE_CHECKING:
    from sglang.srt.speculative.graph_policy.sizes import KindPlan

_CLASSES = {"triton": "TritonAttnBackend", "torch_native": "CpuEagleAttention"}


def _off(name: str) -> str | None:
    """Why a topic is not in force, None where it is."""
    for topic in topics():
        if topic.name == name:
            return None if topic.state == "applied" else f"topic {name}: {topic.state}, {topic.reason}"
    return f"this build has no topic {name}"


def verify_graph(it: Deployment) -> list[Row]:
    """Graphs by kind, and the batches that none of them serves."""
    from sglang.srt.speculative.graph_policy import sizes

    off = _off("verify-graph")
    if off is not None:
        return [("graph policy", "none", off)]
    args = it.args
    policy = str(getattr(args, "speculative_verify_graph", "auto"))
    if it.gpu is None or not it.batches:
        return [("graph policy", policy, "nothing is captured here")]
    asked, most = _sizes(it)
    rows: list[Row] = [
        (
            "graph policy",
            policy,
            {"require": "an eager verify is refused"}.get(policy, "an eager verify is counted by reason"),
        )
    ]
    rows += [
        (f"graphs of {kind.kind}", kind.text().partition(": ")[2], "sizes as asked, up to the batch limit")
        for kind in graph_kinds(it)
    ]
    gap = sizes.find_gap(asked, most, padding=not args.disable_cuda_graph_padding)
    if gap is not None:
        rows.append(("graphs, missing", gap.text(), "such a batch runs eagerly"))
    return rows


def _sizes(it: Deployment) -> tuple[list[int], int]:
    """Batch sizes asked for, and the largest batch that can run."""
    asked = [int(size) for size in it.args.cuda_graph_config.decode.bs or []]
    return asked, int(it.args.max_running_requests or max(asked))


def graph_kinds(it: Deployment) -> tuple[KindPlan, ...]:
    """The graphs that are captured; plain decode beside verify only where the switch stays on."""
    from sglang.srt.speculative.graph_policy import sizes

    args = it.args
    return sizes.plan(
        *_sizes(it),
        draft_tokens=it.draft_tokens if args.speculative_algorithm else 0,
        steps=int(args.speculative_num_steps or 0),
        topk=int(args.speculative_eagle_topk or 1),
        decode=auto_off(it) is None,
    )


def speculative_auto(it: Deployment) -> list[Row]:
    """Whether steps may fall back to plain decode where speculation loses."""
    off = _off("speculative-auto")
    if off is not None:
        return [("fallback to decode", "none", off)]
    if not it.args.speculative_algorithm:
        return []
    reason = auto_off(it)
    if reason is not None:
        return [("fallback to decode", "no", reason)]
    return [
        (
            "fallback to decode",
            "yes",
            "live times decide; what depends on loaded models is asked at the start",
        )
    ]


def auto_off(it: Deployment) -> str | None:
    """Why no step falls back to plain decode, None where the arguments allow it."""
    off = _off("speculative-auto")
    if off is not None:
        return off
    if not it.args.speculative_algorithm:
        return "no speculation"
    from sglang.srt.speculative.auto.admission import ServerFacts, admit_server

    args = it.args
    backend, _ = draft_backend(args, "draft_extend")
    prefill, decode = args.get_attention_backends()
    target = decode if args.speculative_attention_mode == "decode" else prefill
    facts = ServerFacts(
        wanted=str(getattr(args, "speculative_auto", "off")) == "on",
        algorithm=str(args.speculative_algorithm).upper(),
        topk=int(args.speculative_eagle_topk or 1),
        device=str(args.device),
        graphs=bool(it.batches),
        target_backend=_CLASSES.get(str(target), str(target)),
        draft_backend=_CLASSES.get(str(backend), str(backend)),
        draft_layers=it.draft.layers if it.draft else 0,
        dp_attention=bool(args.enable_dp_attention),
        pipeline=int(args.pp_size) > 1,
        two_batch=bool(args.enable_two_batch_overlap),
        pdmux=bool(args.enable_pdmux),
        adaptive=bool(args.speculative_adaptive),
        multi_layer=bool(args.enable_multi_layer_eagle),
        disaggregated=str(args.disaggregation_mode or "null") != "null",
        lora=bool(args.enable_lora),
        mrope=_stated(it, "model_is_mrope"),
        encoder=_stated(it, "is_encoder_decoder"),
        sliding_window=_stated(it, "is_hybrid_swa"),
        rejection_sampling=bool(getattr(args, "speculative_use_rejection_sampling", False)),
        streaming_session=bool(args.enable_streaming_session),
    )
    return admit_server(facts)


def cycle_graph(it: Deployment) -> list[Row]:
    """Whether a whole cycle may run as one graph."""
    off = _off("cycle-graph")
    if off is not None:
        return [("cycle as one graph", "none", off)]
    if not it.args.speculative_algorithm:
        return []
    from sglang.srt.speculative.cycle_graph.admission import ServerFacts, admit_server

    args, config = it.args, it.args.cuda_graph_config
    captured = ["draft", "verify"] if it.batches else []
    if captured and it.graph_of_draft_extend:
        captured.append("draft_extend")
    facts = ServerFacts(
        device="cuda" if it.gpu is not None else "cpu",
        algorithm=str(args.speculative_algorithm),
        topk=int(args.speculative_eagle_topk or 1),
        steps=int(args.speculative_num_steps or 0),
        overlap=not args.disable_overlap_schedule and it.gpu is not None,
        captured_passes=tuple(captured),
        graph_backend=_text(config.decode.backend),
        adaptive=bool(args.speculative_adaptive),
        rejection_sampling=bool(getattr(args, "speculative_use_rejection_sampling", False)),
        data_parallel_attention=bool(args.enable_dp_attention),
        expert_parallel=int(args.ep_size) > 1 or bool(args.enable_eplb),
        pipeline_ranks=int(args.pp_size),
        two_batch_overlap=bool(args.enable_two_batch_overlap),
        lora=bool(args.enable_lora),
        mrope=_stated(it, "model_is_mrope"),
        encoder_decoder=_stated(it, "is_encoder_decoder"),
        disaggregated=str(args.disaggregation_mode) not in ("null", "None"),
        memory_saver=bool(args.enable_memory_saver),
    )
    admitted = admit_server(facts)
    if not admitted.ok:
        return [("cycle as one graph", "no", admitted.reason)]
    return [
        (
            "cycle as one graph",
            "yes",
            "nothing in the arguments forbids it; backends and pools are asked at the start",
        )
    ]


def _stated(it: Deployment, name: str) -> bool:
    """What upstream's configuration of the target says about itself."""
    return bool(getattr(it.target.config, name, False)) if it.target else False


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def one_shot(it: Deployment) -> list[Row]:
    """Who reduces a decode's and a verify's message, alone and with add and norm, by the gate and the table of the
    one-shot all-reduce, and by the protocol that is asked for."""
    size = int(it.args.tp_size)
    off = _off("one-shot-all-reduce")
    if size <= 1 or it.gpu is None or it.target is None:
        return []
    if off is not None:
        return [("all-reduce, one-shot", "none", off)]
    from sglang.srt.distributed.one_shot import gate, policy, settings, topology
    from sglang.verify_doctor.contributed import all_reduce

    found = topology.from_facts(it.facts)
    environment = {name: str(value) for name, value in dict(it.facts.get("environment") or {}).items()}
    mode = settings.mode(environment)
    buses = found.buses or tuple(str(rank) for rank in range(size))
    ranks = [
        gate.RankFacts("one", buses[rank % len(buses)], it.gpu.name, it.gpu.capability, mode, rank)
        for rank in range(size)
    ]
    for decision in (gate.group("tp", "cuda", size), gate.members(ranks)):
        if not decision.ok:
            return [("all-reduce, one-shot", "no", f"{decision.reason}: {decision.detail}")]
    key = policy.Key(it.gpu.name, found.link(list(range(size))), size, found.driver)
    given = all_reduce.find(it.facts, key)
    table = policy.forced(key) if mode == "force" else given.table
    table = policy.with_protocol(table, settings.protocol(environment))
    rows: list[Row] = []
    if given.refused and mode != "force":
        rows.append(("all-reduce, table", "refused", given.advice))
    kinds = (policy.PLAIN, policy.FUSED) if _defers(it) else (policy.PLAIN,)
    rows += [_reduced(it, table, kind, count) for kind in kinds for count in sorted({1, it.draft_tokens})]
    return rows


def _reduced(it: Deployment, table: Any, kind: str, count: int) -> Row:
    """Who reduces ``count`` rows (``kind`` as in ``policy``), by the function that a server asks."""
    from sglang.srt.distributed.one_shot import communicator, policy

    assert it.target is not None
    hidden, dtype = int(it.target.config.hidden_size), it.target.dtype
    choice = communicator.decide(table, int(it.args.tp_size), kind, count, hidden, dtype)
    what = "as above" if choice.method == policy.STOCK else f"{choice.method}, once the preflight has passed"
    about = f"all-reduce, {count} row{'' if count == 1 else 's'}"
    message = count * hidden * dtype.itemsize
    return (
        about + (", add and norm" if kind == policy.FUSED else ""),
        f"{what} ({message:,} bytes)",
        choice.reason,
    )


def _defers(it: Deployment) -> bool:
    """Whether the target's layers leave reductions to the next norm."""
    from sglang.srt.distributed.one_shot import gate

    names = getattr(getattr(it.target and it.target.config, "hf_config", None), "architectures", None)
    return gate.defers(
        str((names or [""])[0]),
        data_parallel=bool(it.args.enable_dp_attention),
        all_to_all=str(it.args.moe_a2a_backend or "none") != "none",
        deterministic=bool(it.args.enable_deterministic_inference),
    )
