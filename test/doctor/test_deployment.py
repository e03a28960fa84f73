"""What a deployment runs on recorded machines, as the composed server's own resolution has it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import int4
from sglang.bench_verify.slice.shapes import find, rank_slice, target_config
from sglang.srt.speculative.auto.reserve import AHEAD
from sglang.srt.speculative.auto.rows import RowRing
from sglang.srt.speculative.graph_policy import room, sizes
from sglang.verify_doctor import checks, deployment
from sglang.verify_doctor.__main__ import launch_arguments, main, parser
from sglang.verify_doctor.deployment import child, weights
from sglang.verify_doctor.deployment.machine import Machine
from sglang.verify_doctor.facts import document
from sglang.verify_doctor.findings import Level, worst

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "models"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Kimi-K2's numbers; the attention and the experts decide what is asked here.
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": int4("gate", "up", "down"),
}
# What one of eight ranks holds of it, in depth a fifth.
SLICE = KIMI | {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 12}
DRAFT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 30, 58]},
}

# A draft for the slice: layers that it has.
LOW = DRAFT | {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 5, 8]}}


def facts(name: str) -> dict[str, Any]:
    """A machine."""
    return document.read(HERE / "facts" / f"{name}.json")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Descriptions without weights: a plan is wanted before a download."""
    home = tmp_path_factory.mktemp("models")
    for name, config in (("llama", LLAMA), ("kimi", KIMI), ("slice", SLICE), ("draft", DRAFT), ("low", LOW)):
        (home / name).mkdir()
        (home / name / "config.json").write_text(json.dumps(config))
    return {name: str(home / name) for name in ("llama", "kimi", "slice", "draft", "low")}


def test_weights_counted_from_a_configuration() -> None:
    """Against a one-rank slice of Kimi-K2 as one H200 loaded it, and against headers that are at hand."""
    slice_of_kimi = target_config(rank_slice(find("kimi-k2.5"), experts=64))
    counted = weights.count(slice_of_kimi, slice_of_kimi, 1)
    assert counted is not None and abs(counted / 2**30 - 8.69) < 0.02 * 8.69
    for name in ("nano", "nano-eagle3"):
        config = json.loads((SHIPPED / name / "config.json").read_text(encoding="utf-8"))
        counted = weights.count(config, config, 1)
        stored = sum(file.stat().st_size for file in (SHIPPED / name).glob("*.safetensors"))
        assert counted is not None and 0.8 < counted / stored < 1.6, (name, counted, stored)
    assert weights.count({"hidden_size": 8}, {}, 1) is None


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", 0.25),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 1),
        ("model.layers.0.input_layernorm.weight", 1),
        ("model.layers.1.mlp.gate.weight", 1),
        ("model.layers.1.mlp.gate_proj.weight", 0.25),
        ("fc.weight", 1),
    ],
)
def test_share_of_a_rank(name: str, share: float) -> None:
    assert weights._share(name, 100, 4) == 100 * share


@dataclass(frozen=True)
class Case:
    """A deployment on a machine, and what its rows have to say."""

    name: str
    machine: str
    model: str
    flags: tuple[str, ...]
    says: dict[str, str]
    draft: str = ""


CHAIN = (
    "--speculative-num-steps",
    "2",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "3",
)
DUMMY = ("--load-format", "dummy")
CASES = (
    Case(
        "Kimi on PCIe Blackwell",
        "rtxpro6000_x8_switches",
        "kimi",
        ("--tp", "8", "--mem-fraction-static", "0.9", "--max-running-requests", "8", *CHAIN, *DUMMY),
        {
            "attention, prefill": "triton",
            "attention, verify": "triton, the fork's split-KV kernel",
            "attention, draft": "triton",
            "attention, draft extend": "triton, the fork's split-KV kernel",
            "MoE": "marlin",
            "all-reduce": "NCCL",
            "graphs, verify": "24 rows",
            "graphs, draft extend": "captured",
            "KV cache": "bfloat16",
        },
        draft="draft",
    ),
    Case(
        "Kimi on two H200 with Hopper's default",
        "h200_x2_nvlink_vm",
        "kimi",
        ("--tp", "2", "--max-running-requests", "8", *CHAIN, *DUMMY),
        {
            "attention, verify": "fa3, upstream's kernel",
            "graphs, draft extend": "eager",
            "all-reduce": "upstream's custom kernel",
        },
        draft="draft",
    ),
    Case(
        "a rank of Kimi with batches on both sides of the kernels in CUDA",
        "h200_x1_vm",
        "slice",
        (
            *("--attention-backend", "triton", "--max-running-requests", "96", *CHAIN, *DUMMY),
            *("--cuda-graph-config", '{"decode": {"bs": [1, 2, 4, 8, 16, 24, 96]}}'),
        ),
        {
            "attention, verify": "batch 1 to 24 split and merge launches (CUDA C++), "
            "batch 96 split and merge launches (Triton, warp-specialised)",
            "attention, draft": "triton",
        },
        draft="low",
    ),
    Case(
        "Llama without speculation",
        "rtxpro6000_x8_two_sockets",
        "llama",
        ("--tp", "2", "--attention-backend", "triton", *DUMMY),
        {"attention, decode": "triton, stock kernel", "all-reduce": "upstream's custom kernel"},
    ),
)


def resolve(case: Case, checkpoints: dict[str, str]) -> dict[str, Any]:
    """Facts with the deployment in them. Resolved in this process: every child would import the server again."""
    argv = [*case.flags, "--model-path", checkpoints[case.model]]
    if case.draft:
        argv += [
            "--speculative-algorithm",
            "EAGLE3",
            "--speculative-draft-model-path",
            checkpoints[case.draft],
        ]
    content = facts(case.machine)
    request = json.loads(json.dumps(deployment.request(argv, content, here=False, mode="gpu")))
    content["deployment"] = {"argv": argv} | child.answer(request)
    return content


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows(case: Case, checkpoints: dict[str, str]) -> None:
    content = resolve(case, checkpoints)
    found = content["deployment"]
    assert "error" not in found and found["fault"] is None, found
    rows = {row["about"]: row for row in found["rows"]}
    for about, text in case.says.items():
        assert text in rows[about]["what"], rows[about]
    assert all(row["why"] for row in found["rows"]), found["rows"]
    assert not [row for row in found["rows"] if row["what"] == "not known"]
    memory = found["memory"]
    assert memory["parts"]["weights, target"] > 1 << 30 and memory["token_bytes"] > 0
    text = " ".join(f.found for f in checks.judge(content, "gpu") if f.group == "deployment")
    assert "GiB weights, target (counted from the configuration)" in text


def test_sglang_23490_a_backend_that_suits_the_draft(checkpoints: dict[str, str]) -> None:
    """An MLA-only backend for the target and an MHA draft: the draft gets another, and the report says which."""
    flags = ("--tp", "2", "--attention-backend", "flashmla", "--max-running-requests", "4", *CHAIN, *DUMMY)
    content = resolve(Case("mla only", "h200_x2_nvlink", "kimi", flags, {}, draft="draft"), checkpoints)
    found = content["deployment"]
    rows = {row["about"]: row["what"] for row in found["rows"]}
    assert rows["attention, verify"].startswith("flashmla")
    assert "flashmla" not in rows["attention, draft"] and rows["attention, draft"] != "refused"
    assert any("draft" in text and "flashmla" in text for text in found["notes"]), found["notes"]


def test_sglang_24224_one_refusal(checkpoints: dict[str, str]) -> None:
    """A GPU before Ampere: one fault, whatever is to be served on it."""
    content = resolve(
        Case("old", "t4_x1", "llama", (*DUMMY, "--mem-fraction-static", "0.95"), {}), checkpoints
    )
    faults = [f for f in checks.judge(content, "gpu") if f.level is Level.FAULT and f.about != "memory plan"]
    assert len(faults) == 1 and "7.5" in faults[0].found


def test_parts_that_decide_at_run_time(checkpoints: dict[str, str]) -> None:
    content = resolve(CASES[0], checkpoints)
    rows = {row["about"]: row for row in content["deployment"]["rows"]}
    assert rows["graphs of verify"]["what"].startswith("3 tokens a request")
    assert "one-shot" in rows["all-reduce, 3 rows"]["what"] and "43,008" in rows["all-reduce, 3 rows"]["what"]
    for about in ("cycle as one graph", "fallback to decode"):
        assert rows[about]["what"] in ("yes", "no", "none") and rows[about]["why"], rows[about]


SWITCH = (
    "graphs of plain decode",
    "ring of rows owed to the draft",
    "of the KV cache, slots ahead of plain steps",
)


def test_what_plain_decode_beside_verify_takes(checkpoints: dict[str, str]) -> None:
    """Kimi on eight ranks, 8 requests: the server's own functions, with what they would read from its runners."""
    content = resolve(CASES[0], checkpoints)
    memory = content["deployment"]["memory"]
    slots, width = 8 + 1, 3 * 7168
    graphs = room.estimate(
        sizes.KindPlan("decode", 1, tuple(range(1, 9))), room.ModelFacts(7168, 163840, 61, kept_hidden=3)
    )
    ring = RowRing(slots, 128, width, torch.bfloat16, "meta")
    ahead = AHEAD * 8 * memory["token_bytes"]
    assert [memory["parts"][name] for name in SWITCH] == [graphs.total, ring.bytes, ahead]
    text = [f.found for f in checks.judge(content, "gpu") if f.about == "memory plan"]
    for name, words in zip(
        SWITCH, ("only a device tells", "9 request slots, 128 rows", "32 a request"), strict=True
    ):
        (line,) = [found for found in text if name in found]
        assert words in line
    rows = {row["about"] for row in content["deployment"]["rows"]}
    assert "graphs of decode" in rows


@pytest.mark.parametrize(
    "flags", [("--speculative-auto", "off"), ("--enable-streaming-session",)], ids=lambda flags: flags[0]
)
def test_a_switch_that_stays_off_takes_nothing(flags: tuple[str, ...], checkpoints: dict[str, str]) -> None:
    found = resolve(replace(CASES[0], flags=(*CASES[0].flags, *flags)), checkpoints)["deployment"]
    assert not set(SWITCH) & set(found["memory"]["parts"])
    assert "graphs of decode" not in {row["about"] for row in found["rows"]}


def test_weights_without_room_for_a_cache(checkpoints: dict[str, str]) -> None:
    """The weights alone need more than the fraction given: the flag and a value that would do are named."""
    flags = ("--tp", "8", "--mem-fraction-static", "0.7", *CHAIN, *DUMMY)
    case = Case("too little", CASES[0].machine, "kimi", flags, {}, draft="draft")
    findings = checks.judge(resolve(case, checkpoints), "gpu")
    (found,) = [f for f in findings if f.level is Level.FAULT]
    assert found.about == "memory plan" and "--mem-fraction-static 0." in found.cure


def test_what_the_server_refuses(checkpoints: dict[str, str]) -> None:
    """The refusal of a start, before the start, and on a machine that is not here."""
    case = Case("sixteen", "h200_x2_nvlink", "llama", ("--tp", "8", *DUMMY), {})
    findings = checks.judge(resolve(case, checkpoints), "gpu")
    (found,) = [f for f in findings if f.level is Level.FAULT]
    assert found.about == "deployment" and "2" in found.found and found.cure
    case = Case("flag", "h200_x2_nvlink", "llama", ("--no-such-flag",), {})
    (found,) = [f for f in checks.judge(resolve(case, checkpoints), "gpu") if f.level is Level.FAULT]
    assert "--no-such-flag" in found.found


def test_the_shipped_pair_on_this_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command as a user gives it, with the facts of a machine without a GPU."""
    status = main(
        [
            *("--from", str(HERE / "facts" / "cpu_without_gpu.json"), "--model-path", str(SHIPPED / "nano")),
            *("--speculative-draft-model-path", str(SHIPPED / "nano-eagle3"), "--json"),
        ]
    )
    content = json.loads(capsys.readouterr().out)
    assert status == 0, [f for f in content["findings"] if f["level"] == "fault"]
    rows = {row["about"]: row["what"] for row in content["facts"]["deployment"]["rows"]}
    assert rows["attention, verify"] == "PyTorch (torch_native)" and rows["graphs"] == "none"
    assert content["document"] == "verify-doctor/2" and content["exit_status"] == 0


def test_config_file(checkpoints: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe, as the server's own --config takes it."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model-path: {checkpoints['llama']}\ntp-size: 2\nload-format: dummy\nattention-backend: triton\n"
    )
    assert main(["--from", str(HERE / "facts" / "h200_x2_nvlink.json"), "--config", str(recipe)]) == 0
    text = capsys.readouterr().out
    assert "all-reduce" in text and "2 ranks of 139.8 GiB" in text


@pytest.mark.parametrize("argv", [["--tp", "8"], ["--draft-path", "x"], ["--nonsense"]])
def test_flags_without_a_model_are_a_misuse(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2 and "--model-path" in capsys.readouterr().err


def test_command_line_of_the_server() -> None:
    options, rest = parser().parse_known_args(
        ["--model-path", "m", "--draft-path", "d", "--tp", "8", "--json"]
    )
    assert rest == ["--tp", "8"] and options.json
    assert launch_arguments(options, rest, "gpu") == [
        *("--tp", "8", "--model-path", "m", "--speculative-draft-model-path", "d"),
        *("--speculative-algorithm", "EAGLE3"),
    ]
    assert launch_arguments(options, rest, "cpu")[-2:] == ["--device", "cpu"]


@pytest.mark.parametrize(
    ("name", "capability", "gpus"),
    [("rtxpro6000_x8_switches", (12, 0), 8), ("h200_x2_nvlink", (9, 0), 2), ("t4_x1", (7, 5), 1)],
)
def test_machine_of_facts(name: str, capability: tuple[int, int], gpus: int) -> None:
    machine = Machine.of(facts(name))
    assert machine is not None and (machine.capability, machine.gpus) == (capability, gpus)
    assert Machine.from_dict(json.loads(json.dumps(machine.as_dict()))) == machine


def test_no_gpu_to_plan_for() -> None:
    assert Machine.of(facts("cpu_without_gpu")) is None
    found = deployment.gather([], facts("cpu_without_gpu"), here=False, mode="gpu")
    assert "no GPU" in found["error"]
    assert deployment.request([], facts("cpu_without_gpu"), here=False, mode="gpu") is None
    findings = checks.judge(facts("cpu_without_gpu") | {"deployment": found}, "cpu")
    assert worst(findings) is Level.FAULT
    (told,) = [finding for finding in findings if finding.level is Level.FAULT]
    assert told.about == "deployment" and "--serving cpu" in told.cure
