"""Whether a draft fits its target: every rule is a function over the two configurations and the draft's headers.

The rules cover EAGLE-3 drafts. A rule whose facts are absent (no safetensors, a quantised tensor whose shape
is packed) says nothing: only what is certain to fail or to give wrong tokens is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sglang.srt.speculative.arguments import aux_layers
from sglang.srt.speculative.arguments.checkpoint import TensorHeader, read_integers
from sglang.srt.speculative.arguments.configs import (
    DTYPES,
    architecture,
    builtin_heads,
    context_length,
    is_mla,
    named_dtype,
    text_config,
)
from sglang.srt.speculative.arguments.faults import ArgumentFault, one_line
from sglang.srt.speculative.arguments.pair import DRAFT_PATH, Pair
from sglang.srt.speculative.arguments.weights import check_complete, check_packing, check_shapes

# Architectures that the base version loads as an EAGLE-3 draft. A test holds the list to the composed server.
EAGLE3_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "LlamaForCausalLMEagle3")
LLAMA_DRAFT = "LlamaForCausalLMEagle3"


# Targets that have next-token heads only where their configuration counts them. Other families bring heads
# that the configuration does not mention, so their silence proves nothing.
_COUNTED_HEADS = ("Llama", "DeepseekV", "KimiK2")


def require_draft(target: Mapping[str, Any], *, algorithm: str, target_path: str) -> None:
    """Refuse an EAGLE algorithm without a draft where the target brings no head that could serve as one."""
    heads = builtin_heads(target)
    name = architecture(target)
    subject = f"--speculative-algorithm {algorithm} without {DRAFT_PATH}"
    give = f"give {DRAFT_PATH} with the directory of a draft trained for this target"
    if algorithm == "EAGLE3" and heads:
        raise ArgumentFault(
            subject,
            f"has no EAGLE-3 draft, because the {heads} built-in head(s) of {target_path} are of the next-token kind",
            f"{give}, or --speculative-algorithm NEXTN to use the built-in head",
            code="draft-absent",
        )
    counted = name.startswith(_COUNTED_HEADS)
    if algorithm in ("EAGLE3", "STANDALONE") or (counted and not heads):
        reason = "no built-in head" if counted else f"no {algorithm} draft of its own"
        raise ArgumentFault(
            subject,
            f"has nothing to propose tokens with, because {target_path} ({name or 'unknown architecture'}) brings "
            f"{reason}",
            give,
            code="draft-absent",
        )


def check_model_type(
    config: Mapping[str, Any], *, path: str, known: Collection[str], trust_remote_code: bool
) -> None:
    """A ``model_type`` must be one that the installed libraries have a configuration class for."""
    name = config.get("model_type")
    if name in known:
        return
    has_code = "AutoConfig" in (config.get("auto_map") or {})
    if has_code and trust_remote_code:
        return
    near = difflib.get_close_matches(str(name), known, n=1)
    if has_code:
        remedy = "give --trust-remote-code if you trust the code that the checkpoint brings along"
    elif near:
        remedy = f"correct model_type in its config.json (the nearest known name is {near[0]})"
    else:
        remedy = "correct model_type in its config.json, or use a checkpoint of a known type such as llama"
    raise ArgumentFault(
        f"model_type {name} of {path}",
        "is unknown to the installed transformers and to sglang",
        remedy,
        code="model-type",
    )


# What the rules below reckon with.
NUMBERS = (
    *("hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)


def check_numbers(pair: Pair) -> None:
    """Sizes must be whole numbers; one that is left out or null is another rule's matter."""
    for name in NUMBERS:
        value = pair.draft.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ArgumentFault(
                f"{name} {one_line(repr(value))} of {pair.name}",
                "must be a whole number",
                "correct the draft's config.json",
                code="config-values",
            )


def check_architecture(pair: Pair) -> None:
    """The draft must be of a class that reads several hidden states of a target."""
    name = architecture(pair.draft)
    if name in EAGLE3_ARCHITECTURES or pair.own_architectures:
        return
    known = " or ".join(EAGLE3_ARCHITECTURES)
    raise ArgumentFault(
        f"{DRAFT_PATH} {pair.draft_path}",
        f"is no EAGLE-3 draft that can be loaded: its architecture is {name or 'not stated'}, not {known}",
        "give a draft of one of these, or another --speculative-algorithm",
        code="draft-architecture",
    )


def check_vocabulary(pair: Pair) -> None:
    """Both sides must number tokens alike: same vocabulary, or a smaller draft one with a map into it."""
    target = text_config(pair.target).get("vocab_size")
    whole = pair.draft.get("vocab_size")
    if not isinstance(target, int) or not isinstance(whole, int):
        return
    if whole != target:
        raise ArgumentFault(
            f"vocab_size {whole} of {pair.name}",
            f"must be the target's {target}, because the draft looks up embeddings by the target's token ids",
            "use a draft trained for this target (a smaller proposal vocabulary goes into draft_vocab_size with a "
            "d2t map)",
            code="vocabulary",
        )
    unstated = "draft_vocab_size" not in pair.draft and not pair.draft.get("tie_word_embeddings")
    if unstated and architecture(pair.draft) == LLAMA_DRAFT:
        raise ArgumentFault(
            f"config.json of {pair.name}",
            f"must state draft_vocab_size, which {LLAMA_DRAFT} reads without a default",
            f'add "draft_vocab_size": {target} (or the length of its d2t map)',
            code="draft-vocabulary-unstated",
        )
    _check_reduced_vocabulary(pair, target)


def _check_reduced_vocabulary(pair: Pair, target: int) -> None:
    reduced = pair.draft.get("draft_vocab_size")
    if reduced is None:
        reduced = target
    subject = f"draft_vocab_size {reduced} of {pair.name}"
    if reduced > target:
        raise ArgumentFault(
            subject,
            f"must be at most the target's vocabulary of {target}",
            "use a draft trained for this target",
            code="draft-vocabulary-large",
        )
    if pair.tensors is None:
        return
    table = pair.tensor("d2t")
    if table is None:
        if reduced < target:
            raise ArgumentFault(
                subject,
                f"is below the target's {target}, but the checkpoint holds no d2t map from its ids to the target's",
                "use a checkpoint that contains d2t",
                code="map-missing",
            )
        return
    if table.shape != (reduced,):
        raise ArgumentFault(
            f"d2t map of shape {list(table.shape)} in {pair.name}",
            f"must have one entry for each of the {reduced} tokens of draft_vocab_size",
            "use a checkpoint whose config.json belongs to its weights",
            code="map-length",
        )
    _check_map_values(pair, table, target)


def _check_map_values(pair: Pair, table: TensorHeader, target: int) -> None:
    offsets = read_integers(table)
    # The table stores differences: draft id i is the target's id i + d2t[i].
    for i, offset in enumerate(offsets or ()):
        if not 0 <= i + offset < target:
            raise ArgumentFault(
                f"d2t map of {pair.name} sends draft token {i} to target token {i + offset}",
                f"but the target's ids run from 0 to {target - 1}",
                "use a draft trained for this target",
                code="map-range",
            )


def check_width(pair: Pair) -> None:
    """The draft must take hidden states as wide as the target gives them."""
    target = text_config(pair.target).get("hidden_size")
    hidden = pair.draft.get("hidden_size")
    taken = pair.draft.get("target_hidden_size") or hidden
    if not isinstance(target, int) or not isinstance(hidden, int):
        return
    key = "target_hidden_size" if pair.draft.get("target_hidden_size") else "hidden_size"
    if taken != target:
        raise ArgumentFault(
            f"{key} {taken} of {pair.name}",
            f"must be the target's hidden_size of {target}",
            "use a draft trained for this target"
            + (
                ""
                if key == "target_hidden_size"
                else f' (one of another width states "target_hidden_size": {target})'
            ),
            code="width",
        )
    if hidden != target and pair.tensors is not None and pair.tensor("embed_tokens.weight") is None:
        raise ArgumentFault(
            f"hidden_size {hidden} of {pair.name}",
            f"differs from the target's {target}, so it needs embeddings of its own, but the checkpoint holds no "
            "embed_tokens.weight",
            "use a checkpoint with embeddings, or a draft of the target's width",
            code="embedding-missing",
        )


def check_heads(pair: Pair) -> None:
    """Attention heads must divide among each other and over the ranks."""
    heads = pair.draft.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        return
    shared = pair.draft.get("num_key_value_heads") or heads
    ranks = pair.attention_ranks
    if not is_mla(pair.draft) and heads % shared:
        raise ArgumentFault(
            f"num_attention_heads {heads} of {pair.name}",
            f"must be a multiple of its num_key_value_heads {shared}",
            "correct the draft's config.json",
            code="heads",
        )
    if heads % ranks:
        raise ArgumentFault(
            f"num_attention_heads {heads} of {pair.name}",
            f"must be a multiple of the {ranks} tensor-parallel ranks",
            f"give a --tp-size that divides {heads}",
            code="heads-ranks",
        )
    if not is_mla(pair.draft) and shared % ranks and ranks % shared:
        raise ArgumentFault(
            f"num_key_value_heads {shared} of {pair.name}",
            f"must divide the {ranks} tensor-parallel ranks or be a multiple of them",
            "give another --tp-size",
            code="heads-ranks",
        )


def check_layers(pair: Pair) -> None:
    """An MLA draft is written for exactly one layer with a compressed query."""
    if not is_mla(pair.draft):
        return
    layers = pair.draft.get("num_hidden_layers")
    if layers != 1:
        raise ArgumentFault(
            f"num_hidden_layers {layers} of {pair.name}",
            "must be 1 for a draft with MLA attention",
            "use a draft of one layer",
            code="draft-layers",
        )
    if not pair.draft.get("q_lora_rank"):
        raise ArgumentFault(
            f"q_lora_rank {pair.draft.get('q_lora_rank')} of {pair.name}",
            "must be a positive number for a draft with MLA attention",
            "use a draft with a compressed query",
            code="draft-layers",
        )


def check_context(pair: Pair) -> None:
    """The draft must know positions as far as the server serves them."""
    served = pair.served_context or context_length(pair.target)
    known = context_length(pair.draft)
    if served is None or known is None or served <= known or pair.allow_longer_context:
        return
    raise ArgumentFault(
        f"context length {known} of {pair.name}",
        f"is shorter than the {served} positions that the server would serve",
        f"give --context-length {known}, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if the draft's rotary "
        "positions hold beyond that",
        code="context",
    )


def check_served_context(
    target: Mapping[str, Any], served: int | None, *, path: str, allow_longer: bool
) -> None:
    """``--context-length`` must be within what the target states."""
    known = context_length(target)
    if served is None or known is None or served <= known or allow_longer:
        return
    raise ArgumentFault(
        f"--context-length {served}",
        f"is more than the {known} positions that {path} states",
        f"give --context-length {known} or less, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if its rotary "
        "positions hold beyond that",
        code="context-target",
    )


def check_dtype_name(pair: Pair) -> None:
    """The dtype that the draft states must be one that can be loaded."""
    name = named_dtype(pair.draft)
    if name is not None and name not in DTYPES:
        raise ArgumentFault(
            f"dtype {name} of {pair.name}",
            f"must be one of {', '.join(sorted(set(DTYPES.values())))}",
            "correct the draft's config.json, or convert its weights",
            code="dtype-name",
        )


RULES: tuple[Callable[[Pair], None], ...] = (
    check_architecture,
    check_numbers,
    check_vocabulary,
    check_width,
    check_heads,
    check_layers,
    check_dtype_name,
    check_packing,
    check_complete,
    check_context,
    check_shapes,
)


def check(pair: Pair) -> list[str]:
    """Apply every rule; returns remarks worth logging.

    Raises:
        ArgumentFault: the first rule that the pair breaks.
    """
    for rule in RULES[:-1]:
        rule(pair)
    remarks = aux_layers.check(pair.target, pair.draft, draft_path=pair.draft_path)
    RULES[-1](pair)
    return remarks
