"""Train the EAGLE-3 draft by its training-time test (Li et al. 2025, arXiv 2503.01840).

    python models/train_draft.py --data build/tokens --target models/nano --out models/nano-eagle3

The draft learns from the target's own greedy continuations of training prompts (and a share of corpus
text). Each step unrolls the draft on its own states, as the server does, so that its second guess is
trained on what it will really see. The schedule is driven by elapsed time, as in train_target.py.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import ASSISTANT, BOS, PAD, USER
from modeling import Draft, DraftKeys, Target, export_draft, import_target, initialise, save
from torch import Tensor
from train_target import Windows, clock, optimiser

TAPS = (0, 2, 3)
DRAFT_VOCAB = 2048
STEP_WEIGHTS = (1.0, 0.8, 0.3)


def draft_config(target: dict[str, Any]) -> dict[str, Any]:
    """config.json of the draft: its own head size and vocabulary, the target's width."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": target["hidden_size"],
        "target_hidden_size": target["hidden_size"],
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": target["max_position_embeddings"],
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": target["bos_token_id"],
        "eos_token_id": target["eos_token_id"],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(TAPS)},
        "torch_dtype": "bfloat16",
    }


def cut_prompts(data: Windows, count: int, longest: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts [count, longest] and their lengths: up to the assistant's turn, or a random head of plain text."""
    device = data.stream.device
    last = len(data.stream) - longest
    start = data.starts[
        torch.randint(len(data.starts), (count,), generator=generator, device=device)
    ].clamp_max(last)
    tokens = data.stream[start[:, None] + torch.arange(longest, device=device)].long()
    tokens[:, 0] = BOS
    turn = (tokens == ASSISTANT).float()
    first_turn = turn.argmax(1) + 1
    random_head = torch.randint(8, longest, (count,), generator=generator, device=device)
    chat = (tokens[:, 1] == USER) & (turn.sum(1) > 0)
    return tokens, torch.where(chat, first_turn, random_head)


@torch.no_grad()
def continue_greedily(
    model: Target, tokens: Tensor, lengths: Tensor, total: int, dtype: torch.dtype
) -> Tensor:
    """Fill sequences up to `total` tokens with the target's argmax; prompts of unequal length stay in step."""
    out = torch.full((tokens.shape[0], total), PAD, device=tokens.device)
    out[:, : tokens.shape[1]] = tokens
    caches = model.caches(tokens.shape[0], total, dtype)
    for position in range(total - 1):
        logits, _ = model(out[:, position : position + 1], caches, position)
        guess = logits[:, -1].argmax(-1)
        out[:, position + 1] = torch.where(position + 1 < lengths, out[:, position + 1], guess)
    return out


def losses(
    target: Target, draft: Draft, tokens: Tensor, lookup: Tensor, first: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Weighted loss, and per unrolled step the share of positions where the draft names the target's argmax.

    tokens int64 [B, T]; lookup int64 [V] maps target ids to draft ids (-1: not in the draft vocabulary);
    `first` int64 [B] restricts the shares to positions at or after it.
    """
    with torch.no_grad():
        logits, features = target(tokens)
        wanted = logits[:, 1:].argmax(-1)
        goal = logits[:, 1:].float()[..., draft.target_ids].softmax(-1)
        embedding = target.embed_tokens(tokens[:, 1:])
    hard = lookup[wanted]
    known = hard >= 0
    index = torch.arange(hard.shape[1], device=hard.device)
    state, past = draft.fc(features[:, :-1]), DraftKeys()
    total, shares = torch.zeros((), device=tokens.device), []
    for step, weight in enumerate(STEP_WEIGHTS):
        guess, state = draft.unroll(embedding, state, past)
        log = guess.float().log_softmax(-1)
        soft = -(goal * log).sum(-1)
        sharp = -log.gather(-1, hard.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        use = known & (index >= step)
        total = total + weight * ((0.5 * soft + 0.5 * sharp) * use).sum() / use.sum()
        with torch.no_grad():
            here = (index >= step).expand_as(wanted) if first is None else index >= first[:, None]
            shares.append(((draft.target_ids[guess.argmax(-1)] == wanted) & here).sum() / here.sum())
        state = F.pad(state, (0, 0, 1, 0))[
            :, :-1
        ]  # the next guess of position j starts from the state of j - 1
    return total, shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=85.0, help="training time; generation comes on top")
    parser.add_argument("--sequences", type=int, default=16384, help="greedy continuations to learn from")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--length", type=int, default=224)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=20261)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(device).manual_seed(args.seed)
    target = import_target(args.target, TAPS).to(device).requires_grad_(False)
    train, test = Windows(args.data, "train", device), Windows(args.data, "test", device)
    start = time.monotonic()
    chunk = min(4096, args.sequences)
    kept: list[Tensor] = []
    with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
        dtype = torch.bfloat16 if cuda else torch.float32
        for _ in range(args.sequences // chunk):
            tokens, lengths = cut_prompts(train, chunk, 64, generator)
            kept.append(continue_greedily(target, tokens, lengths, args.length, dtype))
        tokens, lengths = cut_prompts(test, min(512, chunk), 64, generator)
        exam = continue_greedily(target, tokens, lengths, args.length, dtype)
    pool = torch.cat(kept)
    counts = torch.bincount(pool.flatten(), minlength=target.config["vocab_size"])
    counts = counts * 4 + torch.bincount(train.stream, minlength=target.config["vocab_size"])
    print(f"{pool.numel()} generated tokens after {time.monotonic() - start:.1f} s", flush=True)

    config = draft_config(target.config)
    draft = Draft(config, len(TAPS) * config["hidden_size"])
    initialise(draft, 1)
    draft.target_ids.copy_(counts.topk(DRAFT_VOCAB).indices.sort().values)
    draft.to(device)
    lookup = torch.full((config["vocab_size"],), -1, device=device)
    lookup[draft.target_ids] = torch.arange(DRAFT_VOCAB, device=device)
    opt = optimiser(draft, args.rate, 0.05)
    log: list[dict[str, Any]] = []

    def examine() -> list[float]:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            rows = [
                losses(target, draft, e, lookup, n)[1]
                for e, n in zip(torch.split(exam, 64), torch.split(lengths, 64), strict=True)
            ]
        return [torch.stack(column).mean().item() for column in zip(*rows, strict=True)]

    start, step = time.monotonic(), 0
    for factor in clock(args.seconds):
        for group in opt.param_groups:
            group["lr"] = args.rate * factor
        pick = torch.randint(len(pool), (args.batch * 3 // 4,), generator=generator, device=device)
        tokens = torch.cat([pool[pick], train.draw(args.batch - len(pick), args.length, generator)])
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss, shares = losses(target, draft, tokens, lookup)
        opt.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        opt.step()
        if step % 200 == 0:
            row: dict[str, Any] = {
                "step": step,
                "seconds": time.monotonic() - start,
                "loss": loss.item(),
            }
            row["agree"] = [s.item() for s in shares]
            if step % 1000 == 0:
                row["held_out_agree"] = examine()
            log.append(row)
            print(json.dumps(row), flush=True)
        elif step % 20 == 0:
            loss.item()
        step += 1
    save(args.out, config, export_draft(draft, config["vocab_size"]))
    log.append({"step": step, "seconds": time.monotonic() - start, "held_out_agree": examine()})
    print(json.dumps(log[-1]), flush=True)
    (args.out / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))


if __name__ == "__main__":
    main()
