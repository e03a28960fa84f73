"""Text of the shipped tiny model on a GPU through the cycle graph and, in the same engine, through the split path.

``python cycle_text.py TOKENS`` prints one JSON object. A logit bias of nothing is what sends a request the split way.
Prompts run alone, then all at once, so that requests wait, join and leave.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tiny_text import MODELS, PROMPTS, prompts

MAX_BATCH = int(os.environ.get("CYCLE_TEXT_BATCH", "8"))
SPLIT: dict[str, Any] = {"logit_bias": {"5": 0.0}}


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
        # Plain steps of the break-even switch would mix in.
        speculative_auto="off",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(MODELS / "nano-eagle3"),
        speculative_num_steps=2,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=3,
    )
    # More than run at once, so that requests wait, join and leave.
    texts = prompts() * (1 + MAX_BATCH // 12)
    greedy: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    alone: dict[str, Any] = {}
    batch: dict[str, Any] = {}
    verifies: dict[str, Any] = {}
    for way, extra in (("graph", {}), ("split", SPLIT)):
        outputs = [engine.generate(prompt=t, sampling_params=greedy | extra) for t in texts[: PROMPTS // 3]]
        alone[way] = [output["output_ids"] for output in outputs]
        verifies[way] = [output["meta_info"]["spec_verify_ct"] for output in outputs]
        lengths = [{**greedy, **extra, "max_new_tokens": tokens - 3 * (i % 7)} for i in range(len(texts))]
        batch[way] = [
            output["output_ids"] for output in engine.generate(prompt=texts, sampling_params=lengths)
        ]
    sampled = engine.generate(
        prompt=texts[:MAX_BATCH],
        sampling_params={"max_new_tokens": tokens, "temperature": 0.8, "top_p": 0.9, "ignore_eos": True},
    )
    state = engine.get_server_info()["internal_states"][0].get("spec_stats") or {}
    print(
        json.dumps(
            {
                "alone": alone,
                "batch": batch,
                "verifies": verifies,
                "sampled_accept": sum(o["meta_info"]["spec_accept_length"] for o in sampled) / len(sampled),
                "sampled_text": sampled[0]["text"],
                "cycle": sampled[0]["meta_info"].get("spec_cycle"),
                "counters": state.get("counters") or {},
                "fallbacks": state.get("fallbacks") or {},
                "graph_replays": state.get("graph_replays"),
            }
        ),
        flush=True,
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
