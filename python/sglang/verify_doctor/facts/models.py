"""A target and its draft, as far as their files tell: what they are, how large, and whether they fit together."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from sglang.srt.speculative.arguments import aux_layers, checkpoint, configs, target
from sglang.srt.speculative.arguments.draft import check
from sglang.srt.speculative.arguments.faults import ArgumentFault
from sglang.srt.speculative.arguments.pair import DRAFT_PATH, Pair
from sglang.srt.speculative.arguments.tokenizers import remark

MODEL_PATH = "--model-path"
# What the memory plan and the report need of a configuration; the rest would only make facts long.
KEPT = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "vocab_size",
    "n_routed_experts",
    "num_experts_per_tok",
)


def gather(model: str, draft: str | None) -> dict[str, Any]:
    """``{"target": side, "draft": side or None, "fault": parts or None, "remarks": [...], "captures": [...]}``.

    A side has ``architecture``, ``attention``, ``dtype``, ``quantization``, ``context``, ``weight_bytes`` and
    ``numbers``. A fault is kept as ``value``, ``limit`` and ``remedy``. Names are kept, paths are not.
    """
    facts: dict[str, Any] = {"target": None, "draft": None, "fault": None, "remarks": [], "captures": []}
    try:
        ours = _Side(MODEL_PATH, model, "the model")
        facts["target"] = ours.facts()
        if draft is None:
            return facts
        theirs = _Side(DRAFT_PATH, draft, "the draft")
        facts["draft"] = theirs.facts()
        facts["remarks"] = _fit(ours, theirs, draft)
        facts["captures"] = captures(ours.config, theirs.config)
    except ArgumentFault as fault:
        facts["fault"] = {
            "value": fault.value,
            "limit": fault.limit,
            "remedy": fault.remedy,
            "code": fault.code,
        }
    return facts


class _Side:
    """One checkpoint on this machine's disk."""

    def __init__(self, option: str, path: str, what: str) -> None:
        self.option = option
        self.directory = checkpoint.local_directory(option, path, what=what)
        if self.directory is None:
            raise ArgumentFault(
                f"{option} {path}",
                "is no directory on this machine, and the doctor looks at files only",
                "download it first, and give its directory",
                code="path-remote",
            )
        self.config = checkpoint.read_config(option, self.directory, what=what) or {}

    def facts(self) -> dict[str, Any]:
        """The side as facts."""
        assert self.directory is not None
        text = configs.text_config(self.config)
        return {
            "name": self.directory.name,
            "architecture": configs.architecture(self.config),
            "attention": configs.attention_name(self.config),
            "dtype": configs.named_dtype(self.config),
            "quantization": configs.quantization(self.config),
            "context": configs.context_length(self.config),
            "weight_bytes": checkpoint.weight_bytes(self.directory),
            "numbers": {name: text[name] for name in KEPT if isinstance(text.get(name), int)},
        }


def _fit(ours: _Side, theirs: _Side, draft_path: str) -> list[str]:
    assert ours.directory is not None and theirs.directory is not None
    checkpoint.require_shards(DRAFT_PATH, theirs.directory)
    package = importlib.util.find_spec("sglang")
    if package is not None and package.origin is not None:
        models = Path(package.origin).parent / "srt" / "models"
        target.require_capture(models, configs.architecture(ours.config), path=str(ours.directory.name))
    tensors = checkpoint.read_headers(DRAFT_PATH, theirs.directory)
    remarks = check(Pair(target=ours.config, draft=theirs.config, draft_path=draft_path, tensors=tensors))
    other = remark(ours.directory, theirs.directory, draft_path=draft_path)
    return [*remarks, other] if other else remarks


def captures(target_config: checkpoint.Config, draft_config: checkpoint.Config) -> list[int]:
    """Layers of the target whose input the draft reads; empty where the target's rule is not known."""
    layers = configs.text_config(target_config).get("num_hidden_layers")
    if not aux_layers.uses_aux(draft_config) or not isinstance(layers, int):
        return []
    ids = aux_layers.stated_ids(draft_config)
    if ids is None:
        return aux_layers.default_positions(layers)
    added = aux_layers.shift(target_config, ids)
    return [] if added is None else [i + added for i in ids]
