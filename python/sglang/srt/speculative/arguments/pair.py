"""A target and a draft side by side: what the rules about them read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.speculative.arguments.checkpoint import TensorHeader

DRAFT_PATH = "--speculative-draft-model-path"


@dataclass(frozen=True)
class Pair:
    """A target and a draft side by side.

    Attributes:
        target: the target's configuration, wrapper included.
        draft: the draft's configuration.
        draft_path: as the user wrote it, for messages.
        tensors: headers of the draft's tensors by name; None where they cannot be read.
        attention_ranks: ranks that attention heads are divided over.
        served_context: positions that the server will serve; None for what the target states.
        allow_longer_context: the user's environment lets a context exceed what a model states.
        own_architectures: the user registered model classes of their own, so names prove nothing.
    """

    target: Mapping[str, Any]
    draft: Mapping[str, Any]
    draft_path: str
    tensors: Mapping[str, TensorHeader] | None = None
    attention_ranks: int = 1
    served_context: int | None = None
    allow_longer_context: bool = False
    own_architectures: bool = False
    name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"draft {self.draft_path}")

    def tensor(self, ending: str) -> TensorHeader | None:
        """The draft's tensor of that name, or whose name ends in it; None if absent or unknown."""
        for name, header in (self.tensors or {}).items():
            if name == ending or name.endswith(f".{ending}"):
                return header
        return None
