"""Requests written by hand to break runs of several tokens: ends in awkward places, values at their limits, bad values.

``Says`` makes the model write what a case needs, so that a stop text or the end of a grammar falls where it is meant to;
the suite asks each again with dictated drafts, so that it falls on token 1, 2 and 3 of a run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from poison import EveryOther, Raises, Says

from .cases import (
    CHAT,
    COMPLETIONS,
    END,
    GENERATE,
    PROMPTS,
    QUESTIONS,
    SCHEMA,
    VOCABULARY,
    Case,
    greedy,
    processed,
)
from .servers import CONTEXT, TARGET

EOS, END_OF_TURN = END
SCRIPTS = "The fox 🦊 said 日本語 and naïve café, then THE END."
ALL_TOKENS = {str(token): -3e38 for token in range(VOCABULARY)}


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def said(
    name: str, text: str, *, behind: Sequence[int] = (EOS,) * 5, most: int = 48, **sampling: Any
) -> Case:
    """The model writes ``text`` and then the tokens ``behind``."""
    say = [*_tokenizer().encode(text, add_special_tokens=False).ids, *behind]
    return processed(name, Says, {"say": say}, max_new_tokens=most, **sampling)


def chat(name: str, *, stream: bool = False, **fields: Any) -> Case:
    """A chat request."""
    body = {
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "max_tokens": 12,
        "temperature": 0,
    } | fields
    return Case(name, CHAT, body, stream)


def completion(name: str, *, stream: bool = False, **fields: Any) -> Case:
    """A completion request."""
    return Case(
        name, COMPLETIONS, {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0} | fields, stream
    )


def streamed(case: Case) -> Case:
    """The same as a stream."""
    return Case(f"{case.name}, streamed", case.path, case.body, stream=True)


def _ends() -> list[Case]:
    """Stops within and across tokens, runs and characters, and what of them is shown."""
    cases = [
        said(f"stop {stop!r}{' kept' if kept else ''}", SCRIPTS, stop=stop, no_stop_trim=kept)
        for stop in (
            ["said", "sai"],
            ["sa", "said 日"],
            ["🦊"],
            ["本"],
            ["語 a", "語"],
            ["é,", "fé"],
            ["naïve c", "THE END"],
            ["END.", "."],
            ["The"],
            ["T"],
            "e",
        )
        for kept in (False, True)
    ]
    cases += [streamed(case) for case in cases[::3]]
    for shown in (True, False):
        cases += [
            said(
                f"end token, special tokens {'skipped' if shown else 'shown'}",
                "The end",
                skip_special_tokens=shown,
            ),
            said(
                "stop text is a special token",
                "The end",
                behind=(END_OF_TURN,) * 4,
                stop=["<|end|>"],
                ignore_eos=True,
                skip_special_tokens=shown,
            ),
            said(
                "special tokens within",
                "a",
                behind=(2, 3, 9, 2, EOS),
                skip_special_tokens=shown,
                spaces_between_special_tokens=shown,
            ),
        ]
    cases += [
        said(
            "ignore_eos with the end token as stop token",
            "The end",
            ignore_eos=True,
            stop_token_ids=[EOS],
            most=12,
        ),
        said("ignore_eos runs through", "The end", ignore_eos=True, most=12),
        said("minimum equals maximum", "a", min_new_tokens=9, most=9),
        said("minimum with a stop text before it", SCRIPTS, min_new_tokens=12, stop=["fox"]),
        said("minimum with a stop token before it", SCRIPTS, min_new_tokens=6, stop_token_ids=[265, 320]),
        said("stop text and the end token in one run", "The end", stop=["nd"]),
        said("stop regex across characters", SCRIPTS, stop_regex="[a-z]é"),
        said("unfinished character at the end", SCRIPTS, most=9),
        *(said(f"unfinished character after {n}", "🦊🦊🦊", most=n, stop=["🦊🦊"]) for n in range(1, 10)),
        greedy("no stop tokens", stop_token_ids=[], max_new_tokens=9),
        greedy("many stop tokens", stop_token_ids=list(range(7, 300)), max_new_tokens=30),
    ]
    cases += [
        greedy(
            f"{most} tokens with everything",
            max_new_tokens=most,
            extra={
                "return_logprob": True,
                "top_logprobs_num": 2,
                "logprob_start_len": 0,
                "return_hidden_states": True,
            },
        )
        for most in range(4)
    ]
    for left in range(1, 8):
        sampling = {"temperature": 0, "max_new_tokens": left, "ignore_eos": True}
        body = {"input_ids": ([265, 320, 18] * CONTEXT)[: CONTEXT - left], "sampling_params": sampling}
        cases.append(Case(f"{left} tokens to the limit", GENERATE, body, stream=left % 2 == 0))
        open_end = sampling | {"max_new_tokens": None}
        cases.append(
            Case(f"{left} tokens to the limit, no wish", GENERATE, body | {"sampling_params": open_end})
        )
    return cases


def _grammars() -> list[Case]:
    """Grammars that end beside a stop text, a length, a penalty or a ban."""
    schema = json.dumps(SCHEMA)
    cases = [
        greedy("grammar and a stop text in it", regex="a{1,4}b", stop=["aa"], max_new_tokens=16),
        greedy("grammar and a stop text at its end", regex="(a|ab|abc)", stop=["ab", "c"], max_new_tokens=16),
        greedy("schema and its last character as stop", json_schema=schema, stop=["}"], max_new_tokens=48),
        greedy("grammar and a stop token", regex="[a-z ]{3,9}", stop_token_ids=[265, 320], max_new_tokens=16),
        *(greedy(f"schema cut after {n}", json_schema=schema, max_new_tokens=n) for n in (1, 2, 3, 4, 7)),
        greedy(
            "grammar under penalties",
            regex="[ab ]{4,12}",
            frequency_penalty=1.9,
            presence_penalty=1.0,
            max_new_tokens=20,
        ),
        greedy("grammar under repetition", regex="[ab ]{4,12}", repetition_penalty=1.9, max_new_tokens=20),
        greedy("grammar with a minimum", regex="[ab ]{4,12}", min_new_tokens=3, max_new_tokens=20),
        greedy(
            "grammar drawn",
            regex="[a-f]{2,9}",
            temperature=1.4,
            sampling_seed=9,
            top_p=0.9,
            max_new_tokens=20,
        ),
        greedy(
            "grammar with logprobs",
            regex="(yes|no) (yes|no)",
            max_new_tokens=20,
            extra={"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [9, 265]},
        ),
        greedy("empty grammars are none", regex="", json_schema="", ebnf="", max_new_tokens=5),
        processed("grammar with a processor", EveryOther, {"ban": 1}, regex="[ab]{3,6}", max_new_tokens=12),
        greedy("two grammars", regex="a", ebnf='root ::= "a"', max_new_tokens=5),
        *(
            greedy(f"bad grammar {n}", max_new_tokens=5, **bad)
            for n, bad in enumerate(
                (
                    {"regex": "("},
                    {"json_schema": "{"},
                    {"ebnf": "broken"},
                    {"structural_tag": "{"},
                    {"json_schema": '{"type": 7}'},
                )
            )
        ),
    ]
    return cases + [streamed(case) for case in cases[:4]]


def _values() -> list[Case]:
    """Parameters at their limits and beyond; a refusal must be the same refusal."""
    nan, infinite = float("nan"), float("inf")
    limits: list[dict[str, Any]] = [
        {"top_k": 1, "temperature": 2.0, "sampling_seed": 1},
        {"top_k": 1},
        {"temperature": 1e-6, "sampling_seed": 1},
        {"temperature": 5e-7, "sampling_seed": 1},
        {"temperature": 1e9, "sampling_seed": 2},
        {"temperature": 1.0, "top_p": 1e-9, "sampling_seed": 2},
        {"temperature": 1.0, "min_p": 1.0, "sampling_seed": 2},
        {"temperature": 1.0, "top_k": 1 << 29, "sampling_seed": 2},
        *({"temperature": 1.0, "sampling_seed": s} for s in (0, 2**31 - 1, 2**32, 2**63 - 1, -1)),
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 1e-3},
        {"repetition_penalty": 1e-30},
        {
            "frequency_penalty": 2.0,
            "min_new_tokens": 20,
            "logit_bias": {"1": 80.0, "20": 3.0},
            "temperature": 1.0,
            "sampling_seed": 5,
        },
        {"logit_bias": {**ALL_TOKENS, "265": 0.0}},
        {"logit_bias": {}},
        {"logit_bias": ALL_TOKENS},
    ]
    bad: list[dict[str, Any]] = [
        {"temperature": -1},
        {"temperature": nan},
        {"temperature": infinite},
        {"top_p": 0},
        {"top_p": 2},
        {"top_p": nan},
        {"top_k": 0},
        {"top_k": -2},
        {"min_p": 2},
        {"min_p": -0.1},
        {"frequency_penalty": 3},
        {"presence_penalty": nan},
        {"repetition_penalty": 0},
        {"repetition_penalty": nan},
        {"min_new_tokens": 21},
        {"min_new_tokens": -1},
        {"max_new_tokens": -1},
        {"max_new_tokens": 100_000},
        {"logit_bias": {"99999": 1.0}},
        {"stop_regex": "("},
        {"logit_bias": {"5": 1e39}},
        {"max_new_tokens": 1.5},
        {"stop": [["a"]]},
        {"regex": ["a"]},
        {"temperature": "1"},
        {"sampling_seed": 1 << 63},
    ]
    cases = [greedy(f"limit {n}", **{"max_new_tokens": 20, **values}) for n, values in enumerate(limits)]
    cases += [greedy(f"refused {n}", **{"max_new_tokens": 20, **values}) for n, values in enumerate(bad)]
    for n, ids in enumerate(([], [-1], [VOCABULARY], [VOCABULARY - 1], [9] * CONTEXT, [9] * (CONTEXT + 50))):
        cases.append(
            Case(
                f"ids {n}",
                GENERATE,
                {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 5}},
            )
        )
    cases += [
        greedy("empty text", "", max_new_tokens=5),
        greedy("no ids beside a text", max_new_tokens=5, extra={"input_ids": []}),
    ]
    texts = ("x", "{}", '{"callable": "zz"}', json.dumps({"callable": b"cno_such_module\nP\n.".hex()}))
    cases += [
        greedy(f"no processor {n}", max_new_tokens=5, extra={"custom_logit_processor": text})
        for n, text in enumerate(texts)
    ]
    cases += [
        processed(f"processor raises after {n}", Raises, {"raise_at": n}, max_new_tokens=9) for n in range(5)
    ]
    return cases


def _shapes() -> list[Case]:
    """Several answers to one request, log probabilities from every start, streams with usage."""
    several = {"temperature": 1.0, "sampling_seed": 11, "max_new_tokens": 12}
    prompt = PROMPTS[1]
    cases = [
        greedy("three of one", max_new_tokens=12, n=3),
        greedy("three of one with a seed", n=3, **several),
        streamed(greedy("three of one with a seed", n=3, **several)),
        Case("equal seeds in one batch", GENERATE, {"text": [prompt] * 4, "sampling_params": several}),
        Case(
            "other seeds in one batch",
            GENERATE,
            {
                "text": [prompt] * 4,
                "sampling_params": [several | {"sampling_seed": n // 2} for n in range(4)],
            },
        ),
        Case(
            "a batch of unlike requests",
            GENERATE,
            {
                "text": [prompt, "a", PROMPTS[0]],
                "sampling_params": [
                    several,
                    {"temperature": 0, "max_new_tokens": 0},
                    {"temperature": 0, "max_new_tokens": 9, "regex": "[a-c]{2,5}"},
                ],
                "return_logprob": [True, False, True],
                "top_logprobs_num": [2, 0, 0],
                "logprob_start_len": [0, -1, -1],
            },
        ),
        Case(
            "a batch with one bad request",
            GENERATE,
            {
                "text": [prompt, "a"],
                "sampling_params": [{"max_new_tokens": 4, "temperature": 0}, {"max_new_tokens": -4}],
            },
        ),
        chat("chat of two", n=2, temperature=1.0, seed=4, logprobs=True, top_logprobs=3),
        chat("chat stream with usage", stream=True, stream_options={"include_usage": True}),
        chat(
            "chat stream with usage all along",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            logprobs=True,
            top_logprobs=1,
        ),
        chat("chat stream of two", stream=True, n=2, seed=4, temperature=1.0),
        chat("chat with a stop", stop=["the", "the "], no_stop_trim=True),
        completion("completion echoed", echo=True, logprobs=2),
        completion("completion echoed, no token", echo=True, max_tokens=0),
        completion(
            "completion stream with usage",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            logprobs=1,
        ),
        completion("completion of ids", prompt=[265, 320, 18], stop=[" a"]),
        completion("completion of a batch", prompt=[PROMPTS[0], PROMPTS[4]], n=2, temperature=1.0, seed=3),
        greedy("last hidden state", max_new_tokens=6, extra={"return_hidden_states": "last"}),
    ]
    length = len(_tokenizer().encode(prompt).ids)
    for start in (-1, 0, 1, length - 1, length, length + 1):
        extra = {
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": start,
            "return_text_in_logprobs": True,
            "token_ids_logprob": [0, 9, VOCABULARY - 1],
        }
        cases.append(
            greedy(
                f"logprobs from {start - length if start >= length - 1 else start}",
                prompt,
                max_new_tokens=5,
                extra=extra,
            )
        )
    return cases


def nasty() -> Sequence[Case]:
    """All of them, with names of their own."""
    cases = [*_ends(), *_grammars(), *_values(), *_shapes()]
    return [
        Case(f"nasty {n}: {case.name}", case.path, case.body, case.stream) for n, case in enumerate(cases)
    ]
