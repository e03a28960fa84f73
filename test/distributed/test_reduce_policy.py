"""The table that says who reduces: measured, shipped, forced, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.distributed.one_shot import table_file
from sglang.srt.distributed.one_shot.policy import (
    AUTO,
    FLAGS,
    FUSED,
    MARGIN,
    ONE_SHOT,
    PACKETS,
    PLAIN,
    STOCK,
    TWO_STAGE,
    Key,
    Point,
    Table,
    forced,
    from_measurements,
    shipped,
    with_protocol,
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
    ("link", "ranks", "limit", "two_stage"),
    [
        ("PIX", 2, 65_536, 0),
        ("PIX", 3, 65_536, 73_728),
        ("PXB", 4, 65_536, 98_304),
        ("PXB", 8, 49_152, 147_456),
        ("PHB", 4, 49_152, 73_728),
        ("NODE", 8, 16_384, 49_152),
        ("SYS", 8, 16_384, 49_152),
        ("NV", 2, 0, 0),
        ("unknown", 8, 0, 0),
        ("same", 2, 0, 0),
        ("cpu", 2, 0, 0),
    ],
)
def test_shipped_default(link: str, ranks: int, limit: int, two_stage: int) -> None:
    """One-shot, then two-stage where rows grow and it sends less, then stock."""
    table = shipped(Key("any", link, ranks, ""))
    last = two_stage or limit
    assert table.crossover(PLAIN) == table.crossover(FUSED) == last
    assert table.choose(FUSED, limit).method == (ONE_SHOT if limit else STOCK)
    assert table.choose(PLAIN, limit + 1).method == (TWO_STAGE if two_stage else STOCK)
    assert table.choose(PLAIN, last + 1).method == STOCK
    # Two-stage never sends more than one-shot is trusted to send at its own limit.
    assert 2 * (ranks - 1) / ranks * two_stage <= (ranks - 1) * limit
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


# Two H200, in outline: packets for few rows, upstream's own for many; 48 rows do not fit packets of 8 ranks.
WITH_PACKETS = from_measurements(
    KEY,
    [
        Point(FUSED, 3, 3 * TOKEN, {ONE_SHOT: 5.2, PACKETS: 3.7, STOCK: 5.2}),
        Point(FUSED, 24, 24 * TOKEN, {ONE_SHOT: 5.5, PACKETS: 6.8, STOCK: 5.9}),
        Point(FUSED, 48, 48 * TOKEN, {ONE_SHOT: 6.1, STOCK: 6.9}),
    ],
    "measured here",
)


@pytest.mark.parametrize(
    ("protocol", "rows", "method"),
    [
        (AUTO, 3, PACKETS),
        (AUTO, 24, ONE_SHOT),
        (FLAGS, 3, STOCK),  # flags are no faster than stock there
        (FLAGS, 24, ONE_SHOT),
        (PACKETS, 3, PACKETS),
        (PACKETS, 24, STOCK),
        (PACKETS, 48, PACKETS),  # by the figure of flags; the communicator knows what fits
        (PACKETS, 49, STOCK),
    ],
)
def test_the_protocol_is_the_tables_or_the_settings(protocol: str, rows: int, method: str) -> None:
    assert with_protocol(WITH_PACKETS, protocol).choose(FUSED, rows * TOKEN).method == method


def test_a_protocol_for_tables_without_measurements() -> None:
    for table in (shipped(KEY), forced(KEY)):
        assert with_protocol(table, AUTO) == table
        assert with_protocol(table, FLAGS).limits == table.limits
        packets = with_protocol(table, PACKETS)
        assert packets.choose(PLAIN, TOKEN).method == PACKETS and "packets" in packets.origin
        assert packets.crossover(PLAIN) == table.crossover(PLAIN)
    with pytest.raises(ValueError, match="not one of auto, flags, packets"):
        with_protocol(MEASURED, "both")


def test_a_table_from_before_packets_is_read_and_never_chooses_them(tmp_path: Path) -> None:
    """Its kernels are the flag kernels of today; the new ones have no figure there."""
    path = tmp_path / "table.json"
    table_file.save(MEASURED, path, "2026-01-01")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["made_with"]["kernels"] == 2 and document["schema"] == "all-reduce-table/2"
    assert not any(PACKETS in point["us"] for point in document["points"])
    found = table_file.find(KEY, str(path))
    assert not found.refused
    methods = {found.table.choose(PLAIN, size).method for size in range(16, 25 * TOKEN, TOKEN // 2)}
    assert methods == {ONE_SHOT, TWO_STAGE, STOCK}


def test_packets_go_through_the_file_and_between_ranks(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table_file.save(WITH_PACKETS, path, "t")
    assert table_file.find(KEY, str(path)).table.points == WITH_PACKETS.points
    sent = table_file.from_document(table_file.to_document(with_protocol(WITH_PACKETS, PACKETS)))
    assert sent.choose(FUSED, 48 * TOKEN).method == PACKETS


def test_a_table_goes_through_its_file(tmp_path: Path) -> None:
    path = table_file.default_path(KEY, tmp_path)
    table_file.save(MEASURED, path, "2026-01-01")
    found = table_file.find(KEY, str(path))
    assert (found.advice, found.refused) == ("", False)
    assert found.table.points == MEASURED.points
    assert found.table.origin == "measured here 2026-01-01"
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
    found = table_file.find(other, str(path))
    assert found.table == shipped(other) and found.refused
    assert found.advice.startswith(f"{path}: measured on another machine") and "here" in found.advice
    assert table_file.CURE in found.advice


def changed(**fields: Any) -> Callable[[dict[str, Any]], str]:
    """A sound document with fields replaced; None takes one out."""

    def change(document: dict[str, Any]) -> str:
        made = {**document, **fields}
        return json.dumps({name: value for name, value in made.items() if value is not None})

    return change


def points(**fields: Any) -> Callable[[dict[str, Any]], str]:
    """A sound document whose first point has fields replaced."""
    return lambda document: changed(points=[{**document["points"][0], **fields}])(document)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _: "", "cut off, or no JSON"),
        (lambda document: json.dumps(document)[:-40], "cut off, or no JSON"),
        (lambda _: "\xff".encode("latin-1"), "cannot be read"),
        (lambda _: "[]", "no all-reduce-table/2"),
        (lambda _: "{}", "no all-reduce-table/2"),
        (lambda _: " " * (table_file.LARGEST + 1), "are no table"),
        (changed(schema="all-reduce-table/1"), "format all-reduce-table/1, this version reads"),
        (changed(points=None), "field 'points' is missing"),
        (changed(points=[]), "at least one point"),
        (changed(points=[1]), "not subscriptable"),
        (changed(key={"gpu": "x"}), "missing 3 required"),
        (changed(made_with=None), "field 'made_with' is missing"),
        (changed(made_with={"kernels": 1, "base": "0.5.17"}), "another version (kernels 1 there"),
        (changed(made_with={**table_file.made_with(), "base": "0.5.16"}), "base 0.5.16 there"),
        (points(us={ONE_SHOT: 1.0}), "no figure of stock"),
        (points(us={STOCK: "Infinity"}), "have to be positive"),
        (points(us={STOCK: "quick"}), "could not convert"),
        (points(us=[1.0]), "has no attribute"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_the_reason_and_the_cure(
    tmp_path: Path, change: Callable[[dict[str, Any]], str | bytes], expected: str
) -> None:
    path = tmp_path / "table.json"
    table_file.save(MEASURED, path, "2026-01-01")
    assert table_file.find(KEY, str(path)).table.points == MEASURED.points
    text = change(json.loads(path.read_text(encoding="utf-8")))
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = table_file.find(KEY, str(path))
    assert found.table == shipped(KEY) and found.refused
    assert found.advice.startswith(f"{path}: ") and expected in found.advice
    assert found.advice.endswith(table_file.CURE)


def test_a_folder_in_place_of_a_file_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "cannot be read"), (tmp_path / "none.json", "no such file")):
        found = table_file.find(KEY, str(path))
        assert found.refused and words in found.advice and str(path) in found.advice


def test_without_a_file_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = table_file.find(KEY)
    assert found.table == shipped(KEY) and not found.refused
    assert "bench_all_reduce --write" in found.advice


def test_what_the_table_says_of_each_size(tmp_path: Path) -> None:
    lines = dict(MEASURED.describe())
    assert lines[PLAIN] == "one-shot up to 43008 bytes, two-stage up to 86016 bytes, stock above"
    assert lines[FUSED] == "one-shot up to 43008 bytes, stock above"
    assert dict(shipped(KEY).describe())[PLAIN].startswith(
        "one-shot up to 49152 bytes, two-stage up to 147456"
    )
    assert dict(shipped(Key("any", "NV", 2, "")).describe())[PLAIN] == "stock"
    assert dict(forced(KEY, TWO_STAGE).describe())[FUSED] == TWO_STAGE


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], "at least one"),
        ([Point(PLAIN, 1, 16, {ONE_SHOT: 1.0})], "no figure of stock"),
        ([Point("sum", 1, 16, {STOCK: 1.0})], "kind"),
        ([Point(PLAIN, 1, 16, {STOCK: 0.0})], "positive"),
        ([Point(PLAIN, 1, 16, {STOCK: float("nan")})], "positive"),
        ([Point(PLAIN, 1, 0, {STOCK: 1.0})], "positive"),
        ([Point(PLAIN, 1, 16, {STOCK: float("inf")})], "positive"),
        ([Point(PLAIN, 1, 16, {STOCK: 1.0}), Point(PLAIN, 2, 16, {STOCK: 2.0})], "two points"),
    ],
)
def test_bad_points(points: list[Point], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        from_measurements(KEY, points, "t")


def test_a_default_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(table_file.TableError, match="only measured"):
        table_file.save(shipped(KEY), tmp_path / "t.json")
