"""Ask two servers the same requests and compare the answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .cases import Case
from .compare import differences, identities
from .servers import Asked
from .streams import joined, pieces_differ

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
    status, pieces = server.stream(case.path, case.body)
    return joined(case.path, status, pieces)


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
        places = differences(_without_ids(_answer(left)), _without_ids(_answer(right)))
        places += pieces_differ(left, right)
        for body in bodies(right):
            places += identities(body["meta_info"])
        if places:
            out.append(Finding(case, places, left, right))
    return out


def _answer(answer: Any) -> Any:
    """The answer without the pieces in which it came: how many tokens a piece holds is the server's affair."""
    return {key: value for key, value in answer.items() if key != "pieces"}


def bodies(answer: Any) -> list[dict[str, Any]]:
    """The answers of /generate in one reply: one, or those of a batch or of n."""
    body = answer["body"]
    each = body if isinstance(body, list) else [body]
    return [one for one in each if isinstance(one, dict) and "meta_info" in one]


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
        for body in bodies(answer):
            for place, count in enumerate(body["meta_info"].get("spec_correct_drafts_histogram") or []):
                total += [0] * (place + 1 - len(total))
                total[place] += count
    return total
