"""Which hidden states of the target feed the draft, and whether the target can hand them out.

A draft names layers in ``eagle_config.eagle_aux_hidden_state_layer_ids``. The server captures the *input*
of a layer, so "output of layer i" is captured at ``i + 1``:

* Llama-like targets take an id as an output and always capture at ``id + 1``;
* DeepSeek and Kimi targets take ids as they are, except that a list starting with 1 is shifted by one
  (that is how drafts trained with output ids are told apart).

Capture positions run from 0 (the embeddings) to ``layers - 1``. The last layer's output would be position
``layers``, which the layer loop never reaches: the server then ends in "captured 2 of 3" at its first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.speculative.arguments.configs import architecture, family, text_config
from sglang.srt.speculative.arguments.faults import ArgumentFault

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
DEFAULT_COUNT = 3

# Targets that shift a list of ids only if it starts with 1, and those that always shift. For any other family the
# rule is not known here, and only ids that no rule can serve are refused.
SHIFT_IF_ONE = frozenset(
    [
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    ]
)
ALWAYS_SHIFT = frozenset(
    [
        "BailingMoeForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4MoeForCausalLM",
        "LlamaForCausalLM",
        "LongcatFlashForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    ]
)


def eagle_config(draft: Mapping[str, Any]) -> Mapping[str, Any]:
    """The draft's ``eagle_config`` section, empty where it has none."""
    section = draft.get("eagle_config")
    return section if isinstance(section, Mapping) else {}


def uses_aux(draft: Mapping[str, Any]) -> bool:
    """Whether the draft reads several of the target's hidden states rather than the last one."""
    return bool(eagle_config(draft).get("use_aux_hidden_state", True))


def stated_ids(draft: Mapping[str, Any]) -> Any:
    """The ids as the server reads them (``eagle_config`` only), or None."""
    return eagle_config(draft).get(IDS_KEY)


def count(draft: Mapping[str, Any]) -> int:
    """Hidden states that the draft's first projection expects side by side."""
    number = draft.get("num_aux_hidden_states")
    if isinstance(number, int):
        return number
    ids = stated_ids(draft)
    return len(ids) if isinstance(ids, Sequence) and ids else DEFAULT_COUNT


def default_positions(layers: int) -> list[int]:
    """Where a target captures when the draft names no layers."""
    return [2, layers // 2, layers - 3]


def shift(target: Mapping[str, Any], ids: Sequence[int]) -> int | None:
    """What the target adds to each id to get the capture position; None where its rule is not known."""
    names = {family(target), architecture(target)}
    if names & SHIFT_IF_ONE:
        return 1 if ids[0] == 1 else 0
    return 1 if names & ALWAYS_SHIFT else None


def check(target: Mapping[str, Any], draft: Mapping[str, Any], *, draft_path: str) -> list[str]:
    """Check the draft's layer ids against the target's layer count; returns remarks worth logging.

    Raises:
        ArgumentFault: ids that are empty, no integers, repeated, outside the model, or of another number
            than the draft's first projection takes.
    """
    layers = text_config(target).get("num_hidden_layers")
    if not isinstance(layers, int) or not uses_aux(draft):
        return []
    ids = stated_ids(draft)
    if ids is None:
        return _check_default(target, layers, draft, draft_path)
    subject = f"{IDS_KEY} {ids} of draft {draft_path}"
    if (
        not isinstance(ids, list)
        or not ids
        or any(isinstance(i, bool) or not isinstance(i, int) for i in ids)
    ):
        raise ArgumentFault(
            subject,
            "must be a non-empty list of layer numbers",
            "name the layers that the draft was trained on in its eagle_config, or remove the key for the default "
            f"{default_positions(layers)}",
            code="aux-form",
        )
    if len(set(ids)) != len(ids):
        raise ArgumentFault(
            subject,
            f"names a layer twice, so that the target would hand out {len(set(ids))} hidden states, not {len(ids)}",
            "name each layer once",
            code="aux-twice",
        )
    _check_positions(subject, ids, shift(target, ids), layers)
    expected = draft.get("num_aux_hidden_states")
    if isinstance(expected, int) and expected != len(ids):
        raise ArgumentFault(
            subject,
            f"are {len(ids)}, but the draft's num_aux_hidden_states is {expected}",
            "make the two agree in the draft's config.json",
            code="aux-count",
        )
    if ids != sorted(ids):
        return [f"{subject} are not ascending; the target hands hidden states out in layer order"]
    return []


def _check_positions(subject: str, ids: list[int], added: int | None, layers: int) -> None:
    # Some targets do hand out the state behind the last layer, which has the number of the layers.
    last = layers if added is None else layers - 1 - added
    # A negative id would count from the embeddings, not from the end as whoever writes -1 expects.
    if min(ids) >= 0 and max(ids) <= last:
        return
    meaning = ""
    if added is not None:
        kind = "output" if added else "input"
        meaning = (
            f" (an id means the {kind} of that layer here, and the last layer's output cannot be captured)"
        )
    raise ArgumentFault(
        subject,
        f"must lie between 0 and {last} for a target of {layers} layers{meaning}",
        f"use a draft whose largest id is {last} or less",
        code="aux-outside",
    )


def _check_default(
    target: Mapping[str, Any], layers: int, draft: Mapping[str, Any], draft_path: str
) -> list[str]:
    positions = default_positions(layers)
    outer = draft.get(IDS_KEY)
    if isinstance(outer, list) and outer and [i + (shift(target, outer) or 0) for i in outer] != positions:
        raise ArgumentFault(
            f"{IDS_KEY} {outer} of draft {draft_path}",
            f"stands outside eagle_config, where the server does not look, so {positions} would be captured instead",
            "move the key into eagle_config in the draft's config.json",
            code="aux-place",
        )
    if min(positions) < 0 or len(set(positions)) < len(positions):
        raise ArgumentFault(
            f"draft {draft_path} names no {IDS_KEY}",
            f"and the default {positions} repeats a layer or leaves the target's {layers} layers",
            "name the layers that the draft was trained on in its eagle_config",
            code="aux-default",
        )
    return []
