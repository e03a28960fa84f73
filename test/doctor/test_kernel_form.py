"""The doctor's sentence about the attention kernel, against what the backend's own hooks decide for the same server.

The hooks are called as a starting backend calls them; the doctor only reads arguments. Neither repeats the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.fork import fallbacks
from sglang.srt.layers.attention.verify import admission, hooks
from sglang.srt.layers.attention.verify.binding import Binding, HeadShape
from sglang.srt.layers.attention.verify.plan import planned_traits
from sglang.srt.layers.attention.verify.table import FUSED_VARIABLE
from sglang.verify_doctor.deployment import attention, child
from sglang.verify_doctor.deployment.machine import Machine
from sglang.verify_doctor.deployment.subject import Deployment
from sglang.verify_doctor.facts import document

MACHINE = Path(__file__).parent / "facts" / "h200_x2_nvlink.json"
TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SIZES = (1, 2, 16, 24, 32, 48, 64)
COMMON = (
    *("--attention-backend", "triton", "--load-format", "dummy", "--max-running-requests", "64"),
    *("--cuda-graph-config", json.dumps({"decode": {"bs": SIZES}})),
)


@dataclass(frozen=True)
class Server:
    """Flags, and the words that the doctor's reason must hold."""

    name: str
    flags: tuple[str, ...] = ()
    fused: str = "auto"
    says: str = ""


PDMUX = ("--enable-pdmux", "--chunked-prefill-size", "-1", "--disable-overlap-schedule")
TWO_BATCH = ("--enable-two-batch-overlap", "--enable-dp-attention", "--tp", "2", "--dp", "2")
SERVERS = (
    Server("alone"),
    Server("alone, always in one launch", fused="on"),
    Server("alone, never in one launch", fused="off"),
    Server("PD multiplexing", PDMUX, says="PD multiplexing"),
    Server("PD multiplexing, always in one launch", PDMUX, "on", "PD multiplexing"),
    Server("PD multiplexing, never in one launch", PDMUX, "off"),
    Server("two-batch overlap", TWO_BATCH, says="two-batch overlap"),
    Server("deterministic", ("--enable-deterministic-inference",), says="deterministic inference"),
)


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    fallbacks.reset()
    yield
    fallbacks.reset()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(TARGET), encoding="utf-8")
    return folder


def told(server: Server, model: Path) -> tuple[Deployment, str, str]:
    """The deployment as the doctor resolves it, and its sentence about decode."""
    facts = document.read(MACHINE)
    facts["environment"] = {FUSED_VARIABLE: server.fused}
    gpu = Machine.of(facts)
    assert gpu is not None
    with child._environment(), gpu.seen():
        args, fault = child._resolve(["--model-path", str(model), *COMMON, *server.flags])
        assert fault is None, fault
        it = Deployment.of(args, gpu, facts)
        rows = {about: (what, why) for about, what, why in attention.rows(it)}
    return it, *rows["attention, decode"]


def forms(text: str, sizes: list[int]) -> dict[int, str]:
    """Kernel by batch size, as the doctor's words have it."""
    _, _, text = text.partition("kernel: ")
    if not text.startswith("batch "):
        return dict.fromkeys(sizes, text)
    found = {}
    for first, last, form in re.findall(r"batch (\d+)(?: to (\d+))? (.*?)(?=, batch \d|$)", text):
        found |= {size: form for size in sizes if int(first) <= size <= int(last or first)}
    return found


def decided(server: Server, it: Deployment) -> tuple[str | None, dict[int, str]]:
    """What the hooks of a starting backend decide: the refusal of the whole backend, and the kernel by batch size."""
    assert it.gpu is not None and it.target is not None
    args: Any = it.args
    traits = planned_traits(it.gpu.capability, it.gpu.multiprocessors, server.fused)
    backend = SimpleNamespace(
        dcp_size=args.dcp_size,
        enable_deterministic=args.enable_deterministic_inference,
        use_sliding_window_kv_pool=False,
        sliding_window_size=None,
        _translate_kv_loc=None,
        is_draft_runner=False,
    )
    runner = SimpleNamespace(server_args=args)
    side = it.target
    binding = Binding(
        traits=hooks.whole_device(traits, args),
        refusal=hooks._backend_refusal(backend, runner, traits),
        topk=1,
        max_context=side.context,
        req_to_token=None,  # type: ignore[arg-type]
        scratch=None,  # type: ignore[arg-type]
        shape=HeadShape(
            "mla", side.q_heads, side.kv_heads, side.qk_dim, side.v_dim, side.dtype, side.kv_dtype
        ),
    )
    assert binding.shape is not None
    plans = {size: binding.decide(binding.request(binding.shape, size, 1))[1] for size in it.batches}
    return binding.refusal, {size: plan.form for size, plan in plans.items() if plan is not None}


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_the_sentence_is_what_the_backend_decides(server: Server, model: Path) -> None:
    it, what, why = told(server, model)
    refusal, expected = decided(server, it)
    assert it.batches == list(SIZES)
    if refusal is not None:
        assert what == attention.STOCK and why == refusal
    else:
        assert forms(what, it.batches) == expected
    assert server.says in why
    # Said where the server counts it, and nowhere else.
    counted = fallbacks.snapshot().get("verify-fused", {})
    assert [reason in why for reason in counted] == [True] * len(counted)
    assert ("not in one launch" in why) == bool(counted)


def test_control_one_launch_is_in_question_at_all(model: Path) -> None:
    """Without a refusal some size takes the one launch, so that its absence elsewhere says something."""
    it, what, _ = told(SERVERS[1], model)
    assert "one launch" in what and any("one launch" in form for form in forms(what, it.batches).values())


def test_control_a_doctor_that_does_not_ask(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices: with the doctor's question answered yes, its sentence is another."""
    monkeypatch.setattr(admission, "admit_one_launch", lambda _: admission.Admission(True, "admitted"))
    server = SERVERS[4]
    it, what, _ = told(server, model)
    assert forms(what, it.batches) != decided(server, it)[1]
