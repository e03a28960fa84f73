"""A draft against its target: one broken fact at a time, each refused by its own rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DEEPSEEK, DRAFT, KIMI, LLAMA, MLA_DRAFT, draft_tensors, write
from sglang.srt.speculative.arguments import ArgumentFault
from sglang.srt.speculative.arguments.checkpoint import TensorHeader, read_headers
from sglang.srt.speculative.arguments.draft import check, check_model_type, require_draft
from sglang.srt.speculative.arguments.pair import Pair

IDENTITY = [0] * 320


@dataclass(frozen=True)
class Case:
    """Changes to a pair that fits; ``code`` None means that it still fits."""

    name: str
    code: str | None
    draft: Mapping[str, Any] = field(default_factory=dict)
    target: Mapping[str, Any] = field(default_factory=dict)
    table: list[int] | None = None
    drop: tuple[str, ...] = ()
    reshape: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    ranks: int = 1
    served: int | None = None
    mla: bool = False


CASES = (
    Case("as made", None),
    Case("MLA draft as made", None, mla=True),
    # Vocabulary: vllm#43369 (target of 1000 tokens).
    Case("vllm_43369 draft of 1200", "vocabulary", {"vocab_size": 1200}, says=("1200", "1000")),
    Case("vllm_43369 draft of 320 by vocab_size", "vocabulary", {"vocab_size": 320}, says=("320", "1000")),
    Case("vllm_43369 320 with a map", None, {"draft_vocab_size": 320}, table=IDENTITY),
    Case("vllm_43369 map reaching the last id", None, {"draft_vocab_size": 320}, table=[*IDENTITY[:-1], 680]),
    Case(
        "vllm_43369 320 without a map", "map-missing", {"draft_vocab_size": 320}, says=("320", "1000", "d2t")
    ),
    Case(
        "vllm_43369 map pointing to 1000",
        "map-range",
        {"draft_vocab_size": 320},
        table=[*IDENTITY[:-1], 681],
        says=("319", "1000", "999"),
    ),
    Case(
        "map pointing below 0",
        "map-range",
        {"draft_vocab_size": 320},
        table=[-1, *IDENTITY[1:]],
        says=("-1",),
    ),
    Case(
        "map of another length", "map-length", {"draft_vocab_size": 321}, table=IDENTITY, says=("320", "321")
    ),
    Case(
        "reduced above the target",
        "draft-vocabulary-large",
        {"draft_vocab_size": 1001},
        says=("1001", "1000"),
    ),
    # Architecture.
    Case(
        "a target as draft",
        "draft-architecture",
        {"architectures": ["LlamaForCausalLM"]},
        says=("LlamaForCausalLM",),
    ),
    Case("no architecture", "draft-architecture", {"architectures": []}, says=("not stated",)),
    Case("no fc projection", "draft-fc", drop=("fc.weight",)),
    Case("MLA draft of two layers", "draft-layers", {"num_hidden_layers": 2}, mla=True, says=("2",)),
    Case("MLA draft without compressed query", "draft-layers", {"q_lora_rank": None}, mla=True),
    # Width.
    Case("width", "width", {"hidden_size": 64}, says=("64", "32", "target_hidden_size")),
    Case("own width with the target's stated", None, {"hidden_size": 64, "target_hidden_size": 32}),
    Case("target_hidden_size", "width", {"target_hidden_size": 48}, says=("48", "32")),
    Case(
        "own width without embeddings",
        "embedding-missing",
        {"hidden_size": 64, "target_hidden_size": 32},
        drop=("embed_tokens.weight",),
    ),
    # Heads.
    Case("heads not a multiple of shared heads", "heads", {"num_key_value_heads": 3}, says=("4", "3")),
    Case("heads over ranks", "heads-ranks", ranks=8, says=("4", "8")),
    Case(
        "shared heads over ranks",
        "heads-ranks",
        {"num_attention_heads": 6, "num_key_value_heads": 2},
        ranks=3,
    ),
    Case("shared heads repeated over ranks", None, ranks=4),
    Case(
        "head size",
        "shape",
        {"head_dim": 16},
        reshape={"midlayer.self_attn.q_proj.weight": (32, 64)},
        says=("[64, 64]",),
    ),
    # Shapes against the configuration.
    Case(
        "aux layers of the weights", "shape", reshape={"fc.weight": (32, 64)}, says=("[32, 64]", "[32, 96]")
    ),
    Case("head of the draft", "shape", reshape={"lm_head.weight": (999, 32)}, says=("[999, 32]",)),
    Case(
        "latent of an MLA draft",
        "shape",
        mla=True,
        reshape={"midlayer.self_attn.kv_a_proj_with_mqa.weight": (64, 64)},
    ),
    # Weights that would be left as memory happened to be.
    Case("no output head", "draft-incomplete", drop=("lm_head.weight",), says=("lm_head.weight",)),
    Case("output head of the target", None, {"draft_vocab_size": None}),
    Case("no norm", "draft-incomplete", drop=("midlayer.hidden_norm.weight",), says=("hidden_norm",)),
    Case("MLA matrix left out", "packing", mla=True, drop=("midlayer.self_attn.kv_b_proj.weight",)),
    # Context.
    Case(
        "draft shorter than the target",
        "context",
        {"max_position_embeddings": 512},
        says=("512", "1024", "--context-length 512"),
    ),
    Case("draft as long as what is served", None, {"max_position_embeddings": 512}, served=512),
    Case(
        "draft extended by rope scaling",
        None,
        {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    Case(
        "scaling already counted",
        "context",
        {
            "max_position_embeddings": 512,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    # Dtype and packing.
    Case("dtype", "dtype-name", {"torch_dtype": "float8_e4m3fn"}, says=("float8_e4m3fn", "bfloat16")),
    Case("packed without a description", "packing", reshape={"midlayer.mlp.up_proj.weight_packed": (4, 4)}),
    Case(
        "packed with a description",
        None,
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        reshape={"midlayer.mlp.up_proj.weight_packed": (4, 4)},
    ),
    # Auxiliary layers are among the rules of a pair.
    Case(
        "vllm_46788 aux layer outside",
        "aux-outside",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}},
    ),
    Case("one dtype name of two spellings", None, {"torch_dtype": "torch.bfloat16"}),
)


def make(case: Case, directory: Path) -> Pair:
    """The pair of a case, with its headers read back from a file."""
    target = (KIMI if case.mla else LLAMA) | dict(case.target)
    draft = (MLA_DRAFT if case.mla else DRAFT) | dict(case.draft)
    tensors = draft_tensors(draft, case.table)
    for name in case.drop:
        tensors.pop(name)
    for name, shape in case.reshape.items():
        tensors[name] = ("BF16", shape, None)
    write(directory, draft, tensors)
    return Pair(
        target=target,
        draft=draft,
        draft_path="d",
        tensors=read_headers("--speculative-draft-model-path", directory),
        attention_ranks=case.ranks,
        served_context=case.served,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rule(case: Case, tmp_path: Path) -> None:
    pair = make(case, tmp_path)
    if case.code is None:
        assert check(pair) == []
        return
    with pytest.raises(ArgumentFault) as caught:
        check(pair)
    fault = caught.value
    assert fault.code == case.code, str(fault)
    assert all(text in str(fault) for text in case.says), str(fault)
    assert "\n" not in str(fault) and fault.remedy


def test_llama_draft_must_state_its_vocabulary() -> None:
    """The class reads ``draft_vocab_size`` without a default: an AttributeError after the target is loaded."""
    draft = {key: value for key, value in DRAFT.items() if key != "draft_vocab_size"}
    with pytest.raises(ArgumentFault) as caught:
        check(Pair(target=LLAMA, draft=draft, draft_path="d"))
    assert caught.value.code == "draft-vocabulary-unstated"
    assert check(Pair(target=LLAMA, draft=draft | {"tie_word_embeddings": True}, draft_path="d")) == []
    assert check(Pair(target=LLAMA, draft=draft | {"draft_vocab_size": None}, draft_path="d")) == []


def test_without_headers_only_configurations_are_judged() -> None:
    assert check(Pair(target=LLAMA, draft=DRAFT | {"draft_vocab_size": 320}, draft_path="d")) == []


def test_a_longer_context_can_be_allowed() -> None:
    draft = DRAFT | {"max_position_embeddings": 512}
    assert check(Pair(target=LLAMA, draft=draft, draft_path="d", allow_longer_context=True)) == []


def test_own_architectures_are_trusted() -> None:
    draft = DRAFT | {"architectures": ["MyEagle3"]}
    assert check(Pair(target=LLAMA, draft=draft, draft_path="d", own_architectures=True)) == []


def test_map_of_another_dtype_is_left_to_the_loader() -> None:
    tensors = {name: TensorHeader(dtype, shape) for name, (dtype, shape, _) in draft_tensors(DRAFT).items()}
    tensors["d2t"] = TensorHeader("F32", (1000,))
    assert check(Pair(target=LLAMA, draft=DRAFT, draft_path="d", tensors=tensors)) == []


@dataclass(frozen=True)
class Lone:
    """A target asked to speculate without a draft; ``says`` None means accepted."""

    name: str
    target: dict[str, Any]
    algorithm: str
    says: tuple[str, ...] | None


LONE = (
    Lone("sglang_36528 Kimi", KIMI, "EAGLE3", ("KimiK25ForConditionalGeneration", "no built-in head")),
    Lone("sglang_36528 Llama", LLAMA, "EAGLE3", ("LlamaForCausalLM",)),
    Lone("sglang_36528 tiny DeepSeek", DEEPSEEK, "EAGLE3", ("DeepseekV3ForCausalLM",)),
    Lone(
        "head of another kind", DEEPSEEK | {"num_nextn_predict_layers": 1}, "EAGLE3", ("next-token", "NEXTN")
    ),
    Lone("built-in head", DEEPSEEK | {"num_nextn_predict_layers": 1}, "NEXTN", None),
    Lone("no built-in head", DEEPSEEK | {"num_nextn_predict_layers": 0}, "NEXTN", ("no built-in head",)),
    Lone(
        "a family whose heads are not counted",
        LLAMA | {"architectures": ["Qwen3NextForCausalLM"]},
        "NEXTN",
        None,
    ),
    Lone(
        "standalone", LLAMA | {"architectures": ["Qwen2ForCausalLM"]}, "STANDALONE", ("no STANDALONE draft",)
    ),
)


@pytest.mark.parametrize("case", LONE, ids=lambda case: case.name)
def test_without_a_draft(case: Lone) -> None:
    if case.says is None:
        require_draft(case.target, algorithm=case.algorithm, target_path="t")
        return
    with pytest.raises(ArgumentFault) as caught:
        require_draft(case.target, algorithm=case.algorithm, target_path="t")
    assert caught.value.code == "draft-absent"
    assert all(text in str(caught.value) for text in (*case.says, "--speculative-draft-model-path"))


KNOWN = frozenset({"llama", "kimi_k2", "deepseek_v3"})


@pytest.mark.parametrize(
    ("config", "trust", "says"),
    [
        ({"model_type": "llama"}, False, None),
        ({"model_type": "kimi_k2"}, False, None),
        ({"model_type": "kimi_k22"}, False, "nearest known name is kimi_k2"),
        ({"model_type": "nothing_like_it"}, False, "such as llama"),
        ({}, False, "model_type None"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}, False, "--trust-remote-code"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}, True, None),
    ],
)
def test_sglang_25673_model_type(config: dict[str, Any], trust: bool, says: str | None) -> None:
    if says is None:
        check_model_type(config, path="d", known=KNOWN, trust_remote_code=trust)
        return
    with pytest.raises(ArgumentFault, match=says):
        check_model_type(config, path="d", known=KNOWN, trust_remote_code=trust)
