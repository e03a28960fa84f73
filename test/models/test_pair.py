"""The shipped target and draft: shapes, size, quality and the accept length that the demo relies on."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

MODELS = Path(__file__).resolve().parents[2] / "models"
sys.path.insert(0, str(MODELS))

from measure import (  # noqa: E402
    Chain,
    decode,
    load_pair,
    load_prompts,
    losses,
    prompt_ids,
    speculate,
    stop_ids,
)
from modeling import Draft, DraftKeys, Target, export_draft, export_target, rotate  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

pytestmark = pytest.mark.long

Pair = tuple[Target, Draft, Tokenizer]

# Nats a token on models/heldout.jsonl, a quarter above what the model card states; a tokenizer or a
# checkpoint that does not belong to the other lands far above every one of them.
LOSS_BOUNDS = {"chat-story": 0.3, "chat-fact": 0.1, "chat-count": 0.8, "kjv": 3.6, "speech": 3.6}


@pytest.fixture(scope="module")
def pair() -> Pair:
    torch.set_num_threads(1)
    return load_pair()


def test_shape_is_kimis_and_the_pair_is_small() -> None:
    config = json.loads((MODELS / "nano/config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["num_attention_heads"]) == (512, 64, 8)
    assert config["architectures"] == ["DeepseekV3ForCausalLM"] and config["topk_method"] == "noaux_tc"
    stored = load_file(MODELS / "nano/model.safetensors")
    assert stored["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].shape == (
        512 + 64,
        config["hidden_size"],
    )
    assert all(
        t.dtype == torch.bfloat16 for n, t in stored.items() if not n.endswith("e_score_correction_bias")
    )
    total = sum(p.stat().st_size for d in ("nano", "nano-eagle3") for p in (MODELS / d).iterdir())
    assert total < 12_000_000, f"{total} bytes"


def test_export_gives_back_the_files(pair: Pair) -> None:
    target, draft, _ = pair
    for folder, weights in (
        ("nano", export_target(target)),
        ("nano-eagle3", export_draft(draft, target.config["vocab_size"])),
    ):
        stored = load_file(MODELS / folder / "model.safetensors")
        assert stored.keys() == weights.keys()
        assert all(torch.equal(stored[name], value) for name, value in weights.items())


def test_draft_vocabulary_maps_into_the_target(pair: Pair) -> None:
    target, draft, _ = pair
    stored = load_file(MODELS / "nano-eagle3/model.safetensors")
    ids = stored["d2t"] + torch.arange(draft.config["draft_vocab_size"])
    assert ids.unique().numel() == ids.numel() and int(ids.max()) < target.config["vocab_size"]
    assert torch.equal(stored["t2d"].nonzero().flatten(), ids.sort().values)
    assert set(ids.tolist()) >= stop_ids(target), "the draft could never propose the end of a text"


def test_tokenizer_knows_every_byte_and_the_template_matches(pair: Pair) -> None:
    tokenizer = pair[2]
    text = "Zürich — 東京 \x00\t🙂 end"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 0 and tokenizer.decode(ids[1:]) == text
    row = {"messages": [{"role": "user", "content": "Name three months."}]}
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(MODELS / "nano")
    expected = loaded.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert prompt_ids(row, tokenizer) == list(expected)


def test_held_out_loss(pair: Pair) -> None:
    loss = losses(pair[0], pair[2])
    assert {kind: loss[kind] for kind in LOSS_BOUNDS if loss[kind] > LOSS_BOUNDS[kind]} == {}
    assert max(loss.values()) < math.log(2560) - 3


def test_the_draft_pays_and_changes_nothing(pair: Pair) -> None:
    target, draft, tokenizer = pair
    stop, total = stop_ids(target), Chain()
    for row in load_prompts(40):
        ids = prompt_ids(row, tokenizer)
        text, chain = speculate(target, draft, ids, 64, stop)
        total.add(chain)
        assert text == decode(target, ids, 64, stop), row["id"]
        written = 1 + sum(kept * count for kept, count in chain.lengths.items())
        assert written - len(text) <= 2, f"{row['id']}: cycles were counted after the end of the text"
    assert total.accept_length >= 2.0, total


def test_a_draft_without_training_does_not_pay(pair: Pair) -> None:
    target, draft, tokenizer = pair
    torch.manual_seed(5)
    blank = Draft(draft.config, draft.fc.in_features).eval()
    stop, total = stop_ids(target), Chain()
    for row in load_prompts(6):
        ids = prompt_ids(row, tokenizer)
        text, chain = speculate(target, blank, ids, 32, stop)
        total.add(chain)
        assert text == decode(target, ids, 32, stop), row["id"]
    assert total.accept_length < 1.2, total


def test_training_unrolls_what_serving_runs(pair: Pair) -> None:
    """Position by position, the training-time test and the chain must see the same keys and states."""
    target, draft, tokenizer = pair
    tokens = torch.tensor([prompt_ids(load_prompts(1)[0], tokenizer)])
    with torch.no_grad():
        _, features = target(tokens)
        embedding, state = target.embed_tokens(tokens[:, 1:]), draft.fc(features[:, :-1])
        past, unrolled = DraftKeys(), []
        for _ in range(3):
            logits, state = draft.unroll(embedding, state, past)
            unrolled.append(logits)
            state = torch.nn.functional.pad(state, (0, 0, 1, 0))[:, :-1]
        last = embedding.shape[1] - 1
        for start in (last - 5, last - 2):
            cache = draft.cache(1, last + 1, torch.float32)
            logits, state = draft(embedding[:, :start], draft.fc(features[:, :start]), cache, 0)
            torch.testing.assert_close(logits[:, -1], unrolled[0][:, start - 1], atol=1e-4, rtol=1e-4)
            for step in (1, 2):
                position = start - 1 + step
                logits, state = draft(embedding[:, position : position + 1], state[:, -1:], cache, position)
                torch.testing.assert_close(logits[:, -1], unrolled[step][:, position], atol=1e-4, rtol=1e-4)


def test_target_equals_transformers(pair: Pair) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV3ForCausalLM"):
        pytest.skip("this transformers has no DeepSeek-V3")
    target, _, tokenizer = pair
    other = transformers.DeepseekV3ForCausalLM.from_pretrained(MODELS / "nano", dtype=torch.float32).eval()
    for row in load_prompts(3):
        tokens = torch.tensor([prompt_ids(row, tokenizer)])
        with torch.no_grad():
            mine, features = target(tokens)
            theirs = other(tokens, output_hidden_states=True)
        torch.testing.assert_close(mine, theirs.logits, atol=1e-3, rtol=1e-4)
        heard = torch.cat([theirs.hidden_states[i] for i in target.taps], -1)
        torch.testing.assert_close(features, heard, atol=1e-3, rtol=1e-4)


def test_rope_pairing_matters(pair: Pair) -> None:
    """Negative control: with Llama's pairing instead of DeepSeek's, the trained target falls apart."""
    target, _, tokenizer = pair
    frequencies = target.layers[0].self_attn.frequencies
    x = torch.randn(1, 1, 7, 64)
    positions = torch.arange(7)[None]
    assert not torch.allclose(
        rotate(x, positions, frequencies, interleaved=True),
        rotate(x, positions, frequencies, interleaved=False),
    )
    with pytest.MonkeyPatch.context() as patch:
        import modeling

        patch.setattr(modeling, "rotate", lambda x, p, f, interleaved: rotate(x, p, f, interleaved=False))
        wrong = losses(target, tokenizer)
    assert wrong["kjv"] > LOSS_BOUNDS["kjv"]
