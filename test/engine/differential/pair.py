"""Ask two servers the same requests and compare the answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .cases import CHAT, Case
from .compare import differences, identities
from .servers import Asked

CLIENTS = 8


@dataclass(frozen=True)
class Finding:
    """One request whose answers differ, with everything needed to ask it again."""

    case: Case
    places: list[str]
    expected: Any
    found: Any

    def __str__(self) -> str:
        return "\n  ".join([str(self.case)[:1500], *(place[:300] for place in self.places[:6])])


def ask(server: Asked, cases: Sequence[Case]) -> list[Any]:
    """Answers in the order of the cases; several are under way at once, so that batches form."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda case: _one(server, case), cases))


def _one(server: Asked, case: Case) -> Any:
    if not case.stream:
        answer = server.ask(case.path, case.body)
        return {"status": answer.status, "body": answer.body}
    pieces = list(server.events(case.path, case.body | {"stream": True}))
    return {"status": 200, "body": _joined_chat(pieces) if case.path == CHAT else pieces[-1]}


def _joined_chat(pieces: list[Any]) -> dict[str, Any]:
    """A streamed chat answer in one: text, arguments per tool call, finish reason."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for piece in pieces:
        for choice in piece.get("choices", []):
            delta = choice.get("delta", {})
            out["content"] += delta.get("content") or ""
            out["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                joined = out["calls"].setdefault(call.get("index"), {"name": "", "arguments": ""})
                joined["name"] += call["function"].get("name") or ""
                joined["arguments"] += call["function"].get("arguments") or ""
            out["finish"] = choice.get("finish_reason") or out["finish"]
    return out


def scripted(cases: Sequence[Case], answers: Sequence[Any]) -> list[Case]:
    """The /generate cases again, with plain decoding's output as script for the drafts.

    Only the draft side reads the script, so the answers must not change.
    """
    out = []
    for number, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        ids = answer["body"].get("output_ids") if isinstance(answer["body"], dict) else None
        if ids is None:
            continue
        parameters = case.body["sampling_params"]
        custom = (parameters.get("custom_params") or {}) | {"script": ids, "script_seed": number}
        body = case.body | {"sampling_params": parameters | {"custom_params": custom}}
        out.append(replace(case, name=f"{case.name} (scripted)", body=body))
    return out


def findings(cases: Sequence[Case], expected: Sequence[Any], found: Sequence[Any]) -> list[Finding]:
    """Cases whose answers differ where they should not, or whose own counts contradict each other."""
    out = []
    for case, left, right in zip(cases, expected, found, strict=True):
        places = differences(_without_ids(left), _without_ids(right))
        body = right["body"]
        if isinstance(body, dict) and "meta_info" in body:
            places += identities(body["meta_info"])
        if places:
            out.append(Finding(case, places, left, right))
    return out


def _without_ids(answer: Any) -> Any:
    """Generated identifiers (of tool calls, too) are random on both sides."""
    if isinstance(answer, dict):
        return {k: _without_ids(v) for k, v in answer.items() if k not in ("id", "tool_call_id", "created")}
    if isinstance(answer, list):
        return [_without_ids(v) for v in answer]
    return answer


def runs_seen(answers: Sequence[Any]) -> list[int]:
    """How many verifies committed 1, 2, 3 ... tokens, over all answers that report it."""
    total: list[int] = []
    for answer in answers:
        meta = answer["body"].get("meta_info", {}) if isinstance(answer["body"], dict) else {}
        for place, count in enumerate(meta.get("spec_correct_drafts_histogram") or []):
            total += [0] * (place + 1 - len(total))
            total[place] += count
    return total
