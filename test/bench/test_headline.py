"""The headline follows from the rows, and the README's tables follow from the headline."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.bench_verify import headline, tables
from sglang.bench_verify.environment import Environment
from sglang.bench_verify.rows import Metric, Results, Row


def slice_row(variant: str, context: int, tokens: int, ms: float, started: str = "2026-02-01") -> Row:
    """A row of the slice: decode where ``tokens`` is 0."""
    name = "cycle_ms" if tokens else "decode_ms"
    case = {"context": context, "batch": 1, "draft_tokens": tokens, "backend": "triton"}
    return Row("slice", "h200", variant, case, {name: Metric.of([ms], "ms")}, started=started)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Results of two files: upstream, and the fork in which one figure was measured twice."""
    upstream, fork = Results([Environment()]), Results([Environment()])
    for context, decode, cycle in ((1024, 1.9, 6.0), (65536, 3.0, 156.0)):
        upstream.add(slice_row("upstream", context, 0, decode))
        upstream.add(slice_row("upstream", context, 3, cycle))
    fork.add(slice_row("fork", 1024, 3, 9.0, started="2026-01-01"))
    fork.add(slice_row("fork", 1024, 0, 1.5))
    fork.add(slice_row("fork", 1024, 3, 2.4))
    upstream.save(tmp_path / "a_upstream.json")
    fork.save(tmp_path / "b_fork.json")
    return tmp_path


def test_names_ratio_and_row(directory: Path) -> None:
    figures = headline.build(headline.collect(directory))
    assert figures["h200.slice.cycle_ms.1k"] == {
        "value": 2.4,
        "unit": "ms",
        "upstream": 6.0,
        "ratio": 2.5,
        "row": "b_fork.json#2",
    }
    over = figures["h200.slice.cycle_over_decode.1k"]
    assert (over["value"], over["upstream"], over["unit"]) == (1.6, round(6.0 / 1.9, 3), "ratio")


def test_the_figure_measured_last_wins_whatever_the_order_in_the_file(directory: Path) -> None:
    results = Results.load(directory / "b_fork.json")
    results.rows.reverse()
    results.save(directory / "b_fork.json")
    assert headline.build(headline.collect(directory))["h200.slice.cycle_ms.1k"]["value"] == 2.4


def test_a_run_of_both_goes_before_a_later_one_of_the_fork_alone(directory: Path) -> None:
    both, alone = Results([Environment()]), Results([Environment()])
    for variant, ms in (("upstream", 5.0), ("fork", 2.5)):
        both.add(slice_row(variant, 1024, 3, ms, started="2026-03-01"))
    alone.add(slice_row("fork", 1024, 3, 2.0, started="2026-04-01"))
    both.save(directory / "c_both.json")
    alone.save(directory / "d_alone.json")
    figure = headline.build(headline.collect(directory))["h200.slice.cycle_ms.1k"]
    assert (figure["value"], figure["upstream"], figure["row"]) == (2.5, 5.0, "c_both.json#1")


def test_an_engine_with_a_setting_of_its_own_is_not_the_fork(directory: Path) -> None:
    results, tried = Results([Environment()]), slice_row("fork", 1024, 3, 0.1, started="2026-05-01")
    tried.case["engine"] = "fork-eagle3-with-NAME=1"
    results.add(tried)
    results.save(directory / "e_tried.json")
    assert headline.build(headline.collect(directory))["h200.slice.cycle_ms.1k"]["value"] == 2.4


def test_a_figure_only_upstream_has_is_not_ours_to_quote(directory: Path) -> None:
    assert "h200.slice.cycle_ms.64k" not in headline.build(headline.collect(directory))


def test_rates_count_the_other_way() -> None:
    rule = headline.Rule("{machine}.demo.tok_s", "demo", "tok_s", lower_is_better=False)
    rows = [
        headline.Source(
            "f.json", index, Row("demo", "cpu", variant, {}, {"tok_s": Metric(value, "tok/s")}), ""
        )
        for index, (variant, value) in enumerate((("fork", 30.0), ("upstream", 20.0)))
    ]
    assert headline.build(rows, [rule])["cpu.demo.tok_s"]["ratio"] == 1.5


def test_tables_are_replaced_between_markers_only(directory: Path) -> None:
    headline.write(directory)
    text = "before\n<!-- table: slice -->\nstale\n<!-- /table -->\nafter\n"
    new = tables.update(text, headline.load(directory))
    assert new.startswith("before\n") and new.endswith("after\n")
    assert "stale" not in new and "| h200 | 1k | 1.9 | 1.5 | 6 | 2.4 |" in new
    assert tables.update(new, headline.load(directory)) == new


def test_a_stale_table_fails_the_check(directory: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: slice -->\n1.0\n<!-- /table -->\n")
    figures = headline.build(headline.collect(directory))
    assert not tables.update_file(readme, figures, check=True)
    assert "1.0" in readme.read_text()
    assert not tables.update_file(readme, figures)
    assert tables.update_file(readme, figures, check=True)


def test_an_unknown_table_is_named() -> None:
    with pytest.raises(tables.TableError, match="slise"):
        tables.update("<!-- table: slise -->\n<!-- /table -->\n", {})


def test_the_repository_headline_follows_from_its_rows() -> None:
    directory = Path(__file__).resolve().parents[2] / "benchmark" / "results"
    assert headline.load(directory) == headline.build(headline.collect(directory))


def test_draft_lengths_are_a_series_of_their_own(tmp_path: Path) -> None:
    results = Results([Environment()])
    for width, ms in ((0, 2.0), (2, 2.4), (3, 2.9), (5, 4.0)):
        name = "cycle_ms" if width else "decode_ms"
        case = {
            "context": 1024,
            "batch": 4,
            "draft_tokens": width,
            "router": "random",
            "series": "draft-lengths",
        }
        results.add(Row("slice", "h200", "fork", case, {name: Metric(ms, "ms")}))
    results.save(tmp_path / "rows.json")
    headline.write(tmp_path)
    figures = headline.load(tmp_path)
    assert set(figures) == {
        "h200.draft_length.decode_ms.1k.b4",
        *(f"h200.draft_length.cycle_ms.1k.b4.d{width}" for width in (2, 3, 5)),
    }
    # 1 + 0.64 kept at 2.4 ms, 2.0 at 2.9, 2.31 at 4.0, against one token in 2.0.
    line = "| h200 | 1k | 4 | 2 | 2.4 (1.20x) | 2.9 (1.45x) | - | 4 (2.00x) | 2 (1.38x) |"
    assert line in tables.draft_length_table(figures)


def test_the_switch_has_a_table_by_engine(tmp_path: Path) -> None:
    results = Results([Environment()])
    for context, plain in ((16384, 2.0), (1024, 1.6)):
        for engine, ms in (("decode", plain), ("auto-1.0", 1.05 * plain), ("auto-2.5", 0.5 * plain)):
            if (context, engine) == (1024, "auto-2.5"):
                continue
            case = {"context": context, "batch": 2, "draft_tokens": 3, "engine": engine}
            metrics = {"token_ms": Metric(ms, "ms")}
            if engine != "decode":
                metrics["over_plain_decode"] = Metric(ms / plain, "ratio")
            results.add(Row("speculative_auto", "h200", "fork", case, metrics))
    results.save(tmp_path / "rows.json")
    headline.write(tmp_path)
    lines = tables.auto_table(headline.load(tmp_path)).splitlines()
    assert lines[2:] == [
        "| h200 | 1k | 2 | 1.6 | 1.68 (1.05x) | - |",
        "| h200 | 16k | 2 | 2 | 2.1 (1.05x) | 1 (0.5x) |",
    ]
