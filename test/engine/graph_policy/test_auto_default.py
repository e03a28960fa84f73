"""Whichever value ``--speculative-auto`` has by default: what a server makes of it, and that the page says the same."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.speculative.auto import hooks, start
from sglang.srt.speculative.auto.admission import ServerFacts, admit_server

ROOT = Path(__file__).resolve().parents[3]
SUPPORTED = ServerFacts(
    wanted=True, algorithm="EAGLE3", topk=1, device="cuda", graphs=True, target_backend="TritonAttnBackend",
    draft_backend="TritonAttnBackend", draft_layers=1,
)  # fmt: skip


def default() -> str:
    topic = importlib.import_module("patches.topics.speculative_auto").TOPIC
    (edit,) = [edit for edit in topic.edits if getattr(edit, "name", "") == "speculative_auto"]
    return str(edit.default).strip('"')


def test_the_composed_server_and_the_page_have_the_topics_default() -> None:
    from sglang.srt.server_args import ServerArgs

    assert ServerArgs.__dataclass_fields__["speculative_auto"].default == default()
    page = (ROOT / "docs" / "verify-graph.md").read_text(encoding="utf-8")
    other = {"on": "off", "off": "on"}[default()]
    assert f"**{default()} by default**" in page and f"**{other} by default**" not in page


@pytest.mark.parametrize("value", ("off", "on"))
def test_a_supported_server_follows_it(value: str) -> None:
    reason = admit_server(replace(SUPPORTED, wanted=value == "on"))
    assert reason == (None if value == "on" else "--speculative-auto off")


@pytest.mark.parametrize("value", ("off", "on"))
@pytest.mark.parametrize(
    "changes",
    [{"device": "cpu"}, {"simulated": True}, {"target_backend": "FlashInferMLAAttnBackend"}, {"lora": True}],
    ids=str,
)
def test_an_unsupported_server_starts_as_ever_with_one_line(
    value: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the switch on by default nobody asked for it: its absence is no warning, and nothing is allocated."""
    facts = replace(SUPPORTED, wanted=value == "on", **changes)
    monkeypatch.setattr(start, "server_facts", lambda worker: facts)
    runner = SimpleNamespace(ps=SimpleNamespace(tp_rank=0))
    worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=runner))
    with caplog.at_level("INFO", logger="sglang.fork.auto"):
        assert hooks.graphs_ready(lambda owner: "captured", worker) == "captured"
    assert hooks.runtime_of(worker) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "speculation stays on" in caplog.text
