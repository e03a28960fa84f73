"""Which models get the CPU's attention, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.fork import fallbacks
from sglang.srt.layers.attention.cpu_eagle import hooks
from sglang.srt.layers.attention.cpu_eagle.admission import layer_refusal, refusal
from sglang.srt.layers.attention.cpu_eagle.backend import CpuEagleAttention, CpuEagleDraftSteps


class MHATokenToKVPool:
    """Upstream's pool of one row a token, as far as admission looks at it."""


class SWAKVPool:
    """Upstream's pool for sliding windows."""


@pytest.fixture(autouse=True)
def _no_counts() -> Iterator[None]:
    fallbacks.reset()
    yield
    fallbacks.reset()


def runner(**changes: Any) -> SimpleNamespace:
    given = {
        "device": "cpu",
        "model_config": SimpleNamespace(is_encoder_decoder=False, context_len=64),
        "token_to_kv_pool": MHATokenToKVPool(),
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(2, 64, dtype=torch.int32)),
        "server_args": SimpleNamespace(speculative_algorithm=None),
        "use_mla_backend": False,
        "page_size": 1,
    }
    return SimpleNamespace(**{**given, **changes})


def stock(*_: Any) -> str:
    return "stock"


SPECULATIVE = SimpleNamespace(speculative_algorithm="EAGLE3")
REFUSED = [
    ({"token_to_kv_pool": SWAKVPool()}, "SWAKVPool"),
    ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
    ({"device": "cuda"}, "not the CPU"),
]


def test_a_model_that_can_be_served_is() -> None:
    assert refusal(runner()) is None
    assert isinstance(hooks.create_attention_backend(stock, runner()), CpuEagleAttention)
    assert fallbacks.snapshot() == {}


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_a_refused_model_is_counted_or_stops_the_start(changes: dict[str, Any], reason: str) -> None:
    assert hooks.create_attention_backend(stock, runner(**changes)) == "stock"
    (counted,) = fallbacks.snapshot()["cpu-eagle.attention"]
    assert reason in counted
    with pytest.raises(NotImplementedError, match=rf"EAGLE3 with attention backend torch_native: .*{reason}"):
        hooks.create_attention_backend(stock, runner(**changes, server_args=SPECULATIVE))


def factory(draft: str | None = None, decode: str | None = None, steps: int = 3, **changes: Any) -> Any:
    return SimpleNamespace(
        draft_attn_backend=draft,
        server_args=SimpleNamespace(
            attention_backend="torch_native",
            decode_attention_backend=decode,
            prefill_attention_backend=None,
            speculative_attention_mode="prefill",
        ),
        draft_model_runner=runner(**changes),
        topk=2,
        speculative_num_steps=steps,
    )


def test_the_draft_gets_one_backend_a_step() -> None:
    steps = hooks.create_draft_decode_backend(stock, factory())
    assert isinstance(steps, CpuEagleDraftSteps)
    assert len(steps.attn_backends) == 2
    assert isinstance(hooks.create_draft_extend_backend(stock, factory()), CpuEagleAttention)


@pytest.mark.parametrize(
    "given",
    [factory(draft="triton"), factory(decode="intel_amx"), factory(steps=1), factory(device="cuda")],
    ids=["draft backend chosen", "decode backend chosen", "one step", "another device"],
)
def test_other_drafts_keep_the_stock_backend(given: Any) -> None:
    assert hooks.create_draft_decode_backend(stock, given) == "stock"


def test_a_draft_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"draft model .*SWAKVPool.*Choose another draft"):
        hooks.create_draft_extend_backend(stock, factory(token_to_kv_pool=SWAKVPool()))


def layer(**changes: Any) -> SimpleNamespace:
    given = {
        "layer_id": 7,
        "is_cross_attention": False,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "xai_temperature_len": -1,
    }
    return SimpleNamespace(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "extra", "reason"),
    [
        ({}, {}, None),
        ({}, {"sinks": None}, None),
        ({"logit_cap": 30.0}, {}, None),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({}, {"sinks": torch.zeros(1)}, "'sinks'"),
        ({"logit_cap": 30.0, "logit_capping_method": "clip"}, {}, "'clip'"),
        ({"xai_temperature_len": 1024}, {}, "1024"),
    ],
)
def test_layers(changes: dict[str, Any], extra: dict[str, Any], reason: str | None) -> None:
    found = layer_refusal(layer(**changes), extra)
    assert found is None if reason is None else reason in str(found)


def test_a_refused_layer_and_a_missing_plan_say_so() -> None:
    backend = CpuEagleAttention(runner())
    batch = SimpleNamespace(forward_mode=SimpleNamespace(name="DECODE"), batch_size=3)
    q = torch.zeros(3, 4)
    with pytest.raises(NotImplementedError, match="layer 7 asks for attention argument 'sinks'"):
        backend.forward_extend(q, None, None, layer(), batch, sinks=torch.zeros(1))
    with pytest.raises(RuntimeError, match="no plan for DECODE of 3 requests"):
        backend.forward_decode(q, None, None, layer(), batch)
