"""Requests as data: what the generator may combine, and fixed requests for the public bug reports."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from . import servers
from .servers import CONTEXT

sys.path.insert(0, str(servers.HERE))

from poison import EveryOther, PoisonAt

GENERATE, CHAT = "/generate", "/v1/chat/completions"
VOCABULARY = 2560
END = (1, 5)

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


def _maybe(strategy: st.SearchStrategy[Any], weight: int = 4) -> st.SearchStrategy[Any]:
    """The feature in one of ``weight`` requests."""
    return st.integers(0, weight - 1).flatmap(lambda n: strategy if n == 0 else st.none())


TOKENS = st.integers(7, 600)
SAMPLING = dict(
    max_new_tokens=st.sampled_from([0, 1, 2, 3, 4, 5, 7, 12, 20, 33, 48]),
    min_new_tokens=_maybe(st.integers(1, 12)),
    stop=_maybe(
        st.lists(
            st.sampled_from(["a", "e ", "the", ". ", "One day", " lived in", "s", "\n", "zq"]),
            min_size=1,
            max_size=3,
        )
    ),
    stop_token_ids=_maybe(
        st.lists(st.sampled_from([18, 20, 265, 266, 320, 367, 445, *END]), min_size=1, max_size=3)
    ),
    stop_regex=_maybe(st.sampled_from([r"[A-Z][a-z]+ l", r"\d\d", r"(day|sea)"]), 12),
    ignore_eos=_maybe(st.booleans(), 6),
    frequency_penalty=_maybe(st.sampled_from([-0.5, 0.3, 1.1, 2.0])),
    presence_penalty=_maybe(st.sampled_from([-0.4, 0.7, 2.0]), 5),
    repetition_penalty=_maybe(st.sampled_from([0.8, 1.2, 1.9]), 5),
    logit_bias=_maybe(
        st.dictionaries(
            st.sampled_from(["265", "320", "20", "1", "5", "445"]),
            st.sampled_from([-100.0, -3.0, 2.5]),
            min_size=1,
            max_size=3,
        ),
        6,
    ),
    no_stop_trim=_maybe(st.booleans(), 8),
    skip_special_tokens=_maybe(st.booleans(), 8),
)
NOISE = dict(
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    sampling_seed=st.integers(0, 2**31),
    top_p=_maybe(st.sampled_from([0.3, 0.8, 0.95]), 3),
    # Not 1: upstream scales the log probabilities of such a request by its temperature or not, as neighbours have it.
    top_k=_maybe(st.sampled_from([2, 3, 20]), 3),
    min_p=_maybe(st.sampled_from([0.02, 0.3]), 4),
)
GRAMMAR = st.sampled_from(
    [
        {"regex": "(yes|no)"},
        {"regex": "[ab]{1,5}"},
        {"regex": "(alpha|beta|gamma)( and (alpha|beta))?"},
        {"json_schema": json.dumps(SCHEMA)},
        {"ebnf": 'root ::= "x" | "xy" | "xyz " root'},
    ]
)


@st.composite
def generate_case(draw: st.DrawFn, name: str) -> Case:
    """A body for /generate from independent features."""
    parameters: dict[str, Any] = {key: draw(values) for key, values in SAMPLING.items()}
    parameters["temperature"] = 0
    # A request for no token takes another way without speculation, which leaves the temperature out of logprobs.
    if draw(st.booleans()) and parameters["max_new_tokens"]:
        parameters |= {key: draw(values) for key, values in NOISE.items()}
    if draw(st.integers(0, 5)) == 0:
        parameters |= draw(GRAMMAR)
        # A grammar that has to go on while the end is forbidden, or the reverse, has no right answer.
        parameters["min_new_tokens"] = parameters["ignore_eos"] = parameters["logit_bias"] = None
    if parameters["min_new_tokens"] is not None:
        parameters["min_new_tokens"] = min(parameters["min_new_tokens"], parameters["max_new_tokens"])
    body: dict[str, Any] = {"sampling_params": {k: v for k, v in parameters.items() if v is not None}}
    if draw(st.integers(0, 3)) == 0:
        length = draw(st.sampled_from([1, 2, 17, 64, CONTEXT - 20, CONTEXT - 8]))
        body["input_ids"] = [draw(TOKENS) for _ in range(3)] * (length // 3) + [9] * (length % 3)
        if length > CONTEXT // 2:
            # Up to the limit: a longer wish is refused with 400 by both.
            body["sampling_params"]["max_new_tokens"] = CONTEXT - length
            body["sampling_params"].pop("min_new_tokens", None)
    else:
        body["text"] = draw(st.sampled_from(PROMPTS))
    short = len(body.get("input_ids", [])) in (1, 2) or body.get("text") == "a"
    if draw(st.integers(0, 2)) == 0:
        body["return_logprob"] = True
        body["top_logprobs_num"] = draw(st.sampled_from([0, 1, 3]))
        # Beyond the prompt the request is refused, and how the refusal looks depends on its neighbours.
        body["logprob_start_len"] = draw(st.sampled_from([0] if short else [-1, 0, 2]))
        if draw(st.booleans()):
            body["token_ids_logprob"] = [265, 20, 9]
    if draw(st.integers(0, 7)) == 0:
        body["return_hidden_states"] = True
    if "regex" not in parameters and "json_schema" not in parameters and draw(st.integers(0, 7)) == 0:
        body |= processor(EveryOther, ban=draw(st.sampled_from([1, 3])))
        body["sampling_params"] = body["sampling_params"] | {"custom_params": body.pop("custom_params")}
    return Case(name, GENERATE, body, stream=draw(st.integers(0, 3)) == 0)


@st.composite
def chat_case(draw: st.DrawFn, name: str) -> Case:
    """A body for chat completions."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": draw(st.sampled_from(QUESTIONS))}],
        "max_tokens": draw(st.sampled_from([1, 5, 16, 40])),
        "temperature": 0,
    }
    if draw(st.booleans()):
        body |= {"temperature": 1.0, "seed": draw(st.integers(0, 2**31))}
    for key, values in dict(
        stop=_maybe(st.sampled_from([["."], [" is"], ["the", "The c"]]), 3),
        frequency_penalty=_maybe(st.sampled_from([0.5, 1.5]), 4),
        presence_penalty=_maybe(st.sampled_from([0.5]), 4),
        min_tokens=_maybe(st.integers(1, 5), 4),
        logit_bias=_maybe(st.just({"5": -100.0}), 6),
        response_format=_maybe(
            st.just({"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}), 5
        ),
    ).items():
        value = draw(values)
        if value is not None:
            body[key] = value
    if "response_format" in body:
        body.pop("min_tokens", None)
        body.pop("logit_bias", None)
    elif draw(st.integers(0, 3)) == 0:
        body["tools"] = TOOLS
        body["tool_choice"] = draw(
            st.sampled_from(["auto", "required", {"type": "function", "function": {"name": "right"}}])
        )
        body.pop("min_tokens", None)
        body.pop("logit_bias", None)
    if draw(st.integers(0, 2)) == 0:
        body |= {"logprobs": True, "top_logprobs": draw(st.sampled_from([0, 2]))}
    return Case(name, CHAT, body, stream=draw(st.integers(0, 3)) == 0)


def drawn(count: int, *, chat_share: int = 5, start: int = 20_26) -> list[Case]:
    """``count`` cases, one in ``chat_share`` of them chat; the same ones at every call with the same seed."""
    cases: list[Case] = []

    def collect(strategy: Any, wanted: int, label: str) -> None:
        kept: list[Case] = []

        @seed(start)
        @settings(
            max_examples=wanted * 2 + 20,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy("drawn"))
        def gather(case: Case) -> None:
            kept.append(case)

        gather()
        # The first examples are the simplest ones; take an even sample of all.
        step = max(1, len(kept) // wanted)
        for number, case in enumerate(kept[::-1][::step][:wanted]):
            cases.append(Case(f"{label} {number}", case.path, case.body, case.stream))

    chats = count // chat_share
    collect(generate_case, count - chats, "generate")
    if chats:
        collect(chat_case, chats, "chat")
    random.Random(start).shuffle(cases)
    return cases


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
        greedy("one token", max_new_tokens=1),
        greedy("hidden states", max_new_tokens=7, extra={"return_hidden_states": True}),
        Case(
            "chat with end token",
            CHAT,
            {"messages": [{"role": "user", "content": QUESTIONS[1]}], "max_tokens": 40, "temperature": 0},
        ),
    )
