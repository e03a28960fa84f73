"""What is filled in because the target and the draft leave one value that serves both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from checkpoints import DEEPSEEK, DRAFT, KIMI, LLAMA, MLA_DRAFT
from sglang.srt.speculative.arguments import ArgumentFault
from sglang.srt.speculative.arguments.choices import draft_backend, draft_quantization, shared_dtype
from sglang.srt.speculative.arguments.configs import attention_name, context_length, loaded_dtype


@pytest.mark.parametrize(
    ("flag", "target", "draft", "expected"),
    [
        ("auto", "bfloat16", "bfloat16", None),
        ("auto", "bfloat16", "float16", "bfloat16"),
        ("auto", "float16", "bfloat16", "float16"),
        ("auto", "bfloat16", None, "bfloat16"),  # Nothing stated is loaded as float16.
        ("auto", "float32", "float16", None),
        ("bfloat16", "bfloat16", "float16", None),
        ("auto", "bfloat16", "float12", None),
    ],
)
def test_dtype(flag: str, target: str, draft: str | None, expected: str | None) -> None:
    choice = shared_dtype(
        flag, KIMI | {"torch_dtype": target, "text_config": {}}, DRAFT | {"torch_dtype": draft}
    )
    assert (choice.value if choice else None) == expected


def test_dtype_of_a_wrapper_counts_for_its_language_model() -> None:
    inner = {key: value for key, value in DEEPSEEK.items() if key != "torch_dtype"}
    assert loaded_dtype({"torch_dtype": "bfloat16", "text_config": inner}, "auto") == "bfloat16"
    assert loaded_dtype({"model_type": "gemma2"}, "auto") == "bfloat16"
    assert loaded_dtype({"model_type": "llama"}, "half") == "float16"


@pytest.mark.parametrize(
    ("target_flag", "draft_flag", "draft", "expected"),
    [
        (None, None, DRAFT, None),
        ("compressed-tensors", None, DRAFT, "unquant"),
        ("awq", None, DRAFT | {"quantization_config": {"quant_method": "awq"}}, None),
        ("fp8", None, DRAFT, None),  # Quantises while loading, so any draft will do.
        ("awq", "unquant", DRAFT, None),
    ],
)
def test_draft_quantization(
    target_flag: str | None, draft_flag: str | None, draft: dict[str, Any], expected: str | None
) -> None:
    choice = draft_quantization(target_flag, draft_flag, draft)
    assert (choice.value if choice else None) == expected


def test_draft_quantization_that_the_draft_lacks() -> None:
    with pytest.raises(ArgumentFault, match=r"--speculative-draft-model-quantization gptq .* unquant"):
        draft_quantization(None, "gptq", DRAFT)


@dataclass(frozen=True)
class Backend:
    """A draft's attention and the backend that it is given or inherits."""

    name: str
    draft: dict[str, Any]
    given: str | None
    inherited: tuple[str | None, ...]
    expected: str | None = None
    refused: bool = False
    device: str = "cuda"


BACKENDS = (
    Backend("sglang_23490 MHA draft under flashmla", DRAFT, None, ("flashmla", "flashmla"), "triton"),
    Backend("sglang_23490 MHA draft under trtllm_mla", DRAFT, None, ("trtllm_mla", "trtllm_mla"), "triton"),
    Backend("decode side only", DRAFT, None, ("fa3", "cutlass_mla"), "triton"),
    Backend("MLA draft under trtllm_mha", MLA_DRAFT, None, ("trtllm_mha", "trtllm_mha"), "triton"),
    Backend("MLA draft under flashmla", MLA_DRAFT, None, ("flashmla", "flashmla")),
    Backend("both kinds", DRAFT, None, ("triton", "triton")),
    Backend("nothing resolved", DRAFT, None, (None, None)),
    Backend("target's cannot draft", MLA_DRAFT, None, ("cutlass_mla", "cutlass_mla"), "triton"),
    Backend("target's cannot draft, on a CPU", DRAFT, None, ("torch_native", "torch_native"), device="cpu"),
    Backend("asked for and unknown", DRAFT, "tritton", ("triton", "triton"), refused=True),
    Backend("asked for and cannot draft", DRAFT, "flex_attention", ("triton", "triton"), refused=True),
    Backend("asked for on a CPU", DRAFT, "torch_native", ("torch_native", "torch_native"), device="cpu"),
    Backend("asked for and unfit", DRAFT, "flashmla", ("triton", "triton"), refused=True),
    Backend("asked for and fit", DRAFT, "fa3", ("flashmla", "flashmla")),
)


@pytest.mark.parametrize("case", BACKENDS, ids=lambda case: case.name)
def test_draft_backend(case: Backend) -> None:
    if case.refused:
        with pytest.raises(ArgumentFault, match="--speculative-draft-attention-backend") as caught:
            draft_backend(case.given, case.inherited, case.draft, device=case.device)
        assert caught.value.code == "draft-backend"
        return
    choice = draft_backend(case.given, case.inherited, case.draft, device=case.device)
    assert (choice.value if choice else None) == case.expected


def test_names_of_attention() -> None:
    assert (attention_name(KIMI), attention_name(MLA_DRAFT)) == ("MLA", "MLA")
    assert attention_name(DRAFT) == "GQA"
    assert attention_name({"num_attention_heads": 4}) == "MHA"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 1024),
        (KIMI, 1024),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4}}, 400),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default"}}, 100),
        ({"max_position_embeddings": 100, "model_max_length": 50}, 50),
        ({}, None),
    ],
)
def test_context_length(config: dict[str, Any], expected: int | None) -> None:
    assert context_length(config) == expected
