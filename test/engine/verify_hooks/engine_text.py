"""Greedy text of the shipped tiny model through the offline engine, Triton backend, interpreted on a CPU.

``python engine_text.py STEPS TOKENS`` prints one JSON object: output ids, and the attention calls by path.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nano_pair import engine_arguments

PROMPTS = ["Once upon a time there was", "The capital of Nepal is"]


def main() -> None:
    """Start the engine, generate, print."""
    import sglang

    steps, tokens = int(sys.argv[1]), int(sys.argv[2])
    engine = sglang.Engine(
        **engine_arguments(
            steps,
            dtype="float32",
            device="cpu",
            max_total_tokens=512,
            max_running_requests=2,
            context_length=256,
        )
    )
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
