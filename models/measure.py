"""Accept length of the shipped pair, by a chain reference in plain PyTorch on a CPU.

    python models/measure.py                    # all held-out prompts
    python models/measure.py --prompts 40 --show 3

Greedy decoding with and without the draft must give the same tokens; the command fails if it does not.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from modeling import Draft, Target, import_draft, import_target
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).resolve().parent


@dataclass
class Chain:
    """What a chain of drafts did: accepted tokens per verify (bonus included) and hits by draft position."""

    lengths: Counter[int] = field(default_factory=Counter)
    tried: int = 0

    @property
    def accept_length(self) -> float:
        """Mean tokens per verify step."""
        return sum(n * c for n, c in self.lengths.items()) / max(self.tried, 1)

    def by_position(self, steps: int) -> list[float]:
        """Share of verify steps whose first 1, 2, ... drafts were all right."""
        return [
            sum(c for n, c in self.lengths.items() if n > p + 1) / max(self.tried, 1) for p in range(steps)
        ]

    def add(self, other: Chain) -> None:
        """Pool the counts of another run."""
        self.lengths.update(other.lengths)
        self.tried += other.tried


def _until(tokens: list[int], stop: set[int], limit: int) -> list[int]:
    """`tokens` up to the first stop token (included), at most `limit`."""
    for index, token in enumerate(tokens[:limit]):
        if token in stop:
            return tokens[: index + 1]
    return tokens[:limit]


@torch.no_grad()
def decode(target: Target, prompt: list[int], limit: int, stop: set[int]) -> list[int]:
    """Greedy continuation, one token a step."""
    caches = target.caches(1, len(prompt) + limit, torch.float32)
    logits, _ = target(torch.tensor([prompt]), caches, 0)
    out: list[int] = []
    while True:
        out.append(int(logits[0, -1].argmax()))
        if len(out) == limit or out[-1] in stop:
            return out
        logits, _ = target(torch.tensor([out[-1:]]), caches, len(prompt) + len(out) - 1)


@torch.no_grad()
def speculate(
    target: Target, draft: Draft, prompt: list[int], limit: int, stop: set[int], steps: int = 2
) -> tuple[list[int], Chain]:
    """Greedy continuation with a chain of `steps` drafts verified at once; the tokens equal `decode`'s."""
    capacity = len(prompt) + limit + steps + 2
    caches, mine = target.caches(1, capacity, torch.float32), draft.cache(1, capacity, torch.float32)
    logits, features = target(torch.tensor([prompt]), caches, 0)
    out, chain, length = [int(logits[0, -1].argmax())], Chain(), len(prompt)
    fresh, start = [*prompt[1:], out[0]], 0
    while len(out) < limit and stop.isdisjoint(out):
        embedding = target.embed_tokens(torch.tensor([fresh]))
        guess, state = draft(embedding, draft.fc(features), mine, start)
        drafts: list[int] = []
        for step in range(steps):
            if step:
                guess, state = draft(
                    target.embed_tokens(torch.tensor([drafts[-1:]])), state, mine, length + step - 1
                )
            state = state[:, -1:]
            drafts.append(int(draft.target_ids[guess[0, -1].argmax()]))
        logits, features = target(torch.tensor([[out[-1], *drafts]]), caches, length)
        chosen: list[int] = logits[0].argmax(-1).tolist()
        right = 0
        while right < steps and drafts[right] == chosen[right]:
            right += 1
        fresh, start = chosen[: right + 1], length
        features = features[:, : right + 1]
        length += right + 1
        out += fresh
        chain.lengths[right + 1] += 1
        chain.tried += 1
    return _until(out, stop, limit), chain


def prompt_ids(row: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a row of prompts.jsonl: chat turns under the chat template, or plain text."""
    if "prompt" in row:
        ids: list[int] = tokenizer.encode(row["prompt"]).ids
        return ids
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in row["messages"])
    chat: list[int] = tokenizer.encode(f"{text}<|assistant|>").ids
    return chat


@torch.no_grad()
def losses(target: Target, tokenizer: Tokenizer) -> dict[str, float]:
    """Mean cross entropy (nats a token) by kind over heldout.jsonl; of a conversation only the answer counts."""
    sums: dict[str, list[Tensor]] = {}
    for line in (HERE / "heldout.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "text" in row:
            head, ids = 1, tokenizer.encode(row["text"]).ids
        else:
            asked = prompt_ids({"messages": [{"role": "user", "content": row["user"]}]}, tokenizer)
            answer = tokenizer.encode(f"{row['assistant']}<|end|>", add_special_tokens=False).ids
            head, ids = len(asked), asked + answer
        logits, _ = target(torch.tensor([ids[:-1]]))
        each = torch.nn.functional.cross_entropy(logits[0], torch.tensor(ids[1:]), reduction="none")
        sums.setdefault(row["kind"], []).append(each[head - 1 :])
    return {kind: torch.cat(parts).mean().item() for kind, parts in sorted(sums.items())}


def load_prompts(count: int | None = None) -> list[dict[str, Any]]:
    """Rows of prompts.jsonl, evenly thinned to `count`."""
    rows = [json.loads(line) for line in (HERE / "prompts.jsonl").read_text().splitlines()]
    return rows if count is None else [rows[i * len(rows) // count] for i in range(count)]


def load_pair(
    target: Path = HERE / "nano", draft: Path = HERE / "nano-eagle3"
) -> tuple[Target, Draft, Tokenizer]:
    """The shipped target, draft and tokenizer, float32 on the CPU."""
    model = import_draft(draft)
    taps = tuple(model.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    return import_target(target, taps), model, Tokenizer.from_file(str(target / "tokenizer.json"))


def stop_ids(target: Target) -> set[int]:
    """End-of-sequence ids of the target."""
    ids: Tensor | int | list[int] = target.config["eos_token_id"]
    return {ids} if isinstance(ids, int) else set(ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, help="how many held-out prompts (default: all)")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens a prompt")
    parser.add_argument("--steps", type=int, default=2, help="drafts per verify step")
    parser.add_argument("--show", type=int, default=0, help="print this many continuations")
    parser.add_argument("--target", type=Path, default=HERE / "nano")
    parser.add_argument("--draft", type=Path, default=HERE / "nano-eagle3")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    target, draft, tokenizer = load_pair(args.target, args.draft)
    stop, total, kinds, differing = stop_ids(target), Chain(), dict[str, Chain](), 0
    for number, row in enumerate(load_prompts(args.prompts)):
        ids = prompt_ids(row, tokenizer)
        text, chain = speculate(target, draft, ids, args.tokens, stop, args.steps)
        differing += text != decode(target, ids, args.tokens, stop)
        total.add(chain)
        kinds.setdefault(row["kind"], Chain()).add(chain)
        if number < args.show:
            question = row.get("prompt") or row["messages"][-1]["content"]
            print(f"[{row['id']}] {question}\n  -> {tokenizer.decode(text)}\n")
    loss = losses(target, tokenizer)
    print("held-out loss (nats/token): " + ", ".join(f"{kind} {value:.2f}" for kind, value in loss.items()))
    print(f"{'kind':8} {'verifies':>8} {'accept length':>13}  hits by draft position")
    for kind, chain in [*sorted(kinds.items()), ("all", total)]:
        hits = " ".join(f"{share:.3f}" for share in chain.by_position(args.steps))
        print(f"{kind:8} {chain.tried:8d} {chain.accept_length:13.3f}  {hits}")
    print(
        f"accept lengths: {dict(sorted(total.lengths.items()))}; prompts that differ from plain greedy: {differing}"
    )
    if args.json:
        figures = {
            "accept_length": total.accept_length,
            "by_position": total.by_position(args.steps),
            "histogram": dict(sorted(total.lengths.items())),
            "kinds": {kind: chain.accept_length for kind, chain in sorted(kinds.items())},
            "differing": differing,
            "loss": loss,
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if differing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
