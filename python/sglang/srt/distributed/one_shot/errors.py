"""Errors of the one-shot all-reduce; each says what is wrong, where, and what to do about it."""

from __future__ import annotations


class OneShotError(RuntimeError):
    """Anything that keeps the one-shot all-reduce from working; the communicator answers with NCCL."""


class NotBuilt(OneShotError):
    """No compiled kernels for this device, and none could be compiled; the text says why."""


class SharingFailed(OneShotError):
    """Buffers could not be shared between two ranks by any method; the text names ranks and methods."""


class Unsupported(ValueError):
    """A call outside what the kernels do (dtype, shape, layout, number of ranks). Raised before any launch."""


class PeerTimeout(OneShotError):
    """A bounded wait ran out, or was aborted: the workspace must not be used again.

    Attributes:
        rank: who waited.
        peer: who did not publish.
        workspace: name of the workspace.
        channel: index of the protocol instance.
        stage: 0, or 1 for the second round of the two-stage variant.
        epoch: value of a flag, or epoch of a packet, that was awaited.
        seen: what was found there at the end.
        aborted: the wait was ended by the host and not by the clock.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        workspace: str,
        *,
        channel: int = 0,
        stage: int = 0,
        epoch: int = 0,
        seen: int = 0,
        aborted: bool = False,
    ) -> None:
        self.rank, self.peer, self.workspace = rank, peer, workspace
        self.channel, self.stage, self.epoch, self.seen, self.aborted = channel, stage, epoch, seen, aborted
        why = "was aborted by the host" if aborted else "ran out of time"
        super().__init__(
            f"all-reduce: rank {rank} waited for rank {peer} and {why} "
            f"(workspace {workspace}, channel {channel}, stage {stage}, epoch {epoch}, seen {seen})"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (dict(self.__dict__),)


def _rebuild(state: dict[str, object]) -> PeerTimeout:
    error = PeerTimeout.__new__(PeerTimeout)
    RuntimeError.__init__(error, "")
    names = ("channel", "stage", "epoch", "seen", "aborted")
    PeerTimeout.__init__(
        error,
        state["rank"],  # type: ignore[arg-type]
        state["peer"],  # type: ignore[arg-type]
        str(state["workspace"]),
        **{name: state[name] for name in names},  # type: ignore[arg-type]
    )
    return error
