"""Reasoning and tool calls through Kimi's parsers: what a client gets with EAGLE-3 is what it gets without (E4, E15, E16).

The text is dictated, so that the markers come in every order; the drafts are dictated too, so that a run of three
holds two or three markers, ends in the middle of a call, or goes on behind the end of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from poison import Says

from .cases import CHAT, Case
from .forced_drafts import scripted
from .marked_model import (
    ARGUMENTS,
    CALL,
    CALL_END,
    MARKERS,
    SECTION,
    SECTION_END,
    THINK,
    THINK_END,
    encoded,
    with_markers,
)
from .pair import ask, findings
from .servers import TARGET, eagle_server, plain_server

pytestmark = [pytest.mark.server, pytest.mark.slow]
FLAGS = ("--tool-call-parser=kimi_k2", "--reasoning-parser=kimi_k2")
END = 5
SEEDS = range(4)
NESTED = {"n": {"deep": [1, {"quote": 'a "b" }{ c'}], "empty": {}}, "text": "one, two"}


def call(name: str, index: int, arguments: Any) -> str:
    """One call as Kimi-K2 writes it."""
    return f"{CALL}functions.{name}:{index}{ARGUMENTS}{json.dumps(arguments)}{CALL_END}"


@dataclass(frozen=True)
class Said:
    """What the model writes, and what a client must get."""

    name: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    content: str = ""
    reasoning: str = ""
    most: int = 200
    thinking: bool = True


TWO = call("left", 0, {"n": 1}) + call("right", 1, {"n": 22})
SAID = (
    Said("two calls", SECTION + TWO + SECTION_END, (("left", {"n": 1}), ("right", {"n": 22}))),
    Said(
        "text, then a call",
        f"I will look.{SECTION}{call('left', 0, {'n': 22})}{SECTION_END}",
        (("left", {"n": 22}),),
        content="I will look.",
        thinking=False,
    ),
    Said("nested arguments", SECTION + call("right", 0, NESTED) + SECTION_END, (("right", NESTED),)),
    Said(
        "thought, then text",
        f"{THINK}the bear sleeps{THINK_END}In winter.",
        content="In winter.",
        reasoning="the bear sleeps",
    ),
    Said(
        "thought, then calls",
        f"{THINK}look left{THINK_END}{SECTION}{TWO}{SECTION_END}",
        (("left", {"n": 1}), ("right", {"n": 22})),
        reasoning="look left",
    ),
    Said(
        "thought without an end, then a call",
        f"{THINK}look left{SECTION}{call('left', 0, {'n': 1})}{SECTION_END}",
        (("left", {"n": 1}),),
        reasoning="look left",
    ),
    Said(
        "thought cut short", f"{THINK}the bear sleeps in winter and wakes", reasoning="the bear sle", most=4
    ),
    Said("plain text", "Nothing to call.", content="Nothing to call.", thinking=False),
    Said("a thought that never ends", "Nothing to call.", reasoning="Nothing to call."),
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"n": {}}}},
    }
    for name in ("left", "right")
]


def body(said: Said, folder: Path) -> dict[str, Any]:
    """The request whose answer is ``said``; behind the end come more ends, which no answer may count."""
    say = [*encoded(folder, said.text), *[END] * 5]
    return {
        "messages": [{"role": "user", "content": "Where is the bear?"}],
        "tools": TOOLS,
        "temperature": 0,
        "max_tokens": said.most,
        "chat_template_kwargs": {"thinking": said.thinking},
        "custom_logit_processor": Says.to_str(),
        "custom_params": {"say": say},
    }


def cases(folder: Path) -> list[Case]:
    """Each text as one answer and as a stream."""
    return [
        Case(f"{said.name}{' streamed' if stream else ''}", CHAT, body(said, folder), stream)
        for said in SAID
        for stream in (False, True)
    ]


def with_drafts(case: Case, seed: int) -> Case:
    """The case with dictated drafts."""
    custom = case.body["custom_params"]
    drafts = custom | {"script": custom["say"], "script_seed": seed}
    return replace(case, name=f"{case.name}, drafts {seed}", body=case.body | {"custom_params": drafts})


def runs(say: Sequence[int], seed: int, vocabulary: int = 2560) -> list[list[int]]:
    """The tokens of each verify under the dictated drafts; the prefill gives the first token."""
    out, made = [], 1
    while made < len(say) and say[made - 1] != END:
        chain = scripted(list(say), seed, made, 2, vocabulary)
        right = next(
            (n for n, token in enumerate(chain) if made + n >= len(say) or token != say[made + n]), 2
        )
        out.append(list(say[made : made + right + 1]))
        made += right + 1
    return out


@dataclass(frozen=True)
class Answers:
    """Plain decoding's answers, EAGLE-3's with its own draft, and with each of the dictated ones."""

    cases: list[Case]
    folder: Path
    plain: list[Any]
    eagle: list[Any]
    forced: dict[int, list[Any]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Both servers, one after the other."""
    scratch = tmp_path_factory.mktemp("parsers")
    folder = with_markers(TARGET, scratch / "model")
    asked = cases(folder)
    tokens = f"--tokenizer-path={folder}"
    with plain_server(scratch, *FLAGS, tokens) as server:
        plain = ask(server, asked)
    with eagle_server(scratch, *FLAGS, tokens) as server:
        eagle = ask(server, asked)
        forced = {seed: ask(server, [with_drafts(case, seed) for case in asked]) for seed in SEEDS}
    return Answers(asked, folder, plain, eagle, forced)


def got(case: Case, answer: Any) -> tuple[list[tuple[str, Any]], str, str]:
    """Calls, content and reasoning of an answer, streamed or not."""
    assert answer["status"] == 200, answer
    if case.stream:
        whole = answer["body"]["choices"][0]
        calls = [(each["name"], json.loads(each["arguments"])) for _, each in sorted(whole["calls"].items())]
        return calls, whole["content"], whole["reasoning"]
    message = answer["body"]["choices"][0]["message"]
    calls = [
        (each["function"]["name"], json.loads(each["function"]["arguments"]))
        for each in message.get("tool_calls") or []
    ]
    return calls, message.get("content") or "", message.get("reasoning_content") or ""


def test_parsed_as_in_plain_decoding(answers: Answers) -> None:
    found = findings(answers.cases, answers.plain, answers.eagle)
    for seed in SEEDS:
        found += findings(answers.cases, answers.plain, answers.forced[seed])
    assert not found, "\n".join(map(str, found[:5]))


@pytest.mark.parametrize("said", SAID, ids=lambda said: said.name)
def test_client_gets_what_was_said(answers: Answers, said: Said) -> None:
    for case, *each in zip(answers.cases, answers.plain, *answers.forced.values(), strict=True):
        if case.name.removesuffix(" streamed") == said.name:
            for answer in each:
                calls, content, reasoning = got(case, answer)
                assert calls == list(said.calls), case.name
                assert content.strip() == said.content and reasoning.strip() == said.reasoning, case.name


def test_reasoning_tokens_stay_within_the_answer(answers: Answers) -> None:
    """E4: tokens of a run behind the end are no reasoning tokens."""
    seen = 0
    for seed in SEEDS:
        for case, answer in zip(answers.cases, answers.forced[seed], strict=True):
            if not case.stream:
                usage = answer["body"]["usage"]
                reasoning = usage.get("reasoning_tokens") or 0
                assert 0 <= reasoning <= usage["completion_tokens"], case.name
                seen += reasoning > 0
    assert seen


def test_runs_held_several_markers_and_went_behind_the_end(answers: Answers) -> None:
    """What the comparison rests on: runs with two and three markers, and an end on each place of a run."""
    markers = {encoded(answers.folder, marker)[0] for marker in MARKERS}
    held: set[int] = set()
    ends: set[int] = set()
    for said in SAID:
        say = [*encoded(answers.folder, said.text), *[END] * 5]
        for seed in SEEDS:
            for run in runs(say, seed):
                held.add(sum(token in markers for token in run))
                if END in run and len(run) == 3:
                    ends.add(run.index(END))
    assert {2, 3} <= held and ends == {0, 1, 2}, (held, ends)
