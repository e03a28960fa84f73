"""Prompts for measuring acceptance: real text, written for this bench and under its licence.

Acceptance depends on the text. Random tokens end in loops that any draft predicts; a draft that looks
brilliant there can be useless in a conversation. So acceptance is measured on prompts of the kinds that
people send, generation may stop where the model stops, and an answer that runs in a circle is flagged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang.bench_verify.errors import BenchError

FOLDER = Path(__file__).resolve().parent / "prompts"
DOCUMENTS = ("lighthouse.txt", "workshop.txt")
QUESTIONS = {
    "lighthouse.txt": "List every decision in these minutes with the reason that was given, then say what is still open.",
    "workshop.txt": "Summarise the rules in these notes, and give for each an example from a trade that is not boats.",
}
KINDS = ("chat", "code", "maths", "long")


class PromptError(BenchError):
    """A prompt file that does not follow the format."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: a conversation, or plain text to continue."""

    id: str
    kind: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""

    def conversation(self) -> list[dict[str, str]]:
        """The messages as a chat endpoint takes them; plain text becomes one question."""
        if self.messages:
            return [{"role": role, "content": content} for role, content in self.messages]
        return [{"role": "user", "content": self.text}]

    def plain(self) -> str:
        """The prompt without a chat template."""
        return self.text or "\n\n".join(content for _, content in self.messages)


def read(path: str | Path) -> list[Prompt]:
    """Prompts of a JSON Lines file with ``id``, ``kind`` and ``messages`` or ``prompt``."""
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            messages = tuple((str(m["role"]), str(m["content"])) for m in item.get("messages", ()))
            text = str(item.get("prompt", ""))
            if not messages and not text:
                raise KeyError("messages or prompt")
            found.append(Prompt(str(item["id"]), str(item["kind"]), messages, text))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise PromptError(f"{path}:{number}: not a prompt ({error})") from error
    return found


def shipped(kinds: Iterable[str] = KINDS) -> list[Prompt]:
    """The prompts that come with the bench, of these kinds."""
    wanted = set(kinds)
    unknown = wanted - set(KINDS)
    if unknown:
        raise PromptError(f"unknown kinds {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    found = [prompt for prompt in read(FOLDER / "short.jsonl") if prompt.kind in wanted]
    if "long" in wanted:
        found.extend(document(name) for name in DOCUMENTS)
    return found


def document(name: str, copies: int = 1) -> Prompt:
    """A long document followed by its question. ``copies`` repeats it as numbered parts, for long contexts."""
    text = (FOLDER / name).read_text(encoding="utf-8").strip()
    parts = [text] if copies == 1 else [f"Part {index + 1}\n\n{text}" for index in range(copies)]
    body = "\n\n".join([*parts, QUESTIONS[name]])
    stem = name.partition(".")[0]
    return Prompt(f"long-{stem}" + (f"-x{copies}" if copies > 1 else ""), "long", (("user", body),))


def pick(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` prompts, taking the kinds in turn so that a short run still covers each."""
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    chosen: list[Prompt] = []
    index = 0
    while len(chosen) < min(count, len(prompts)):
        for group in by_kind.values():
            if index < len(group) and len(chosen) < count:
                chosen.append(group[index])
        index += 1
    return chosen
