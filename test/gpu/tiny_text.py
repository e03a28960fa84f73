"""Greedy text of the shipped tiny model through the offline engine on a GPU, Triton backend, CUDA graphs.

``python tiny_text.py STEPS TOKENS`` prints one JSON object: for every prompt the output ids and the gap between the
two best logits at each step, then fallbacks and counters. Prompts run one by one and as one batch. A second object
holds the hidden states that the same engine returns for a few prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
from nano_pair import MODELS, engine_arguments

PROMPTS = 24
MAX_BATCH = 16  # below the number of prompts: requests wait, join and leave
HIDDEN_PROMPTS = 3
HIDDEN_TOKENS = 17  # a run ends inside it


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
    engine = sglang.Engine(
        **engine_arguments(
            steps,
            dtype="bfloat16",
            max_total_tokens=40000,
            max_running_requests=MAX_BATCH,
            cuda_graph_max_bs_decode=MAX_BATCH,
            enable_return_hidden_states=True,
            speculative_auto="off",
        )
    )
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
    wanted = (
        "counters",
        "fallbacks",
        "graph_replays",
        "eager_passes",
        "phase_ms",
        "launch_ms",
        "cycle_ms",
        "timed_cycles",
        "kept_length",
    )
    print(json.dumps({"outputs": found} | {name: state.get(name) for name in wanted}), flush=True)
    print(json.dumps({"hidden": hidden_states(engine, texts[:HIDDEN_PROMPTS])}), flush=True)
    engine.shutdown()


def hidden_states(engine: Any, texts: list[str]) -> list[dict[str, Any]]:
    """Ids and states of the output tokens, the prompts alone and then as one batch."""
    request = dict(
        sampling_params={"max_new_tokens": HIDDEN_TOKENS, "temperature": 0, "ignore_eos": True},
        return_hidden_states=True,
    )
    outputs = [engine.generate(prompt=text, **request) for text in texts]
    outputs += engine.generate(prompt=texts, **request)
    # The first entry belongs to the prompt: one row a token of it.
    return [
        {
            "ids": output["output_ids"],
            "prompt": output["meta_info"]["hidden_states"][0],
            "states": output["meta_info"]["hidden_states"][1:],
        }
        for output in outputs
    ]


if __name__ == "__main__":
    main()
