"""Greedy text of the shipped tiny model on a GPU, for runs with and without the cycle graph.

``python cycle_text.py TOKENS`` prints one JSON object: output ids of every prompt (first alone, then all at once, so
that requests wait, join and leave), accept lengths, counters and fallbacks. Switches come from the environment.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tiny_text import MAX_BATCH, MODELS, PROMPTS, prompts


def main() -> None:
    """Start the engine, generate, print."""
    import sglang

    tokens = int(sys.argv[1])
    engine = sglang.Engine(
        model_path=str(MODELS / "nano"),
        dtype="bfloat16",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=40000,
        max_running_requests=MAX_BATCH,
        cuda_graph_max_bs_decode=MAX_BATCH,
        disable_radix_cache=True,
        log_level="info",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(MODELS / "nano-eagle3"),
        speculative_num_steps=2,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=3,
    )
    parameters: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    texts = prompts()
    outputs = [engine.generate(prompt=text, sampling_params=parameters) for text in texts[: PROMPTS // 3]]
    lengths = [{**parameters, "max_new_tokens": tokens - 3 * (place % 7)} for place in range(len(texts))]
    outputs += engine.generate(prompt=texts, sampling_params=lengths)
    state = engine.get_server_info()["internal_states"][0].get("spec_stats") or {}
    print(
        json.dumps(
            {
                "outputs": [output["output_ids"] for output in outputs],
                "accept": [output["meta_info"].get("spec_accept_length") for output in outputs],
                "cycle": [output["meta_info"].get("spec_cycle") for output in outputs],
                "counters": state.get("counters"),
                "fallbacks": state.get("fallbacks"),
                "graph_replays": state.get("graph_replays"),
            }
        ),
        flush=True,
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
