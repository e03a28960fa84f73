"""Arguments of the offline engine for the shipped pair of models: one place for every script that starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[2] / "models"


def engine_arguments(steps: int, **settings: Any) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``: Triton attention, the portable sampler, no grammar, no prefix cache.

    Args:
        steps: draft steps of a chain; 0 = no speculation.
        settings: what the caller adds or changes.
    """
    arguments: dict[str, Any] = dict(
        model_path=str(MODELS / "nano"),
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
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
    return arguments | settings
