"""What upstream takes for a draft: its attention backends, and whether its extend is captured."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

# Class of each backend's draft-extend side, as upstream's factory builds it; the gate of its graph names classes.
EXTEND_CLASSES = {
    "triton": "TritonAttnBackend",
    "flashinfer": "FlashInferAttnBackend",
    "flashinfer MLA": "FlashInferMLAAttnBackend",
    "fa3": "FlashAttentionBackend",
    "fa4": "FlashAttentionBackend",
    "flashmla": "FlashMLABackend",
    "trtllm_mla": "TRTLLMMLABackend",
    "cutedsl_mla": "TRTLLMMLABackend",
    "trtllm_mha": "TRTLLMHAAttnBackend",
    "tokenspeed_mla": "TokenspeedMLABackend",
}


def draft_backend(args: Any, kind: str) -> tuple[str | None, str]:
    """The backend that upstream's factory takes for the draft's ``decode`` or ``draft_extend``, or its refusal."""
    if str(args.device) == "cpu":
        return str(args.speculative_draft_attention_backend or args.attention_backend), ""
    module: Any = importlib.import_module("sglang.srt.speculative.draft_utils")
    factory = module.DraftBackendFactory
    probe = factory(args, None, int(args.speculative_eagle_topk or 1), int(args.speculative_num_steps or 1))
    taken: list[str] = []

    def create(backend_name: str, backend_map: dict[str, Any], error_template: str) -> None:
        """Upstream's choice among the backends, with a note in place of each one's construction."""
        notes = {name: functools.partial(taken.append, name) for name in backend_map}
        factory._create_backend(probe, backend_name, notes, error_template)

    probe._create_backend = create
    # The factory asks the running process for its settings, and the draft's model for what it needs.
    stand_ins = {
        "get_spec": lambda: args,
        "_assert_draft_needs_no_conv_sidecar": lambda *_: None,
    }
    kept = {name: getattr(module, name) for name in stand_ins if hasattr(module, name)}
    try:
        for name in kept:
            setattr(module, name, stand_ins[name])
        method = probe.create_decode_backend if kind == "decode" else probe.create_draft_extend_backend
        inspect.unwrap(method.__func__)(probe)
    except ValueError as error:
        return None, str(error)
    except Exception as error:
        if not taken:
            return None, f"not known ({type(error).__name__}: {error})"
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
    return (taken[0] if taken else None), ""


def graph_classes() -> frozenset[str]:
    """Classes that upstream captures a draft-extend graph for, read from the source of its gate."""
    import sglang

    # The file is read, not imported: it wants modules that only a GPU machine has.
    file = Path(str(sglang.__file__)).parent / "srt" / "speculative" / "eagle_worker_v2.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_gate(node.targets[0]) and isinstance(node.value, ast.List):
            found |= {entry.id for entry in node.value.elts if isinstance(entry, ast.Name)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_gate(node.func.value):
            found |= {entry.id for entry in node.args if isinstance(entry, ast.Name)}
    return frozenset(found)


def _is_gate(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "graph_supported_backend_types"
