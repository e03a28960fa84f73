"""A path that is no directory and may be a repository: told at once where the hub cannot be reached."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.speculative.arguments import hub
from sglang.srt.speculative.arguments.faults import ArgumentFault

DOWN = "https://hub.invalid"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """No proxy, no name service; records how the hub's client is called, and fails as it does without a cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls: list[dict[str, Any]] = []

    def resolve(*_: object) -> list[object]:
        raise socket.gaierror(-2, "Name or service not known")

    def download(*_: object, **options: Any) -> str:
        calls.append(options)
        raise LocalEntryNotFoundError("not cached")

    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return calls


def test_no_address_asks_only_the_cache(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(ArgumentFault, match="the hub cannot be reached") as caught:
        hub.config_directory("--model-path", "some/model", None)
    assert caught.value.code == "path-unreachable"
    assert [call["local_files_only"] for call in asked] == [True]


def test_an_address_or_a_proxy_asks_the_hub(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a proxy names need not resolve here: the client must try."""
    assert not hub.has_address(DOWN)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    assert hub.has_address(DOWN)
    with pytest.raises(ArgumentFault):
        hub.config_directory("--model-path", "some/model", None)
    assert [call["local_files_only"] for call in asked] == [False]


@pytest.mark.usefixtures("asked")
def test_a_slip_is_told_with_the_directory_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nano", "other"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentFault, match=r"correct the path \(models/nano is here\)"):
        hub.config_directory("--model-path", "models/nanoo", None)
    assert hub.near_directory("models/zzz") is None
    assert hub.near_directory("nowhere/nano") is None
