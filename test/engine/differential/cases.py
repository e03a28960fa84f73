"""Requests as data: fixed ones for the public bug reports, and what all requests are made of."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import servers
from .servers import CONTEXT

sys.path.insert(0, str(servers.HERE))

from poison import EveryOther, PoisonAt, Raises, Says

GENERATE, CHAT, COMPLETIONS, SCORE = "/generate", "/v1/chat/completions", "/v1/completions", "/v1/score"
VOCABULARY = 2560
END = (1, 5)
# Fields of a request that constrain its text by a grammar.
GRAMMARS = frozenset(["regex", "json_schema", "ebnf", "structural_tag"])
# Log probabilities of the most likely next tokens and of chosen ones.
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 40, "token_ids_logprob": [265, 20, 9]}

PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a hungry bear named Jack. Jack lived in",
    "The king said unto the people, ",
    "And it came to pass that",
    "one two three four five six",
    "Call me Ishmael. Some years ago",
    "Gentlemen of the Senate, the state of the Union is",
    "a",
    "Once upon a time there was a clever hedgehog named Rose. Rose lived near the sea. " * 4,
)
QUESTIONS = (
    "Tell me a story about a hedgehog and an old map.",
    "Name the capital of Nepal.",
    "Count from three to nine.",
    "Go on with this address to Congress: Each if properly managed is a source of",
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "test",
            "parameters": {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]},
        },
    }
    for name in ("left", "right")
]


@dataclass(frozen=True)
class Case:
    """One request: where it goes, its body, and whether it is asked for as a stream."""

    name: str
    path: str
    body: dict[str, Any]
    stream: bool = False

    def __str__(self) -> str:
        return f"{self.name}: POST {self.path} {json.dumps(self.body)}"


def greedy(
    name: str, text: str = PROMPTS[0], *, extra: dict[str, Any] | None = None, **parameters: Any
) -> Case:
    """A greedy request for /generate."""
    return Case(
        name, GENERATE, {"text": text, "sampling_params": {"temperature": 0, **parameters}} | (extra or {})
    )


def processor(kind: Any, **parameters: Any) -> dict[str, Any]:
    """Body fields that attach a custom logit processor with these parameters."""
    return {"custom_logit_processor": kind.to_str(), "custom_params": parameters}


def processed(name: str, kind: Any, parameters: dict[str, Any], **sampling: Any) -> Case:
    """A request with a custom logit processor."""
    fields = processor(kind, **parameters)
    custom = {"custom_params": fields.pop("custom_params")}
    return Case(
        name,
        GENERATE,
        {"text": PROMPTS[0], "sampling_params": {"temperature": 0, **sampling, **custom}} | fields,
    )


def _scored() -> list[Case]:
    """Requests whose log probabilities upstream gives in one way or another, depending on speculation and neighbours."""
    ways: dict[str, dict[str, Any]] = {
        "under a grammar": {"json_schema": json.dumps(SCHEMA)},
        "at a temperature": {"temperature": 0.7},
        "under a grammar at a temperature": {"temperature": 1.3, "regex": "[ab]{1,4}"},
        "under a bias": {"logit_bias": {"265": -100.0, "9": 5.0}, "temperature": 0.1},
    }
    cases = [
        greedy(f"no token {way}", max_new_tokens=0, extra=LOGPROBS, **fields) for way, fields in ways.items()
    ]
    for kind, parameters in ((PoisonAt, {"poison_at": 0}), (Raises, {"raise_at": 0}), (Says, {"say": [9]})):
        case = processed(f"no token from {kind.__name__}", kind, parameters, max_new_tokens=0)
        cases += [case, replace(case, name=f"{case.name} with logprobs", body=case.body | LOGPROBS)]
    query = {"query": "Once", "items": [" upon", " a time"], "label_token_ids": [265, 20, 9], "model": "nano"}
    return [
        *cases,
        Case("no token but a score", SCORE, query),
        greedy("the likeliest at a temperature", top_k=1, temperature=2.0, max_new_tokens=9, extra=LOGPROBS),
        greedy(
            "unlikely tokens at a low temperature",
            temperature=0.1,
            sampling_seed=3,
            max_new_tokens=9,
            extra=LOGPROBS,
        ),
    ]


def reports() -> Sequence[Case]:
    """Requests named after the public reports they come from."""
    story = QUESTIONS[0]
    return (
        greedy("E1 stop text before the cap", stop=["a"], max_new_tokens=5),
        greedy("E1 stop token before the cap", stop_token_ids=[265], max_new_tokens=4),
        *(
            greedy(f"E1 stop on token {n}", stop_token_ids=[token], max_new_tokens=30)
            for n, token in enumerate([367, 320, 265, 1397, 877, 564])
        ),
        *(
            greedy(f"E1 stop text {stop!r}", stop=[stop], max_new_tokens=40)
            for stop in ("bear", "ry be", "k lived in a", ". J")
        ),
        greedy("E7 frequency penalty", frequency_penalty=2.0, max_new_tokens=24),
        greedy(
            "E7 all penalties",
            frequency_penalty=0.4,
            presence_penalty=0.9,
            repetition_penalty=1.3,
            max_new_tokens=24,
        ),
        greedy("E8 minimum", min_new_tokens=6, max_new_tokens=50, logit_bias={"1": 60.0}),
        greedy(
            "E8 minimum with a stop token",
            min_new_tokens=6,
            max_new_tokens=50,
            stop_token_ids=[20],
            logit_bias={"20": 60.0},
        ),
        greedy("E6 logit bias on every row", logit_bias={"994": -100.0, "320": -100.0}, max_new_tokens=20),
        Case(
            "E6 min_p",
            GENERATE,
            {
                "text": PROMPTS[0],
                "sampling_params": {
                    "temperature": 1.0,
                    "min_p": 0.9,
                    "sampling_seed": 3,
                    "max_new_tokens": 20,
                },
            },
        ),
        processed("E6 processor on every row", EveryOther, {"ban": 2}, max_new_tokens=20),
        processed(
            "E6 processor with a seed",
            EveryOther,
            {"ban": 3},
            temperature=1.0,
            sampling_seed=5,
            max_new_tokens=20,
        ),
        *(
            processed(f"A12 NaN after {n} tokens", PoisonAt, {"poison_at": n}, max_new_tokens=12)
            for n in range(6)
        ),
        *(
            processed(
                f"A12 NaN after {n} sampled tokens",
                PoisonAt,
                {"poison_at": n},
                max_new_tokens=12,
                temperature=1.0,
                sampling_seed=4,
            )
            for n in range(4)
        ),
        greedy(
            "E12 logprobs",
            max_new_tokens=13,
            extra={"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        ),
        greedy("E15 yes or no", regex="(yes|no)", max_new_tokens=16),
        *(
            greedy(f"E15 ends after {n}", regex=text, max_new_tokens=16)
            for n, text in enumerate(["a", "an", "and", "and t", "and the"])
        ),
        greedy("E15 schema", json_schema=json.dumps(SCHEMA), max_new_tokens=48),
        Case(
            "E15 tool required",
            CHAT,
            {
                "messages": [{"role": "user", "content": story}],
                "tools": TOOLS,
                "tool_choice": "required",
                "max_tokens": 60,
                "temperature": 0,
            },
        ),
        Case(
            "limit of the context",
            GENERATE,
            {
                "input_ids": [265, 320] * 110,
                "sampling_params": {"temperature": 0, "max_new_tokens": CONTEXT - 220, "ignore_eos": True},
            },
        ),
        Case(
            "limit of the context in chat",
            CHAT,
            {"messages": [{"role": "user", "content": PROMPTS[-1]}], "ignore_eos": True, "temperature": 0},
        ),
        greedy("nothing wanted", max_new_tokens=0),
        *_scored(),
        greedy("one token", max_new_tokens=1),
        greedy("hidden states", max_new_tokens=7, extra={"return_hidden_states": True}),
        Case(
            "chat with end token",
            CHAT,
            {"messages": [{"role": "user", "content": QUESTIONS[1]}], "max_tokens": 40, "temperature": 0},
        ),
    )
