"""Rules about the draft's stored tensors: how they are packed, whether all are there, which shapes they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.speculative.arguments import aux_layers
from sglang.srt.speculative.arguments.configs import is_mla, quantization
from sglang.srt.speculative.arguments.faults import ArgumentFault
from sglang.srt.speculative.arguments.pair import DRAFT_PATH, Pair

PLAIN_DTYPES = frozenset({"BF16", "F16", "F32"})
PACKED_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".qzeros")


def check_packing(pair: Pair) -> None:
    """Packed weights need a configuration that says how they are packed; MLA needs one matrix unpacked."""
    if quantization(pair.draft) is None:
        for name in pair.tensors or ():
            if name.endswith(PACKED_SUFFIXES):
                raise ArgumentFault(
                    f"tensor {name} of {pair.name}",
                    "is quantised, but its config.json has no quantization_config",
                    "use a checkpoint whose config.json belongs to its weights",
                    code="packing",
                )
    if pair.tensors is None or not is_mla(pair.draft):
        return
    # Absorbed attention splits this matrix in two when it is loaded, which works on plain numbers only.
    split = pair.tensor("self_attn.kv_b_proj.weight")
    if split is None or split.dtype not in PLAIN_DTYPES:
        raise ArgumentFault(
            f"self_attn.kv_b_proj of {pair.name}",
            f"must be stored as {', '.join(sorted(PLAIN_DTYPES))}, not {split.dtype if split else 'packed or left out'}",
            "use a draft whose kv_b_proj is not quantised",
            code="packing",
        )


def check_complete(pair: Pair) -> None:
    """Weights that the checkpoint lacks would stay as memory happened to be: the draft then accepts nothing."""
    if pair.tensors is None or quantization(pair.draft) is not None:
        return
    needed = ["norm.weight", "hidden_norm.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"]
    if pair.draft.get("draft_vocab_size") is not None and not pair.draft.get("tie_word_embeddings"):
        needed.append("lm_head.weight")
    absent = [name for name in needed if pair.tensor(name) is None]
    if absent:
        raise ArgumentFault(
            f"{DRAFT_PATH} {pair.draft_path}",
            f"is incomplete: its weights lack {', '.join(absent)}",
            "use a complete checkpoint",
            code="draft-incomplete",
        )


def expected_shapes(draft: Mapping[str, Any], reduced_vocabulary: int | None) -> dict[str, tuple[int, ...]]:
    """Shapes of the draft's tensors by name ending, ``(rows, columns)``, as its configuration implies them."""
    hidden = draft.get("hidden_size")
    heads = draft.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return {}
    taken = draft.get("target_hidden_size") or hidden
    shapes: dict[str, tuple[int, ...]] = {}
    if aux_layers.uses_aux(draft):
        shapes["fc.weight"] = (hidden, taken * aux_layers.count(draft))
    if isinstance(draft.get("vocab_size"), int):
        shapes["embed_tokens.weight"] = (draft["vocab_size"], hidden)
    if reduced_vocabulary is not None:
        shapes["lm_head.weight"] = (reduced_vocabulary, hidden)
    if is_mla(draft):
        rope, value = draft["qk_rope_head_dim"], draft.get("v_head_dim")
        shapes["self_attn.kv_a_proj_with_mqa.weight"] = (draft["kv_lora_rank"] + rope, 2 * hidden)
        if isinstance(draft.get("q_lora_rank"), int):
            shapes["self_attn.q_a_proj.weight"] = (draft["q_lora_rank"], 2 * hidden)
        if isinstance(value, int):
            shapes["self_attn.o_proj.weight"] = (hidden, heads * value)
            if isinstance(draft.get("qk_nope_head_dim"), int):
                rows = heads * (draft["qk_nope_head_dim"] + value)
                shapes["self_attn.kv_b_proj.weight"] = (rows, draft["kv_lora_rank"])
        return shapes
    width = draft.get("head_dim") or hidden // heads
    shared = draft.get("num_key_value_heads") or heads
    shapes["self_attn.q_proj.weight"] = (heads * width, 2 * hidden)
    shapes["self_attn.k_proj.weight"] = (shared * width, 2 * hidden)
    shapes["self_attn.v_proj.weight"] = (shared * width, 2 * hidden)
    shapes["self_attn.o_proj.weight"] = (hidden, heads * width)
    return shapes


def check_shapes(pair: Pair) -> None:
    """Tensors must have the shapes that the configuration implies (heads, head size, width, vocabulary)."""
    if pair.tensors is None:
        return
    if aux_layers.uses_aux(pair.draft) and not any("fc." in name for name in pair.tensors):
        raise ArgumentFault(
            f"{DRAFT_PATH} {pair.draft_path}",
            "is no EAGLE-3 draft: its weights hold no fc projection of the target's hidden states",
            "give a checkpoint trained as an EAGLE-3 draft",
            code="draft-fc",
        )
    reduced = pair.draft.get("draft_vocab_size")
    # More layers than one repeat the names with the plain width, so attention is then left to the loader.
    single = pair.draft.get("num_hidden_layers", 1) == 1
    for ending, shape in expected_shapes(pair.draft, reduced).items():
        header = pair.tensor(ending)
        if (
            header is None
            or header.dtype not in PLAIN_DTYPES
            or (ending.startswith("self_attn.") and not single)
        ):
            continue
        if header.shape != shape:
            raise ArgumentFault(
                f"{ending} of shape {list(header.shape)} in {pair.name}",
                f"must be {list(shape)} by its config.json (hidden size, heads, head size, auxiliary layers, "
                "vocabulary)",
                "use a checkpoint whose config.json belongs to its weights",
                code="shape",
            )
