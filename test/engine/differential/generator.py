"""What the generator may combine: requests drawn by hypothesis from independent features, the same at every call."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from .cases import (
    CHAT,
    COMPLETIONS,
    END,
    GENERATE,
    GRAMMARS,
    PROMPTS,
    QUESTIONS,
    SCHEMA,
    TOOLS,
    Case,
    EveryOther,
    processor,
)
from .servers import CONTEXT


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
    top_k=_maybe(st.sampled_from([1, 2, 3, 20]), 3),
    min_p=_maybe(st.sampled_from([0.02, 0.3]), 4),
)
# Free text until a trigger, then JSON until the end of the tag.
STRUCTURE = {
    "type": "structural_tag",
    "structures": [
        {
            "begin": "a",
            "schema": {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]},
            "end": "z",
        }
    ],
    "triggers": ["a"],
}
GRAMMAR = st.sampled_from(
    [
        {"regex": "(yes|no)"},
        {"regex": "[ab]{1,5}"},
        {"regex": "(alpha|beta|gamma)( and (alpha|beta))?"},
        {"json_schema": json.dumps(SCHEMA)},
        {"ebnf": 'root ::= "x" | "xy" | "xyz " root'},
        {"structural_tag": json.dumps(STRUCTURE)},
    ]
)


@st.composite
def generate_case(draw: st.DrawFn, name: str) -> Case:
    """A body for /generate from independent features."""
    parameters: dict[str, Any] = {key: draw(values) for key, values in SAMPLING.items()}
    parameters["temperature"] = 0
    if draw(st.booleans()):
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
        if draw(st.integers(0, 2)) == 0:
            body["return_text_in_logprobs"] = True
    if draw(st.integers(0, 7)) == 0:
        body["return_hidden_states"] = True
    if not GRAMMARS & parameters.keys() and draw(st.integers(0, 7)) == 0:
        body |= processor(EveryOther, ban=draw(st.sampled_from([1, 3])))
        body["sampling_params"] = body["sampling_params"] | {"custom_params": body.pop("custom_params")}
    return Case(name, GENERATE, body, stream=draw(st.integers(0, 3)) == 0)


@st.composite
def limit_case(draw: st.DrawFn, name: str) -> Case:
    """A prompt that leaves few tokens to the context limit, and a wish for all of them: runs go beyond."""
    length = CONTEXT - draw(st.integers(1, 12))
    ids = draw(st.lists(TOKENS, min_size=2, max_size=3))
    parameters = {"temperature": 0, "max_new_tokens": CONTEXT - length, "ignore_eos": draw(st.booleans())}
    if draw(st.booleans()):
        parameters |= {"temperature": 1.0, "sampling_seed": draw(st.integers(0, 2**31))}
    body = {"input_ids": (ids * CONTEXT)[:length], "sampling_params": parameters}
    if draw(st.booleans()):
        body |= {
            "return_logprob": True,
            "top_logprobs_num": 1,
            "logprob_start_len": draw(st.sampled_from([-1, 200])),
        }
    return Case(name, GENERATE, body, stream=draw(st.integers(0, 3)) == 0)


@st.composite
def scored_case(draw: st.DrawFn, name: str) -> Case:
    """A body for /generate that wants no token, but log probabilities of the next: masked, biased, at a temperature."""
    first = draw(generate_case(name))
    parameters = first.body["sampling_params"] | {"max_new_tokens": 0}
    parameters.pop("min_new_tokens", None)
    if draw(st.booleans()):
        for field in ("logit_bias", "ignore_eos"):
            parameters.pop(field, None)
        if not GRAMMARS & parameters.keys() and "custom_logit_processor" not in first.body:
            parameters |= draw(GRAMMAR)
    body = first.body | {"sampling_params": parameters, "return_logprob": True}
    body["top_logprobs_num"] = draw(st.sampled_from([0, 3, 40]))
    body["logprob_start_len"] = draw(st.sampled_from([-1, 0]))
    if draw(st.booleans()):
        body["token_ids_logprob"] = [265, 20, 9, *END]
    return Case(name, GENERATE, body, first.stream)


@st.composite
def many_case(draw: st.DrawFn, name: str) -> Case:
    """A body for /generate that asks for several answers: a batch of prompts, or n of one."""
    first = draw(generate_case(name))
    body = dict(first.body)
    parameters = body["sampling_params"]
    # A custom processor cannot be given to n of one, and a hidden state a token is a long answer.
    for field in ("custom_logit_processor", "return_hidden_states"):
        body.pop(field, None)
    parameters = {key: value for key, value in parameters.items() if key != "custom_params"}
    field = "text" if "text" in body else "input_ids"
    if draw(st.booleans()):
        body["sampling_params"] = parameters | {"n": draw(st.integers(2, 3))}
        return Case(name, GENERATE, body, first.stream)
    size = draw(st.integers(2, 4))
    body[field] = [body[field]] * size
    # Some share one set of parameters; in others each prompt has its own, also the same seed twice.
    body["sampling_params"] = parameters
    if draw(st.booleans()):
        longest = parameters["max_new_tokens"]
        lengths = [draw(st.integers(min(1, longest), longest)) for _ in range(size)]
        body["sampling_params"] = [
            parameters
            | {"max_new_tokens": length}
            | (
                {"min_new_tokens": min(parameters["min_new_tokens"], length)}
                if "min_new_tokens" in parameters
                else {}
            )
            for length in lengths
        ]
    return Case(name, GENERATE, body, first.stream)


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
    if draw(st.integers(0, 5)) == 0:
        body["n"] = draw(st.integers(2, 3))
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
    return _streamed(draw, Case(name, CHAT, body))


@st.composite
def completion_case(draw: st.DrawFn, name: str) -> Case:
    """A body for completions: text or ids, one prompt or several, echoed or not."""
    prompts: Any = draw(
        st.sampled_from(
            [PROMPTS[0], PROMPTS[3], [PROMPTS[1], PROMPTS[4]], [265, 320, 18], [[265, 320], [18, 9, 445]]]
        )
    )
    body: dict[str, Any] = {
        "prompt": prompts,
        "max_tokens": draw(st.sampled_from([1, 2, 5, 16, 33])),
        "temperature": 0,
    }
    if draw(st.booleans()):
        body |= {"temperature": draw(st.sampled_from([0.7, 1.5])), "seed": draw(st.integers(0, 2**31))}
        for key, values in dict(top_p=st.just(0.8), top_k=st.just(5), min_p=st.just(0.1)).items():
            if draw(st.integers(0, 2)) == 0:
                body[key] = draw(values)
    for key, values in dict(
        stop=_maybe(st.sampled_from([["."], [" is", "the"], "a"]), 3),
        stop_token_ids=_maybe(st.just([265, 20]), 5),
        frequency_penalty=_maybe(st.sampled_from([-1.0, 1.5]), 4),
        presence_penalty=_maybe(st.just(0.5), 4),
        repetition_penalty=_maybe(st.just(1.3), 5),
        min_tokens=_maybe(st.integers(1, 5), 5),
        logit_bias=_maybe(st.just({"265": -100.0, "20": 3.0}), 5),
        regex=_maybe(st.just("[a-z ]{1,12}"), 6),
        echo=_maybe(st.just(True), 5),
        n=_maybe(st.integers(2, 3), 5),
        logprobs=_maybe(st.sampled_from([1, 3]), 3),
        ignore_eos=_maybe(st.just(True), 6),
        no_stop_trim=_maybe(st.just(True), 8),
        skip_special_tokens=_maybe(st.just(False), 8),
    ).items():
        value = draw(values)
        if value is not None:
            body[key] = value
    if "min_tokens" in body:
        body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
    if "regex" in body:
        for field in ("min_tokens", "logit_bias", "ignore_eos"):
            body.pop(field, None)
    return _streamed(draw, Case(name, COMPLETIONS, body))


def _streamed(draw: st.DrawFn, case: Case) -> Case:
    """The case, one in four as a stream, with the counts of tokens at its end or in every piece."""
    if draw(st.integers(0, 3)):
        return case
    options = draw(
        st.sampled_from(
            [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
        )
    )
    body = case.body | ({"stream_options": options} if options else {})
    return Case(case.name, case.path, body, stream=True)


SEED = 2027
# One request in so many is for several answers, for chat, or for completions; the rest are single ones for /generate.
SHARES = (
    (limit_case, 26, "limit"),
    (scored_case, 20, "scored"),
    (many_case, 10, "several"),
    (chat_case, 6, "chat"),
    (completion_case, 8, "completion"),
)


@contextmanager
def _only_the_seed_counts() -> Iterator[None]:
    """Hypothesis mixes the constants of all loaded modules into what it draws, so any edit would draw other requests.

    It has no setting for that; the version is pinned, and ``test_other_modules_change_no_request`` watches.
    """
    with (
        mock.patch.object(providers, "_get_local_constants", Constants),
        mock.patch.object(providers, "CONSTANTS_CACHE", LRUCache(1024)),
    ):
        yield


def drawn(count: int, *, start: int = SEED) -> list[Case]:
    """``count`` cases of all kinds; the same ones at every call with the same seed."""
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

        with _only_the_seed_counts():
            gather()
        # The first examples are the simplest ones; take an even sample of all.
        step = max(1, len(kept) // wanted)
        for number, case in enumerate(kept[::-1][::step][:wanted]):
            cases.append(Case(f"{label} {number}", case.path, case.body, case.stream))

    for strategy, share, label in SHARES:
        if count >= share:
            collect(strategy, count // share, label)
    collect(generate_case, count - len(cases), "generate")
    random.Random(start).shuffle(cases)
    return cases
