"""Stand-ins for the ops that have no portable implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["unavailable_op"]


def unavailable_op(name: str) -> Callable[..., Any]:
    """Return a function named `name` that refuses every call.

    Upstream binds many ops at import time that a CPU never calls. They must be importable; calling one
    means that a configuration reached a GPU-only path, which deserves a message that says so.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no portable CPU implementation. Serve this configuration on a GPU with the "
            "sglang-kernel package, or choose one whose layers run on PyTorch (unquantised weights, "
            "--attention-backend torch_native, --sampling-backend pytorch)"
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuses: `{name}` needs the compiled sgl_kernel package."
    return refuse
