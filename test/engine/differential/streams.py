"""A streamed answer in one, and its pieces: what a client has seen by then must be what plain decoding shows."""

from __future__ import annotations

from typing import Any

from .cases import CHAT, COMPLETIONS


def joined(path: str, status: int, pieces: list[Any]) -> dict[str, Any]:
    """Status, the whole answer, and for /generate what each piece shows: ``pieces[choice][tokens] = text``."""
    if status != 200 or not pieces or "error" in pieces[-1]:
        return {"status": status, "body": pieces[-1] if pieces else None}
    if path == CHAT:
        return {"status": status, "body": _chat(pieces)}
    if path == COMPLETIONS:
        return {"status": status, "body": _completion(pieces)}
    last: dict[int, Any] = {}
    seen: dict[int, dict[int, str]] = {}
    for piece in pieces:
        choice = piece.get("index", 0)
        last[choice] = piece
        seen.setdefault(choice, {})[piece["meta_info"]["completion_tokens"]] = piece["text"]
    bodies = [last[choice] for choice in sorted(last)]
    return {"status": status, "body": bodies[0] if len(bodies) == 1 else bodies, "pieces": seen}


def pieces_differ(expected: Any, found: Any) -> list[str]:
    """Pieces that show another text for the same number of tokens."""
    out = []
    left, right = expected.get("pieces") or {}, found.get("pieces") or {}
    for choice in left.keys() & right.keys():
        for tokens in sorted(left[choice].keys() & right[choice].keys()):
            if left[choice][tokens] != right[choice][tokens]:
                out.append(
                    f"piece {choice} at {tokens} tokens: {left[choice][tokens]!r}, found {right[choice][tokens]!r}"
                )
    return out


def _chat(pieces: list[Any]) -> dict[str, Any]:
    """Text, reasoning, tool calls, log probabilities and end of each choice, and the last usage."""
    out: dict[str, Any] = {"choices": {}, "usage": None}
    for piece in pieces:
        out["usage"] = piece.get("usage") or out["usage"]
        for choice in piece.get("choices", []):
            new = {
                "content": "",
                "reasoning": "",
                "calls": {},
                "logprobs": [],
                "finish": None,
                "matched": None,
            }
            whole = out["choices"].setdefault(choice["index"], new)
            delta = choice.get("delta", {})
            whole["content"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                joined_call = whole["calls"].setdefault(call.get("index"), {"name": "", "arguments": ""})
                joined_call["name"] += call["function"].get("name") or ""
                joined_call["arguments"] += call["function"].get("arguments") or ""
            whole["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            whole["finish"] = choice.get("finish_reason") or whole["finish"]
            whole["matched"] = choice.get("matched_stop") or whole["matched"]
    return out


def _completion(pieces: list[Any]) -> dict[str, Any]:
    """Text, log probabilities and end of each choice, and the last usage."""
    out: dict[str, Any] = {"choices": {}, "usage": None}
    for piece in pieces:
        out["usage"] = piece.get("usage") or out["usage"]
        for choice in piece.get("choices", []):
            new = {"text": "", "logprobs": {}, "finish": None, "matched": None}
            whole = out["choices"].setdefault(choice["index"], new)
            whole["text"] += choice.get("text") or ""
            for field, values in (choice.get("logprobs") or {}).items():
                whole["logprobs"].setdefault(field, []).extend(values or [])
            whole["finish"] = choice.get("finish_reason") or whole["finish"]
            whole["matched"] = choice.get("matched_stop") or whole["matched"]
    return out
