"""Greedy text of the shipped tiny model through the offline engine, Triton backend, interpreted on a CPU.

``python engine_text.py STEPS TOKENS`` prints one JSON object: output ids, and the attention calls by path.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[3] / "models"
PROMPTS = ["Once upon a time there was", "The capital of Nepal is"]


def main() -> None:
    """Start the engine, generate, print."""
    import sglang

    steps, tokens = int(sys.argv[1]), int(sys.argv[2])
    arguments: dict[str, Any] = dict(
        model_path=str(MODELS / "nano"),
        dtype="float32",
        device="cpu",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=512,
        max_running_requests=2,
        context_length=256,
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
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    outputs = engine.generate(prompt=PROMPTS, sampling_params=sampling)
    state = engine.get_server_info()["internal_states"][0].get("spec_stats") or {}
    print(
        json.dumps(
            {
                "ids": [output["output_ids"] for output in outputs],
                "accept": [output["meta_info"].get("spec_accept_length") for output in outputs],
                "counters": state.get("counters", {}),
                "fallbacks": state.get("fallbacks", {}).get("verify-attention", {}),
            }
        ),
        flush=True,
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
