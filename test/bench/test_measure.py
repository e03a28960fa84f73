"""Prompts, loops, the client, and the rows that answers give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import serving
from hypothesis import given
from hypothesis import strategies as st
from sglang.bench_verify import degenerate, measure, prompts, summary
from sglang.bench_verify.client import Answer, Client, ServerError
from sglang.bench_verify.environment import Environment
from sglang.bench_verify.launch import LaunchError, ServerPlan, forth_and_back, plans


def test_the_shipped_prompts_cover_every_kind_and_are_text() -> None:
    shipped = prompts.shipped()
    assert {prompt.kind for prompt in shipped} == set(prompts.KINDS)
    assert len({prompt.id for prompt in shipped}) == len(shipped)
    for prompt in shipped:
        words = prompt.plain().split()
        assert len(words) > 15 and degenerate.flag(words) == ""
    assert max(len(prompt.plain().split()) for prompt in shipped) > 600


def test_a_short_run_covers_the_kinds() -> None:
    assert {prompt.kind for prompt in prompts.pick(prompts.shipped(), 4)} == set(prompts.KINDS)
    assert len(prompts.pick(prompts.shipped(), 10**6)) == len(prompts.shipped())


def test_a_long_document_grows_with_its_copies() -> None:
    one, four = prompts.document("workshop.txt"), prompts.document("workshop.txt", copies=4)
    assert len(four.plain()) > 3.5 * len(one.plain())


def test_a_broken_prompt_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "kind": "chat", "prompt": "x"}\n{"id": "b", "kind": "chat"}\n')
    with pytest.raises(prompts.PromptError, match=r"p\.jsonl:2"):
        prompts.read(path)


@pytest.mark.parametrize(
    ("tokens", "flagged"),
    [
        ([1, 2] * 200, True),
        ([7] * 100, True),
        (list(range(300)), False),
        (list(range(60)) + [5, 6, 7] * 40, True),
        ([1, 2] * 8, False),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13] * 30, True),
    ],
)
def test_loops_are_flagged(tokens: list[int], flagged: bool) -> None:
    """tokenspeed#1305: 3.93 tokens a step came from a two-token loop."""
    assert bool(degenerate.flag(tokens)) is flagged


@given(st.lists(st.integers(0, 5), max_size=80))
def test_the_share_of_distinct_bigrams_is_a_share(tokens: list[int]) -> None:
    assert 0 < degenerate.distinct_bigrams(tokens) <= 1


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of the fake server."""
    with serving() as url:
        yield Client(url, timeout_s=10)


SERVER = measure.Server("eagle3", "local")


def test_rows_of_a_running_server(client: Client) -> None:
    record = Environment()
    assert measure.describe(client, record) == 3
    assert record.server_arguments["model_path"] == "kimi" and record.server_arguments["tp_size"] == "8"
    assert record.ranks[0].variables == {"NCCL_PROTO": "LL"} and record.topics == {"verify-stats": "applied"}
    chat = prompts.Prompt("c", "chat", (("user", "hello"),))
    (row,) = measure.run(client, SERVER, [chat], tokens=64, width=3)
    assert row.metrics["completion_tokens"].value == 21 and row.metrics["prompt_tokens"].value == 7
    assert row.metrics["kept_length"].value == 2.0
    assert (row.metrics["kept_at_1"].value, row.metrics["kept_at_2"].value) == (1.0, 0.0)
    assert row.metrics["cycle_ms"].value == pytest.approx(3.5)
    assert row.note == ""


def test_a_loop_is_noted_in_the_row(client: Client) -> None:
    (row,) = measure.run(client, SERVER, [prompts.Prompt("t", "text", text="go on")], tokens=64, width=3)
    assert "loop of 2" in row.note and row.metrics["distinct_bigrams"].value < 0.1


def test_a_failing_request_names_address_and_answer(client: Client) -> None:
    with pytest.raises(ServerError, match=r"/v1/chat/completions answered 500"):
        client.chat(prompts.Prompt("f", "chat", (("user", "fail"),)), 8)


def test_counts_that_do_not_add_up_are_noted() -> None:
    answer = Answer(1.0, 30, 5, "x")
    after = {"kept_histogram": [0, 10]}
    row = measure.row(SERVER, prompts.Prompt("p", "chat", text="x"), answer, {}, after, 3, 1, "")
    assert "30 completion tokens, but" in row.note


def test_acceptance_is_the_answers_own_where_others_use_the_server_too() -> None:
    """Between the two readings the server made 50 verifies, 10 of them for this answer."""
    info = {"spec_correct_drafts_histogram": [2, 6, 2], "spec_cycle": {"cycle_ms": 3.0}}
    answer = Answer(1.0, 21, 5, "x", info=info)
    after = {"kept_histogram": [40, 10], "phase_totals": {"verify": [100.0, 50]}}
    row = measure.row(SERVER, prompts.Prompt("p", "chat", text="x"), answer, {}, after, 3, 1, "")
    assert row.metrics["kept_length"].value == 2.0 and row.counters["verifies"] == 10 and row.note == ""
    assert row.phases_ms == {"verify": 2.0}


def test_plain_steps_of_an_answer_have_no_verify() -> None:
    info = {"spec_correct_drafts_histogram": [0, 10], "spec_cycle": {"plain_steps": 5}}
    row = measure.row(
        SERVER, prompts.Prompt("p", "chat", text="x"), Answer(1.0, 26, 5, "x", info=info), {}, {}, 3, 1, ""
    )
    assert row.counters["plain_steps"] == 5 and row.note == ""


def test_a_server_that_knows_its_decode_is_judged_by_it() -> None:
    info = {"spec_correct_drafts_histogram": [0, 10], "spec_cycle": {"decode_ms": 2.0}}
    after = {"phase_totals": {"verify": [30.0, 10]}}
    row = measure.row(
        SERVER, prompts.Prompt("p", "chat", text="x"), Answer(1.0, 21, 5, "x", info=info), {}, after, 3, 1, ""
    )
    (line, *_) = summary.server_verdicts(summary.summarise([row], "server_summary"))
    assert "cycle 3.00 ms, decode 2.00 ms: needs 1.50 accepted, gets 2.00: 1.33x" in line


def answers(
    server: str, width: int, rates: list[tuple[int, float]], kept: float | None, ms: float
) -> list[Any]:
    """Rows of one server."""
    found = []
    for tokens, seconds in rates:
        histogram = {"kept_histogram": []}
        row = measure.row(
            measure.Server(server, "local"),
            prompts.Prompt("p", "chat", text="x"),
            Answer(seconds, tokens, 32, "x"),
            {},
            {
                **histogram,
                ("phase_totals" if width else "decode_totals"): {("verify" if width else "decode"): [ms, 1]},
            },
            width,
            1,
            "",
        )
        if kept is not None:
            row.metrics["kept_length"] = measure.Metric(kept, "tokens")  # type: ignore[index]
        found.append(row)
    return found


def test_the_field_report_is_judged_as_it_was() -> None:
    """Their five runs each: 82.5 tok/s without, 60 with; 27% slower."""
    baseline = answers(
        "baseline",
        0,
        [(2048, 24.85), (2048, 24.87), (2002, 24.23), (1692, 20.17), (2048, 24.85)],
        None,
        12.15,
    )
    eagle = answers(
        "eagle3",
        3,
        [(2048, 34.76), (2048, 31.72), (2048, 38.23), (1692, 25.33), (2048, 34.67)],
        2.0,
        29.0 / 0.969,
    )
    summaries = summary.summarise([*baseline, *eagle], "launch_summary")
    assert summaries[0].metrics["tok_s"].value == pytest.approx(82.6, abs=0.2)
    lines = summary.server_verdicts(summaries)
    assert any("needs 2.46 accepted, gets 2.00: 0.81x" in line for line in lines)
    assert any("0.73x, slower" in line for line in lines)


def test_each_server_starts_early_and_late() -> None:
    a, b, c = (ServerPlan(name, "fork") for name in "abc")
    assert [plan.name for plan in forth_and_back([a, b, c])] == list("abccba")
    assert [plan.name for plan in forth_and_back([a, b], once=True)] == ["a", "b"]


def test_plans_differ_only_in_what_they_compare() -> None:
    base, stock, fork = plans(
        "m", "d", 2, ["baseline", "upstream", "fork"], ["verify-attention"], ["--tp", "8"]
    )
    assert (
        stock.arguments == fork.arguments
        and stock.topics_off == ("verify-attention",)
        and fork.topics_off == ()
    )
    assert "--speculative-algorithm" not in base.arguments and base.arguments[-2:] == ("--tp", "8")
    # Measured also where it loses; the last word is the user's.
    at = fork.arguments.index("--speculative-auto")
    assert fork.arguments[at + 1] == "off" and at < fork.arguments.index("--tp")
    assert "--speculative-auto" not in base.arguments
    with pytest.raises(LaunchError, match="forc"):
        plans("m", "d", 2, ["forc"], [])
    with pytest.raises(LaunchError, match="asked for twice"):
        plans("m", "d", 2, ["fork", "fork"], [])


def test_several_draft_lengths_are_a_server_each() -> None:
    found = plans("m", "d", [1, 4], ["baseline", "fork"], [], off=["run-end"])
    assert [plan.name for plan in found] == ["baseline", "eagle3-fork-1", "eagle3-fork-4"]
    assert all(plan.topics_off == ("run-end",) for plan in found)
    assert found[2].arguments[-1] == "5" and found[2].steps == 4


def test_the_best_draft_length_is_named() -> None:
    """G6 (sglang#25696): fewer draft tokens may win, and the bench says which."""
    rows = [
        *answers("baseline", 0, [(100, 2.98)], None, 29.8),
        *answers("fork-1", 2, [(100, 2.25)], 1.7, 38.0),
        *answers("fork-3", 4, [(100, 2.72)], 2.1, 57.0),
    ]
    summaries = summary.summarise(rows, "launch_summary")
    assert summary.best_length(summaries) == (
        "best number of draft tokens here: 1 (tok/s by draft tokens: 1: 44.4, 3: 36.8, 0: 33.6)"
    )
    assert summary.best_length(summaries[:2]) == ""


def test_starts_are_the_repeats_of_a_summary_and_prompts_are_not() -> None:
    rows = answers("fork", 3, [(100, 1.0), (10, 1.0), (100, 1.25), (10, 1.25)], 2.0, 1.0)
    for row, start in zip(rows, (1, 1, 2, 2), strict=True):
        row.case["start"] = start  # type: ignore[index]
    (found,) = summary.summarise(rows, "launch_summary")
    assert found.metrics["tok_s"].samples == pytest.approx((55.0, 44.0))


def test_the_accept_length_of_several_answers_is_weighted_by_their_verifies(client: Client) -> None:
    """Also where plain steps gave some of the tokens: they had no verify."""
    rows = answers("fork", 3, [(101, 1.0), (101, 1.0)], 2.0, 1.0)
    rows[0].counters.update(verifies=10)  # type: ignore[attr-defined]
    rows[1].counters.update(verifies=30)  # type: ignore[attr-defined]
    rows[1].metrics["kept_length"] = measure.Metric(3.0, "tokens")  # type: ignore[index]
    (found,) = summary.summarise(rows, "launch_summary")
    assert found.metrics["accept_length"].value == pytest.approx(2.75)
