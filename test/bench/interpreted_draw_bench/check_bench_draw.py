"""The bench of the draw without a GPU: its whole run with interpreted kernels of ours and a stand-in for sgl_kernel."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmark"
WIDTH = 3


def renormalised(probabilities: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    kept = torch.where(keep, probabilities, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_k(probabilities: torch.Tensor, values: torch.Tensor, *unused: Any) -> torch.Tensor:
    assert values.shape == probabilities.shape[:1] and values.dtype == torch.int32
    rank = probabilities.argsort(-1, descending=True).argsort(-1)
    return renormalised(probabilities, rank < values.unsqueeze(1))


def top_p(probabilities: torch.Tensor, values: torch.Tensor, *unused: Any) -> torch.Tensor:
    assert values.shape == probabilities.shape[:1] and values.dtype == torch.float32
    ordered, token = probabilities.sort(-1, descending=True)
    keep = torch.zeros_like(probabilities, dtype=torch.bool)
    return renormalised(
        probabilities, keep.scatter_(1, token, ordered.cumsum(-1) - ordered < values.unsqueeze(1))
    )


def walk(**given: torch.Tensor) -> None:
    """Keep a draft where its variate is below the target's probability; shapes and types as the kernel asks for them."""
    batch = given["candidates"].shape[0]
    for name in ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling"):
        assert given[name].shape == (batch, WIDTH) and given[name].dtype == torch.int64, name
    for name in ("target_probs", "draft_probs"):
        assert given[name].dim() == 3 and given[name].dtype == torch.float32, name
    assert not given["draft_probs"].any()
    for name in ("predicts", "accept_index", "accept_token_num"):
        assert given[name].dtype == torch.int32, name
    sums = given["target_probs"].sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
    given["predicts"].fill_(7)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    sampling = SimpleNamespace(
        top_k_renorm_prob=top_k,
        top_p_renorm_prob=top_p,
        _top_k_renorm_probs_internal=top_k,
        _top_p_renorm_probs_internal=top_p,
        _has_flashinfer=False,
    )
    kernel = SimpleNamespace(sampling=sampling, tree_speculative_sampling_target_only=walk)
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import bench_draw

    monkeypatch.setitem(sys.modules, "sgl_kernel", kernel)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "sgl_kernel.sampling", sampling)  # type: ignore[arg-type]
    monkeypatch.setattr(bench_draw, "copy_bandwidth", lambda: 4.0)
    monkeypatch.setattr(bench_draw.draw_kernel, "COLUMNS", 256)

    def timed(us: float) -> Callable[..., list[float]]:
        def run(work: Callable[[], torch.Tensor], calls: int, repeats: int) -> list[float]:
            assert calls > 0
            return [us] * repeats

        return run

    monkeypatch.setattr(bench_draw, "time_us", timed(10.0))
    monkeypatch.setattr(bench_draw, "eager_us", timed(40.0))
    yield bench_draw


def run(bench: ModuleType, out: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    """Status and the rows; one tile of the kernel and a bit, so that both of its loops turn."""
    status = bench.main(["--vocabulary", "300", "--batches", "1,2", "--out", str(out), *more], device="cpu")
    return status, json.loads(out.read_text(encoding="utf-8"))["rows"]


def test_rows_of_every_case(bench: ModuleType, tmp_path: Path) -> None:
    status, rows = run(bench, tmp_path / "rows.json")
    assert status == 0 and rows.pop(0)["bench"] == "copy"
    names = ["accept", "draw", "upstream", "upstream-aot"]
    found = [(row["case"]["filters"], row["case"]["batch"], row["case"]["work"]) for row in rows]
    assert found == [
        (filters.name, batch, name)
        for filters in bench.FILTERS
        for batch in (1, 2)
        for name in (names if filters.renormalises else names[:3])
    ]
    accept = rows[0]["metrics"]
    assert next(iter(accept)) == "us_over_upstream"
    assert accept["us_over_upstream"]["value"] == 1.0 and accept["us_over_eager_upstream"]["value"] == 0.25
    assert rows[0]["counters"]["bytes"] == 3 * 300 * 4
    assert accept["tb_s"]["value"] == pytest.approx(3 * 300 * 4 / 10 / 1e6)
    assert accept["share_of_copy"]["value"] == pytest.approx(accept["tb_s"]["value"] / 4)
    upstream = rows[2]
    assert upstream["variant"] == "upstream" and upstream["note"] == "renormalised by sgl_kernel"
    assert not any("over" in name for name in upstream["metrics"])


def test_a_rival_that_cannot_run_leaves_the_others_their_rows(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*unused: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(sys.modules["sgl_kernel.sampling"], "top_k_renorm_prob", broken)
    status, rows = run(bench, tmp_path / "rows.json", "--batches", "1")
    assert status == 1 and "FAILED upstream, batch 1, top-k 50, top-p 0.95" in capsys.readouterr().err
    ours = [
        row for row in rows if row["case"].get("filters") == "top-k 50" and row["case"]["work"] == "accept"
    ]
    assert all("us_over_upstream" not in row["metrics"] for row in ours)
    assert all("us_over_upstream-aot" in row["metrics"] for row in ours) and len(ours) == 1


def test_no_time_left_is_said(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run(bench, tmp_path / "rows.json", "--limit", "-1")
    assert status == 1 and [row["bench"] for row in rows] == ["copy"]
    assert "left out after -1.0 s: batch 1" in capsys.readouterr().err


def test_the_accept_step_keeps_drafts_that_equal_the_draw(bench: ModuleType) -> None:
    """Nearly greedy, every draft is the target's favourite but the last, and the walk follows them to the end."""
    cold = bench.Filters("cold", temperature=0.01)
    case = bench.make_case(2, 300, cold, "cpu")
    tokens = bench.fork_works(case)["accept"]()().view(2, WIDTH)
    favourites = case.logits.argmax(-1).view(2, WIDTH)
    assert torch.equal(tokens.long(), favourites)
    case.candidates[1, 1] = (case.candidates[1, 1] + 1) % 300
    tokens = bench.fork_works(case)["accept"]()().view(2, WIDTH)
    assert torch.equal(tokens[0].long(), favourites[0]) and tokens[1, 0] == favourites[1, 0]


def test_tokens_outside_of_top_k_are_counted(bench: ModuleType) -> None:
    """Negative control."""
    case = bench.make_case(1, 300, bench.Filters("top-k", top_k=5), "cpu")
    order = case.logits.argsort(-1, descending=True)
    assert bench.outside(case, order[:, 4]) == 0 and bench.outside(case, order[:, 5]) == 3
