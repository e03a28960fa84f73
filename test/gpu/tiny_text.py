"""Greedy text of the shipped tiny model through the offline engine on a GPU, Triton backend, CUDA graphs.

``python tiny_text.py STEPS TOKENS`` prints one JSON object: for every prompt the output ids and the gap between the
two best logits at each step, then fallbacks and counters. Prompts run one by one and as one batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[2] / "models"
PROMPTS = 24
MAX_BATCH = 16  # below the number of prompts: requests wait, join and leave


def prompts() -> list[str]:
    """Held-out prompts in the form that the model was trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "nano")
    lines = (MODELS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    found = []
    for entry in map(json.loads, lines[:PROMPTS]):
        if "prompt" in entry:
            found.append(entry["prompt"])
        else:
            found.append(
                tokenizer.apply_chat_template(entry["messages"], tokenize=False, add_generation_prompt=True)
            )
    return found


def main() -> None:
    """Start the engine, generate, print."""
    import sglang

    steps, tokens = int(sys.argv[1]), int(sys.argv[2])
    arguments: dict[str, Any] = dict(
        model_path=str(MODELS / "nano"),
        dtype="bfloat16",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=40000,
        max_running_requests=MAX_BATCH,
        cuda_graph_max_bs_decode=MAX_BATCH,
        disable_radix_cache=True,
        log_level="warning",
    )
    if steps:
        arguments |= dict(
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=str(MODELS / "nano-eagle3"),
            speculative_num_steps=steps,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=steps + 1,
        )
    engine = sglang.Engine(**arguments)
    request = dict(
        sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )
    texts = prompts()
    outputs = [engine.generate(prompt=text, **request) for text in texts[: PROMPTS // 3]]
    outputs += engine.generate(prompt=texts, **request)
    found = []
    for output in outputs:
        best = output["meta_info"].get("output_top_logprobs") or []
        gaps = [float(pair[0][0]) - float(pair[1][0]) for pair in best if pair]
        found.append(
            {
                "ids": output["output_ids"],
                "gaps": gaps,
                "accept": output["meta_info"].get("spec_accept_length"),
            }
        )
    state = engine.get_server_info()["internal_states"][0].get("spec_stats") or {}
    print(
        json.dumps(
            {"outputs": found, "counters": state.get("counters"), "fallbacks": state.get("fallbacks")}
        ),
        flush=True,
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
