"""The shipped target with Kimi's markers in its vocabulary: one token each, as in the real tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
THINK, THINK_END = "<think>", "</think>"
MARKERS = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END, THINK, THINK_END)


def with_markers(source: Path, folder: Path) -> Path:
    """A copy of the model in ``folder`` whose last tokens are the markers; weights are links.

    The last merges go with the tokens that they made; no other merge needs those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file.resolve())
    content: dict[str, Any] = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    model = content["model"]
    first = len(model["vocab"]) - len(MARKERS)
    dropped = {token for token, number in model["vocab"].items() if number >= first}
    model["vocab"] = {token: number for token, number in model["vocab"].items() if token not in dropped}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in dropped]
    for number, marker in enumerate(MARKERS, first):
        model["vocab"][marker] = number
        # As in Kimi's tokenizer: the tool markers are special, those of thought are plain text.
        special = marker not in (THINK, THINK_END)
        content["added_tokens"].append(
            {
                "id": number,
                "content": marker,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
        )
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@cache
def tokenizer(folder: Path) -> Any:
    """The tokenizer of such a copy."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encoded(folder: Path, text: str) -> list[int]:
    """Token ids of a text with markers."""
    ids: list[int] = tokenizer(folder).encode(text, add_special_tokens=False).ids
    return ids
