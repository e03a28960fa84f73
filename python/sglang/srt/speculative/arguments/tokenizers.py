"""Whether target and draft number their tokens alike, as far as their tokenizer files tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model")


def remark(target: Path, draft: Path, *, draft_path: str) -> str | None:
    """A sentence where both directories hold a tokenizer file of one kind and the vocabularies differ.

    A draft of another numbering is never wrong in the output, since the target verifies every token, but it
    accepts almost nothing; so this is a remark and no refusal.
    """
    for name in FILES:
        ours, theirs = target / name, draft / name
        if not (ours.is_file() and theirs.is_file()):
            continue
        if ours.stat().st_size == theirs.stat().st_size and ours.read_bytes() == theirs.read_bytes():
            return None
        if name == "tokenizer.json" and vocabulary(ours) == vocabulary(theirs):
            return None
        return (
            f"draft {draft_path} has another vocabulary in {name} than the target, so that it will propose tokens "
            "that are hardly ever accepted; use a draft trained for this target"
        )
    return None


def vocabulary(file: Path) -> Any:
    """The token table of a ``tokenizer.json``; None where it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return None
