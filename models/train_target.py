"""Train the target: a Kimi-K2 shaped model of about 4.4 million parameters.

    python models/data.py --out build/tokens
    python models/train_target.py --data build/tokens --out models/nano --seconds 130

The schedule is driven by elapsed time, so a faster machine takes more steps: seeds are fixed, but weights
are not bit-reproducible across machines or runs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from modeling import Moe, Target, export_target, initialise, save
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 2560,
    "hidden_size": 192,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": [1, 5],
    "pad_token_id": 6,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
BALANCE_STEP = 1e-3


class Windows:
    """Random training windows on the device; half begin where a document begins, as every prompt does."""

    def __init__(self, folder: Path, name: str, device: torch.device) -> None:
        self.stream = torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int32)).to(device)
        self.starts = torch.from_numpy(np.load(folder / f"{name}_starts.npy").astype(np.int64)).to(device)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """int64 [batch, length]."""
        device, last = self.stream.device, len(self.stream) - length
        offset = torch.randint(last, (batch,), generator=generator, device=device)
        pick = torch.randint(len(self.starts), (batch // 2,), generator=generator, device=device)
        offset[: batch // 2] = self.starts[pick].clamp_max(last)
        return self.stream[offset[:, None] + torch.arange(length, device=device)].long()


def clock(seconds: float, warmup: float = 0.03) -> Iterator[float]:
    """Learning-rate factor of each step until `seconds` have passed: linear warm-up, cosine to 2 %."""
    start = time.monotonic()
    while (done := (time.monotonic() - start) / seconds) < 1:
        yield min(1.0, 1e-3 + done / warmup) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * done)))


def optimiser(model: torch.nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def held_out_loss(model: Target, data: Windows, length: int, rows: int) -> float:
    """Mean next-token cross entropy (nats) over the first `rows` windows of the held-out stream."""
    was, total = model.training, 0.0
    model.eval()
    rows = min(rows, (len(data.stream) - 1) // length)
    for row in range(0, rows, 16):
        take = range(row, min(row + 16, rows))
        tokens = torch.stack([data.stream[r * length : (r + 1) * length + 1] for r in take]).long()
        logits, _ = model(tokens[:, :-1])
        total += F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).item() * len(take)
    model.train(was)
    return total / rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=130.0, help="training time; evaluation comes on top")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=20260)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(device).manual_seed(args.seed)
    model = Target(CONFIG)
    initialise(model, CONFIG["num_hidden_layers"])
    model.to(device).train()
    for layer in model.layers:
        layer.dropout = args.dropout
    train, test = Windows(args.data, "train", device), Windows(args.data, "test", device)
    opt = optimiser(model, args.rate, 0.1)
    moes = [m for m in model.modules() if isinstance(m, Moe)]
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(train.stream)} tokens", flush=True)
    log: list[dict[str, float]] = []
    start, step = time.monotonic(), 0
    for factor in clock(args.seconds):
        for group in opt.param_groups:
            group["lr"] = args.rate * factor
        tokens = train.draw(args.batch, args.length + 1, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        for moe in moes:
            moe.balance(BALANCE_STEP)
        if step % 200 == 0:  # reading the loss also keeps the host from running ahead of the clock
            row = {"step": step, "seconds": time.monotonic() - start, "loss": loss.item()}
            if step % 1000 == 0:
                row["test"] = held_out_loss(model, test, args.length, 64)
                row["least_load"] = min(m.load.min().item() for m in moes)
            log.append(row)
            print(json.dumps(row), flush=True)
        elif step % 20 == 0:
            loss.item()
        step += 1
    weights = export_target(model)
    save(args.out, CONFIG, weights)
    final = {
        "step": step,
        "seconds": time.monotonic() - start,
        "test": held_out_loss(model, test, args.length, 256),
    }
    log.append(final)
    print(json.dumps(final), flush=True)
    (args.out / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    generation = {"bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": 6, "do_sample": False}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


if __name__ == "__main__":
    main()
