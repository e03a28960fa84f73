"""The demo's arithmetic and its inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.bench_verify import headline
from sglang.verify_demo.cli import parser, read_prompts, save, server_command
from sglang.verify_demo.client import Answer
from sglang.verify_demo.figures import (
    Difference,
    Run,
    accept_length,
    by_position,
    cycle_ms,
    differences,
    histogram,
    phases_ms,
    summary,
)
from sglang.verify_demo.show import histogram_lines


def answer(*tokens: int, **meta: object) -> Answer:
    return Answer("", tokens, len(tokens), meta=dict(meta))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((1, 2, 3), (1, 2, 3), []),
        ((1, 2, 3), (1, 5, 3), [Difference(0, 1, 2, 5)]),
        ((1, 2), (1, 2, 3), [Difference(0, 2, None, 3)]),
        ((1, 2, 3), (1,), [Difference(0, 1, 2, None)]),
        ((), (7,), [Difference(0, 0, None, 7)]),
    ],
)
def test_differences(left: tuple[int, ...], right: tuple[int, ...], expected: list[Difference]) -> None:
    assert differences([answer(*left)], [answer(*right)]) == expected


def test_a_missing_answer_is_not_equality() -> None:
    with pytest.raises(ValueError, match="shorter"):
        differences([answer(1), answer(2)], [answer(1)])


def test_histogram_adds_requests_of_unequal_width() -> None:
    told = [answer(spec_correct_drafts_histogram=[1, 2]), answer(spec_accept_histogram=[0, 1, 5]), answer()]
    assert histogram(told) == [1, 3, 5]
    assert accept_length([1, 3, 5]) == pytest.approx((1 + 6 + 15) / 9)
    assert by_position([1, 3, 5]) == pytest.approx([8 / 9, 5 / 9])


def test_without_statistics_nothing_is_invented() -> None:
    assert (histogram([answer(1)]), accept_length([]), by_position([]), phases_ms([answer(1)])) == (
        [],
        0.0,
        [],
        {},
    )
    assert histogram_lines([]) == [] and histogram_lines([0, 0]) == []
    assert cycle_ms([answer(1)], 2.5, 4.0) == 10.0


def test_phases_are_weighed_by_cycles() -> None:
    told = [
        answer(spec_cycle={"timed_cycles": 1, "cycle_ms": 10.0, "verify_ms": 4.0}),
        answer(spec_cycle={"timed_cycles": 3, "cycle_ms": 6.0, "verify_ms": 2.0}),
    ]
    assert phases_ms(told) == {"wall": 7.0, "verify": 2.5}


def test_summary_counts_prompts_that_differ() -> None:
    speculative, plain = Run("s"), Run("p")
    speculative.streamed = [Answer("", count=11, seconds=2.0, decode_seconds=1.0)]
    plain.streamed = [Answer("", count=11, seconds=1.0, decode_seconds=0.5)]
    speculative.collected, plain.collected = [answer(1, 2), answer(3)], [answer(1, 2), answer(4)]
    figures = summary(speculative, plain)
    assert (figures["differing"], figures["prompts"], figures["tokens"]) == (1, 2, 3)
    assert (figures["tok_s"], figures["plain_tok_s"], figures["decode_ms"]) == (5.5, 11.0, 50.0)


def test_histogram_bars_never_hide_a_count() -> None:
    lines = histogram_lines([1, 0, 1000])
    assert lines[0].endswith("#") and not lines[1].endswith("#")


def test_few_prompts_show_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"kind": "a", "prompt": str(n)} for n in range(5)] + [{"kind": "b", "prompt": "x"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["kind"] for row in read_prompts(path, 3)] == ["a", "b", "a"]
    assert len(read_prompts(path, 99)) == 6


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        ('{"id": 1}\n', 1, "p.jsonl:1: neither"),
        ("", 1, "0 kinds"),
        ('{"prompt": "x"}', 0, "0 prompts wanted"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, text: str, count: int, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "p.jsonl", count)


def test_the_two_servers_differ_in_speculation_only() -> None:
    given = [
        "--model-path",
        "m",
        "--draft-path",
        "d",
        "--prompts",
        "p",
        "--steps",
        "3",
        "--server-arg=--tp=2",
    ]
    args = parser().parse_args(given)
    plain, speculative = (server_command(args, 1, speculative=flag) for flag in (False, True))
    assert speculative[: len(plain)] == plain and "--tp=2" in plain
    assert speculative[len(plain) :][-2:] == ["--speculative-num-draft-tokens", "4"]


def test_the_results_file_feeds_the_headline(tmp_path: Path) -> None:
    speculative, plain = Run("s", startup_s=3.0), Run("p", startup_s=2.0)
    speculative.streamed = [Answer("", count=11, seconds=2.0, decode_seconds=1.0)]
    plain.streamed = [Answer("", count=11, seconds=1.0, decode_seconds=0.5)]
    speculative.collected = [answer(1, 2, spec_correct_drafts_histogram=[0, 0, 4])]
    plain.collected = [answer(1, 2)]
    args = parser().parse_args(["--model-path", "m/nano", "--draft-path", "d", "--prompts", "p"])
    save(tmp_path / "cpu_demo.json", args, summary(speculative, plain), "2026-01-01T00:00:00+0000")
    built = headline.build(headline.collect(tmp_path))
    found = {name: entry["value"] for name, entry in built.items() if name.startswith("cpu.demo.")}
    assert found["cpu.demo.accept_length"] == 3.0 and found["cpu.demo.startup_s"] == 3.0
    assert (found["cpu.demo.tok_s"], found["cpu.demo.baseline_tok_s"]) == (5.5, 11.0)
