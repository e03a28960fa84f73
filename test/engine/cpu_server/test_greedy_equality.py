"""E11 (mlx-lm#1423): greedy text with EAGLE-3 equals greedy text without, token by token, on real servers in float32.

The plain text itself is checked against the transformers library, which shares nothing with the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import forced_acceptance
import pytest
import torch
from cpu_servers import Running, Setup
from greedy import continuation
from served import Generation
from tiny_models import ModelPair
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.server

TOKENS = 40
PREAMBLE = "A preamble that several prompts share, so that the prefix cache has something to give. " * 2
PROMPTS = [
    "Hello",
    PREAMBLE + "First.",
    "One, two, three, four, five, six, seven",
    PREAMBLE + "Second, which goes on for a while after the part that is shared: 0123456789.",
    "x",
    PREAMBLE,
    "The quick brown fox jumps over the lazy dog. " * 6,
]

KIMI_PLAIN = Setup("kimi-plain", "kimi")
SPECULATIVE = [
    Setup("kimi-chain", "kimi", steps=2, tokens=3, flags=("--chunked-prefill-size=64",)),
    Setup("kimi-tree", "kimi", steps=3, topk=2, tokens=9, flags=("--page-size=16",)),
    Setup(
        "llama-chain",
        "llama",
        steps=3,
        tokens=4,
        flags=("--page-size=16", "--disable-radix-cache"),
        draft_vocab=300,
    ),
]


def teacher_forced(models: ModelPair, prompt: list[int], answer: tuple[int, ...]) -> list[int]:
    """The greedy choice after every token of prompt + answer, from transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits.argmax(-1)[len(prompt) - 1 : -1].tolist()


def prompt_ids(models: ModelPair) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models.target / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


_reference: dict[str, list[tuple[int, ...]]] = {}


def reference(pair: str, running: Running) -> list[tuple[int, ...]]:
    """Greedy answers of a plain model, made by transformers one token at a time."""
    if pair not in _reference:
        model = AutoModelForCausalLM.from_pretrained(running.models.target, dtype=torch.float32)
        _reference[pair] = [
            tuple(continuation(model, prompt, TOKENS)) for prompt in prompt_ids(running.models)
        ]
    return _reference[pair]


def in_fours(running: Running) -> list[Generation]:
    ids = prompt_ids(running.models)
    return [
        answer
        for first in range(0, len(ids), 4)
        for answer in running.server.generate(ids[first : first + 4], TOKENS)
    ]


def runs(answers: list[Generation]) -> Counter[int]:
    """How many verify steps accepted 0, 1, 2 ... drafts."""
    total: Counter[int] = Counter()
    for answer in answers:
        total.update(dict(enumerate(answer.meta["spec_correct_drafts_histogram"])))
    return total


def test_the_plain_server_agrees_with_transformers(serve: Callable[[Setup], Running]) -> None:
    running = serve(KIMI_PLAIN)
    ids = prompt_ids(running.models)
    answers = [running.server.generate([prompt], TOKENS)[0].ids for prompt in ids]
    assert answers == reference("kimi", running)
    assert [answer.ids for answer in in_fours(running)] == answers
    # Repetition would make equality easy; most answers must vary.
    assert sorted(len(set(answer)) for answer in answers)[2] >= 5


def test_a_wrong_expectation_is_noticed(serve: Callable[[Setup], Running]) -> None:
    """Negative control: drafts forced towards a text that the target would not write are not accepted."""
    running = serve(SPECULATIVE[0])
    ids = prompt_ids(running.models)
    expected = reference("kimi", running)
    wrong = {tuple(p): [(t + 1) % 256 for t in answer] for p, answer in zip(ids, expected, strict=True)}
    forced_acceptance.write_known(running.known, wrong)
    answers = [running.server.generate([prompt], TOKENS)[0] for prompt in ids[:2]]
    assert [answer.ids for answer in answers] == expected[:2]
    assert runs(answers)[2] == 0


def test_streaming_gives_the_same_text(serve: Callable[[Setup], Running]) -> None:
    running = serve(SPECULATIVE[0])
    ids = prompt_ids(running.models)
    expected = reference("kimi", running)
    texts = {tuple(prompt): answer for prompt, answer in zip(ids, expected, strict=True)}
    forced_acceptance.write_known(running.known, texts)
    for prompt in PROMPTS[:3]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        whole = running.server.post("/v1/completions", body)["choices"][0]["text"]
        parts = [
            event["choices"][0]["text"]
            for event in running.server.events("/v1/completions", {**body, "stream": True})
            if event["choices"]
        ]
        assert "".join(parts) == whole
        assert len([part for part in parts if part]) > 3


@pytest.mark.parametrize("setup", SPECULATIVE, ids=lambda setup: setup.name)
def test_speculation_changes_no_token(serve: Callable[[Setup], Running], setup: Setup) -> None:
    running = serve(setup)
    expected = reference(setup.pair, running)
    ids = prompt_ids(running.models)
    by_chance = [running.server.generate([prompt], TOKENS)[0] for prompt in ids]
    assert [answer.ids for answer in by_chance] == expected

    texts = {tuple(prompt): answer for prompt, answer in zip(ids, expected, strict=True)}
    forced_acceptance.write_known(running.known, texts)
    alone = [running.server.generate([prompt], TOKENS)[0] for prompt in ids]
    assert [answer.ids for answer in alone] == expected
    together = in_fours(running)
    assert [answer.ids for answer in together] == expected
    for answers in (alone, together):
        accepted = runs(answers)
        # Every length of run has to have been taken, else part of the accept path was not tested.
        assert all(accepted[drafts] >= 3 for drafts in range(setup.steps + 1)), accepted

    cached = sum(answer.meta["cached_tokens"] for answer in together)
    if "--disable-radix-cache" in setup.flags:
        assert cached == 0
    else:
        assert cached > 200
    if "--chunked-prefill-size=64" in setup.flags:
        assert "#new-token: 64," in running.server.log.read_text()
