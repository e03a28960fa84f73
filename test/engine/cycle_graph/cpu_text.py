"""``python cpu_text.py``: texts of the tiny model on a CPU, requests of many kinds at once, as one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[3] / "models"
GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPTS = (
    "Once upon a time there was",
    "The capital of Nepal is",
    "One two three four",
    "She said that the lighthouse",
    "A recipe for bread needs",
)


def replays(engine: Any) -> int:
    """Cycles that ran as one so far."""
    state = engine.get_server_info()["internal_states"][0].get("spec_stats") or {}
    return int((state.get("graph_replays") or {}).get("cycle", 0))


def main() -> None:
    """Start the engine, generate, print."""
    import sglang

    engine = sglang.Engine(
        model_path=str(MODELS / "nano"),
        dtype="float32",
        device="cpu",
        sampling_backend="pytorch",
        max_total_tokens=2048,
        max_running_requests=4,
        speculative_auto="off",
        context_length=256,
        log_level="warning",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(MODELS / "nano-eagle3"),
        speculative_num_steps=2,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=3,
    )

    def run(*requests: tuple[str, dict[str, Any]]) -> list[Any]:
        return engine.generate(prompt=[p for p, _ in requests], sampling_params=[s for _, s in requests])

    # Lengths differ, so that batches shrink and waiting requests join; some requests need upstream's way.
    outputs = run(*((prompt, GREEDY | {"max_new_tokens": 40}) for prompt in PROMPTS[:1]))
    outputs += run(*((prompt, GREEDY | {"max_new_tokens": 17 + 11 * i}) for i, prompt in enumerate(PROMPTS)))
    outputs += run(
        (PROMPTS[0], GREEDY | {"max_new_tokens": 30}),
        (PROMPTS[1], GREEDY | {"max_new_tokens": 9, "frequency_penalty": 1.5}),
        (PROMPTS[2], GREEDY | {"max_new_tokens": 12, "regex": "[a-z ]+"}),
        (PROMPTS[3], GREEDY | {"max_new_tokens": 24, "min_new_tokens": 5}),
        (PROMPTS[4], {"max_new_tokens": 15, "temperature": 0.8, "sampling_seed": 5, "ignore_eos": True}),
    )
    outputs += run((PROMPTS[2], {"temperature": 0, "max_new_tokens": 40, "stop": ["the"]}))
    # What a neighbour draws must not move a greedy request; the draw itself is not comparable.
    before = replays(engine)
    mixed = run(
        (PROMPTS[0], GREEDY | {"max_new_tokens": 30}),
        (PROMPTS[1], {"temperature": 0.9, "top_p": 0.8, "max_new_tokens": 30, "ignore_eos": True}),
    )
    outputs += mixed[:1]
    drawn = replays(engine) - before
    state = engine.get_server_info()["internal_states"][0].get("spec_stats") or {}
    print(
        json.dumps(
            {
                "outputs": [[o["output_ids"], o["meta_info"]["finish_reason"]] for o in outputs],
                "verifies": [o["meta_info"]["spec_verify_ct"] for o in outputs],
                "cycle": [o["meta_info"].get("spec_cycle") for o in outputs],
                "counters": state.get("counters", {}),
                "fallbacks": state.get("fallbacks", {}).get("cycle-graph", {}),
                "graph_replays": state.get("graph_replays"),
                "drawn": drawn,
                "drawn_tokens": mixed[1]["meta_info"]["completion_tokens"],
            }
        ),
        flush=True,
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
