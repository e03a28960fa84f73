"""What the switch's runtime tells its controller, and what it says of the last steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.auto import runtime as runtimes
from sglang.srt.speculative.auto.cells import PLAIN, SPECULATE
from sglang.srt.speculative.auto.plain import Stubs
from sglang.srt.speculative.auto.recent import CAUGHT_UP, CHANGED, PREFILLED, STEADY, Recent
from sglang.srt.speculative.auto.rows import RowRing
from sglang.srt.speculative.auto.runtime import OWED, WHOLE, Runtime


class Told:
    """A controller that follows a list of modes and notes what it is told."""

    def __init__(self, modes: str) -> None:
        self.modes = [PLAIN if letter == "p" else SPECULATE for letter in modes]
        self.heard: list[tuple[str, float]] = []

    def at_epoch(self) -> bool:
        return False

    def choose(self, batch: int, context: int) -> str:
        return self.modes.pop(0)

    def took(self, mode: str, batch: int, context: int, ms: float) -> None:
        self.heard.append((mode, round(ms, 6)))

    def drain(self) -> list[Any]:
        return []


class Request:
    def __init__(self) -> None:
        self.origin_input_ids, self.output_ids = [1] * 8, [1]
        setattr(self, WHOLE, True)


@pytest.fixture
def lived(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps of a runtime whose clock the test moves; rows owed are written by nobody."""

    def live(modes: str, events: dict[int, str], times: list[float], span: int = 128) -> Runtime:
        now = [0.0]
        monkeypatch.setattr(runtimes, "time", SimpleNamespace(perf_counter=lambda: now[0] / 1e3))
        monkeypatch.setattr(runtimes.catch_up, "write_rows", lambda *args: sum(args[-1]))
        monkeypatch.setattr(runtimes.catch_up, "seed", lambda *args: None)
        ranks = SimpleNamespace(
            ps=SimpleNamespace(tp_rank=0), req_to_token_pool=SimpleNamespace(req_to_token=None)
        )
        worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=ranks), draft_worker=None)
        monkeypatch.setattr(runtimes, "as_draft", lambda draft: __import__("contextlib").nullcontext())
        found = Runtime(
            worker, RowRing(2, span, 1, torch.float32, "cpu"), Stubs(1, None, torch.float32, "cpu"), None,
            Told(modes),  # type: ignore[arg-type]
        )  # fmt: skip
        info = SimpleNamespace(penalizer_orchestrator=None, has_custom_logit_processor=False)
        batch = SimpleNamespace(
            reqs=[Request()], sampling_info=info, has_grammar=False, return_logprob=False,
            return_hidden_states=False,
        )  # fmt: skip
        for index, ms in enumerate(times):
            if events.get(index) == "prefill":
                found.cut()
            if found.choose(batch) == PLAIN:
                found.before_plain(batch, None)
            else:
                found.before_cycle(batch, None)
            now[0] += ms
        return found

    return live


def kinds(runtime: Runtime) -> list[tuple[str, str, int]]:
    return [(group["mode"], group["kind"], group["steps"]) for group in runtime.recent.summary()]


def test_a_step_that_waited_for_a_prefill_is_no_figure_of_its_mode(lived: Any) -> None:
    """The first step behind a prefill lasts as long as what is left of it: 40 ms at 16k, where a step takes 2."""
    times = [40.0, 2.0, 2.0, 2.0, 40.0, 2.0, 2.0]
    found = lived("ppppppp", {0: "prefill", 4: "prefill"}, times)
    # The last step before a prefill has no successor, so it has no time either.
    assert found.controller.heard == [(PLAIN, 2.0)] * 3
    assert (PLAIN, PREFILLED, 2) in kinds(found)


def test_steps_are_told_apart_by_what_they_were(lived: Any) -> None:
    """A change of mode marks two steps; rows written mark the step that wrote them and the one after."""
    found = lived("s" * 4 + "p" * 12 + "s" * 4, {}, [2.0] * 20, span=4)
    # The ring holds four rows: the fifth and the ninth plain step write first.
    assert kinds(found) == [
        (PLAIN, CAUGHT_UP, 4),
        (PLAIN, CHANGED, 2),
        (PLAIN, STEADY, 6),
        (SPECULATE, CHANGED, 2),
        (SPECULATE, PREFILLED, 1),
        (SPECULATE, STEADY, 4),
    ]


def test_rows_are_written_when_the_ring_is_full_and_not_before(lived: Any) -> None:
    found = lived("p" * 128, {}, [2.0] * 128)
    assert not any(kind == CAUGHT_UP for _, kind, _ in kinds(found))
    found = lived("p" * 130, {}, [2.0] * 130)
    assert any(kind == CAUGHT_UP for _, kind, _ in kinds(found))


def test_owed_rows_are_counted_by_request(lived: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owed: list[int] = []
    real = Runtime.before_plain

    def before_plain(self: Runtime, batch: Any, on_publish: Any) -> None:
        real(self, batch, on_publish)
        owed.append(int(getattr(batch.reqs[0], OWED)))

    monkeypatch.setattr(Runtime, "before_plain", before_plain)
    lived("p" * 10, {}, [2.0] * 10, span=4)
    assert owed == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_recent_keeps_the_last_steps_only() -> None:
    recent = Recent(kept=4)
    assert recent.summary() == []
    for ms in (100.0, 1.0, 2.0, 3.0, 6.0):
        recent.add(PLAIN, STEADY, ms)
    (group,) = recent.summary()
    assert group == {
        "mode": PLAIN,
        "kind": STEADY,
        "steps": 4,
        "median_ms": 2.5,
        "mean_ms": 3.0,
        "worst_ms": 6.0,
    }
