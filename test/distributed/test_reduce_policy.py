"""The table that says who reduces: measured, shipped, forced, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.srt.distributed.one_shot import table_file
from sglang.srt.distributed.one_shot.policy import (
    FUSED,
    MARGIN,
    ONE_SHOT,
    PLAIN,
    STOCK,
    TWO_STAGE,
    Key,
    Point,
    Table,
    forced,
    from_measurements,
    shipped,
)

KEY = Key("NVIDIA RTX PRO 6000", "PXB", 8, "580.95.05")
TOKEN = 14_336  # one token of hidden size 7168 in bf16
MEASURED = from_measurements(
    KEY,
    [
        Point(PLAIN, 1, TOKEN, {ONE_SHOT: 9.0, TWO_STAGE: 14.0, STOCK: 24.0}),
        Point(PLAIN, 3, 3 * TOKEN, {ONE_SHOT: 17.0, TWO_STAGE: 18.0, STOCK: 26.0}),
        Point(PLAIN, 6, 6 * TOKEN, {ONE_SHOT: 31.0, TWO_STAGE: 25.0, STOCK: 29.0}),
        Point(PLAIN, 24, 24 * TOKEN, {ONE_SHOT: 99.0, TWO_STAGE: 60.0, STOCK: 45.0}),
        Point(FUSED, 3, 3 * TOKEN, {ONE_SHOT: 18.0, STOCK: 31.0}),
    ],
    "measured here",
)


@pytest.mark.parametrize(
    ("kind", "size", "method"),
    [
        (PLAIN, 16, ONE_SHOT),
        (PLAIN, TOKEN, ONE_SHOT),
        (PLAIN, TOKEN + 2, ONE_SHOT),
        (PLAIN, 3 * TOKEN, ONE_SHOT),
        (PLAIN, 3 * TOKEN + 2, TWO_STAGE),
        (PLAIN, 6 * TOKEN, TWO_STAGE),
        (PLAIN, 7 * TOKEN, STOCK),
        (PLAIN, 24 * TOKEN, STOCK),
        (PLAIN, 25 * TOKEN, STOCK),
        (FUSED, 3 * TOKEN, ONE_SHOT),
        (FUSED, 4 * TOKEN, STOCK),
    ],
)
def test_measured(kind: str, size: int, method: str) -> None:
    choice = MEASURED.choose(kind, size)
    assert choice.method == method
    assert choice.measured and "measured here" in choice.reason


def test_crossover() -> None:
    assert MEASURED.crossover(PLAIN) == 6 * TOKEN
    assert MEASURED.crossover(FUSED) == 3 * TOKEN


def test_a_tie_stays_with_stock() -> None:
    """Within the margin two repeats of one method differ as much: no reason to leave the known path."""
    near = from_measurements(
        KEY, [Point(PLAIN, 1, TOKEN, {ONE_SHOT: 24 * (1 - MARGIN / 2), STOCK: 24.0})], "t"
    )
    assert near.choose(PLAIN, TOKEN).method == STOCK


@pytest.mark.parametrize(
    ("link", "ranks", "limit"),
    [
        ("PIX", 2, 65_536),
        ("PXB", 8, 49_152),
        ("PHB", 4, 49_152),
        ("NODE", 8, 16_384),
        ("SYS", 8, 16_384),
        ("NV", 2, 0),
        ("unknown", 8, 0),
        ("same", 2, 0),
        ("cpu", 2, 0),
    ],
)
def test_shipped_default(link: str, ranks: int, limit: int) -> None:
    table = shipped(Key("any", link, ranks, ""))
    assert table.crossover(PLAIN) == table.crossover(FUSED) == limit
    assert table.choose(PLAIN, limit + 1).method == STOCK
    assert "shipped default" in table.choose(PLAIN, 1).reason
    if limit:
        assert "not measured here" in table.choose(PLAIN, limit).reason
        assert not table.choose(PLAIN, limit).measured


def test_three_tokens_of_kimi_go_one_shot_behind_switches() -> None:
    """A verify of 3 tokens is what the fork is for: 43,008 bytes on 8 GPUs behind switches."""
    assert shipped(KEY).choose(PLAIN, 43_008).method == ONE_SHOT


@pytest.mark.parametrize("method", [ONE_SHOT, TWO_STAGE])
def test_forced(method: str) -> None:
    assert forced(KEY, method).choose(FUSED, 64 * 8192 * 2).method == method
    with pytest.raises(ValueError, match="not one of"):
        forced(KEY, STOCK)


def test_a_table_goes_through_its_file(tmp_path: Path) -> None:
    path = table_file.default_path(KEY, tmp_path)
    table_file.save(MEASURED, path, "2026-01-01")
    found, why = table_file.find(KEY, str(path))
    assert why == ""
    assert found.points == MEASURED.points
    assert found.origin == "measured here 2026-01-01"
    assert not list(path.parent.glob("*.part"))


@pytest.mark.parametrize("table", [MEASURED, shipped(KEY), forced(KEY)])
def test_rank_0_sends_its_table_as_json(table: Table) -> None:
    assert table_file.from_document(json.loads(json.dumps(table_file.to_document(table)))) == table


@pytest.mark.parametrize(
    "other",
    [
        Key("NVIDIA H200", "PXB", 8, "580.95.05"),
        Key("NVIDIA RTX PRO 6000", "SYS", 8, "580.95.05"),
        Key("NVIDIA RTX PRO 6000", "PXB", 4, "580.95.05"),
        Key("NVIDIA RTX PRO 6000", "PXB", 8, "590.1"),
    ],
)
def test_a_table_of_another_machine_is_not_used(tmp_path: Path, other: Key) -> None:
    """flashinfer#4393: a tuning table that misses silently costs speed and tells nobody; ours says what differs."""
    path = tmp_path / "table.json"
    table_file.save(MEASURED, path)
    found, why = table_file.find(other, str(path))
    assert found == shipped(other)
    assert "measured on another machine" in why and "here" in why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Expecting value"),
        ("{}", "schema is not"),
        ('{"schema": "all-reduce-table/1"}', "KeyError"),
        ("[]", "schema is not"),
    ],
)
def test_a_broken_file_is_named_and_not_used(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text, encoding="utf-8")
    found, why = table_file.find(KEY, str(path))
    assert found == shipped(KEY)
    assert str(path) in why and expected in why


def test_without_a_file_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, why = table_file.find(KEY)
    assert found == shipped(KEY)
    assert "bench_all_reduce --write" in why


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], "at least one"),
        ([Point(PLAIN, 1, 16, {ONE_SHOT: 1.0})], "no figure of stock"),
        ([Point("sum", 1, 16, {STOCK: 1.0})], "kind"),
        ([Point(PLAIN, 1, 16, {STOCK: 0.0})], "positive"),
        ([Point(PLAIN, 1, 16, {STOCK: float("nan")})], "positive"),
        ([Point(PLAIN, 1, 0, {STOCK: 1.0})], "positive"),
    ],
)
def test_bad_points(points: list[Point], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        from_measurements(KEY, points, "t")


def test_a_default_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(table_file.TableError, match="only measured"):
        table_file.save(shipped(KEY), tmp_path / "t.json")
