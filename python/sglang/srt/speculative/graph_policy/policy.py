"""The policy of this process, and its refusal to run eager."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.graph_policy.flags import AUTO, FLAG, REQUIRE
from sglang.srt.speculative.graph_policy.reasons import Eager


class VerifyGraphRequired(RuntimeError):
    """A verify would run without its graph on a server that was told never to do that."""

    def __init__(self, why: Eager) -> None:
        super().__init__(
            f"{FLAG} require: a verify cannot replay its graph: {why.text()}; "
            f"change that, or give {FLAG} auto to run such steps eager"
        )
        self.why = why


def mode_of(server_args: Any) -> str:
    """The policy in ``server_args``; ``auto`` where they do not carry it."""
    return str(getattr(server_args, "speculative_verify_graph", AUTO))


def forbid_eager(server_args: Any, why: Eager) -> None:
    """Raise when the policy is ``require``.

    Raises:
        VerifyGraphRequired: always under ``require``.
    """
    if mode_of(server_args) == REQUIRE:
        raise VerifyGraphRequired(why)
