"""The equality bench can fail, and its servers always end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.bench_verify.environment import Environment
from sglang.bench_verify.rows import Results

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"


@pytest.fixture(autouse=True)
def _benchmark_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    yield


class Fake:
    """A server that answers `ids`, and whose float32 log-probabilities are `top`."""

    def __init__(self, ids: list[int], top: list[tuple[float, int, None]] | None = None) -> None:
        self.ids, self.top = ids, top

    def generate(self, prompts: list[list[int]], tokens: int) -> list[Any]:
        from served import Generation

        meta = {"cached_tokens": 2, "spec_correct_drafts_histogram": [1, 0, 3]}
        return [Generation(tuple(self.ids), "", meta) for _ in prompts]

    def post(self, path: str, body: Any) -> Any:
        return {"meta_info": {"output_top_logprobs": [self.top]}}


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    import equality

    return equality.Bench(
        Path("models/nano"),
        Path("models/nano-eagle3"),
        [[1], [2], [3]],
        4,
        tmp_path,
        Results(environments=[Environment()]),
        tmp_path / "rows.json",
    )


def test_equal_answers_pass_and_are_counted(bench: Any) -> None:
    import equality

    equality.measure(bench, equality.FLOAT32[0], Fake([5, 6]), [(5, 6)] * 3, 2)
    assert bench.failures == []
    (row,) = Results.load(bench.out).rows
    assert row.counters["differing_prompts"] == 0
    assert row.counters["cached_tokens"] == 6
    assert row.metrics["accept_length"].value == pytest.approx((1 * 1 + 3 * 3) / 4)


def test_one_other_token_is_a_failure(bench: Any) -> None:
    import equality

    equality.measure(bench, equality.FLOAT32[0], Fake([5, 7]), [(5, 7), (5, 6), (5, 7)], 1)
    assert bench.failures == ["page 1, no prefix cache, batch 1, prompt 1, token 1"]
    assert Results.load(bench.out).rows[0].counters["differing_prompts"] == 1


@pytest.mark.parametrize(
    ("one", "other", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)]
)
def test_first_difference(one: list[int], other: list[int], place: int | None) -> None:
    import equality

    assert equality.first_difference(one, other) == place


@pytest.mark.parametrize(
    ("top", "failures"),
    [
        ([(-0.7, 8, None), (-0.8, 9, None), (-5.0, 1, None)], 0),
        ([(-0.7, 8, None), (-0.9, 9, None), (-5.0, 1, None)], 1),
        ([(-0.7, 8, None), (-0.71, 4, None), (-0.72, 1, None)], 1),
    ],
    ids=["near-tie", "no tie", "another token is near"],
)
def test_a_parting_must_be_a_near_tie(bench: Any, top: list[tuple[float, int, None]], failures: int) -> None:
    import equality

    equality.explain(bench, Fake([], top), [equality.Parting(1, 7, 8, 9, (5,))])
    assert len(bench.failures) == failures


def server(tmp_path: Path, code: str, limit: float) -> Any:
    from served import Served

    fake = Served(Path("model"), tmp_path / "log", start_limit=limit)
    fake.command = [sys.executable, "-c", code]
    return fake


def test_a_server_that_dies_fails_with_the_end_of_its_log(tmp_path: Path) -> None:
    from served import ServerError

    with pytest.raises(ServerError, match=r"status 3(.|\n)*no such draft"):
        server(tmp_path, "print('no such draft'); raise SystemExit(3)", 60.0).start()


def test_a_server_that_never_answers_is_given_up_and_taken_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from served import ServerError

    note = tmp_path / "pid"
    code = f"import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    stuck = server(tmp_path, code, 120.0)

    def no_answer(*_: Any, **__: Any) -> None:
        if note.exists() and note.read_text():  # it runs, and does not mind SIGTERM
            stuck.start_limit = 0.0
        raise OSError("nobody listens")

    monkeypatch.setattr(stuck, "_request", no_answer)
    monkeypatch.setattr("sglang.verify_demo.process.STOP_GRACE", 1.0)
    with pytest.raises(ServerError, match="not healthy after 0 s"):
        stuck.start()
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
