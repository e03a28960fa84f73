"""Why upstream's resolution ended in an exception, where the target's configuration tells.

Some models are served with a configuration that looks odd, so none of this is asked before upstream has failed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sglang.srt.speculative.arguments import draft
from sglang.srt.speculative.arguments.checkpoint import CONFIG_NAME
from sglang.srt.speculative.arguments.configs import DTYPES, named_dtype, text_config
from sglang.srt.speculative.arguments.faults import ArgumentFault

# Numbers that a language model cannot do without or have less than one of.
_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


def oddity(config: Mapping[str, Any]) -> str | None:
    """What no language model can have, in words that follow "its config.json"; None where nothing is odd."""
    names = config.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        return "names no architectures"
    text = text_config(config)
    for name in _COUNTS:
        value = text.get(name)
        if value is None or isinstance(value, list):  # left to the family, or told layer by layer
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"has {name} {value!r}, where a whole number above 0 belongs"
    dtype = named_dtype(config)
    if dtype is not None and dtype not in DTYPES:
        return f"names dtype {dtype}, and a model has one of {', '.join(sorted(DTYPES))}"
    return None


def explain(
    target: Mapping[str, Any], error: Exception, *, path: str, known: Collection[str] | None, trust: bool
) -> None:
    """A sentence in the place of a traceback; returns where the configuration explains nothing.

    Args:
        target: the configuration.
        error: what upstream ended with.
        path: of the target, as given.
        known: every ``model_type`` that is known; None where packages of the user's own bring others.
        trust: ``--trust-remote-code``.

    Raises:
        ArgumentFault: ``model-type`` or ``config-values``.
    """
    if known is not None:
        draft.check_model_type(target, path=path, known=known, trust_remote_code=trust)
    # A hub or a driver that fails is not the fault of the description.
    odd = None if isinstance(error, (OSError, RuntimeError, ImportError)) else oddity(target)
    if odd is not None:
        raise ArgumentFault(
            f"--model-path {path}",
            f"is unusable: its {CONFIG_NAME} {odd}",
            "correct it, or fetch the model again",
            code="config-values",
        ) from error
