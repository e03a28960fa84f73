"""Reading what checkpoints say about themselves, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import DRAFT, KIMI, LLAMA, draft_tensors, write, write_safetensors
from sglang.srt.speculative.arguments import ArgumentFault, checkpoint, tokenizers

OPTION = "--speculative-draft-model-path"


def code(call: object, *args: object, **kwargs: object) -> str:
    """The rule by which ``call`` refuses."""
    assert callable(call)
    with pytest.raises(ArgumentFault) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return caught.value.code


@pytest.mark.parametrize("path", ["/no/such/place", "./no/such", "a/b/c", "~/no such place", "-x"])
def test_path_that_can_be_nothing(path: str) -> None:
    assert code(checkpoint.local_directory, OPTION, path, what="the draft") == "path-missing"


@pytest.mark.parametrize("path", ["owner/name", "gpt2", "s3://bucket/model", "owner/name-1.5_b"])
def test_path_that_only_upstream_can_open(path: str) -> None:
    assert checkpoint.local_directory(OPTION, path, what="the draft") is None


def test_no_description(tmp_path: Path) -> None:
    assert code(checkpoint.read_config, OPTION, tmp_path, what="the draft") == "config-missing"
    (tmp_path / "model.gguf").touch()
    assert checkpoint.read_config(OPTION, tmp_path, what="the draft") is None


@pytest.mark.parametrize("text", ["{", "[]", "null", ""])
def test_description_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert code(checkpoint.read_config, OPTION, tmp_path, what="the draft") == "config-json"


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No UTF-8, nested without end, a name too long, a folder or a file that this user may not read."""
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert code(checkpoint.read_config, OPTION, tmp_path, what="x") == "config-unreadable"
    file.write_text('{"a": ' + "[" * 100_000)
    assert code(checkpoint.read_config, OPTION, tmp_path, what="x") == "config-json"
    assert code(checkpoint.local_directory, OPTION, "/" + "x" * 5000, what="x") == "path-unreadable"

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert code(checkpoint.read_config, OPTION, tmp_path, what="x") == "config-unreadable"
    monkeypatch.setattr(Path, "is_dir", refuse)
    assert code(checkpoint.local_directory, OPTION, "/locked/model", what="x") == "path-unreadable"


def test_overrides(tmp_path: Path) -> None:
    write(tmp_path, KIMI)
    config = checkpoint.read_config(
        OPTION, tmp_path, what="x", overrides='{"text_config": {"vocab_size": 7}, "model_type": "y"}'
    )
    assert config is not None
    assert config["text_config"]["vocab_size"] == 7
    assert config["text_config"]["hidden_size"] == KIMI["text_config"]["hidden_size"]
    assert config["model_type"] == "y"
    assert code(checkpoint.read_config, OPTION, tmp_path, what="x", overrides="{") == "config-json"


def test_weights_missing_and_partial(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    assert code(checkpoint.require_weights, OPTION, tmp_path, what="x") == "weights-missing"
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", (3, 5), None)})
    checkpoint.require_weights(OPTION, tmp_path, what="x")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / checkpoint.INDEX_NAME).write_text(json.dumps({"weight_map": shards}))
    assert checkpoint.missing_shards(tmp_path) == ["model-00002-of-00002.safetensors"]
    assert code(checkpoint.require_weights, OPTION, tmp_path, what="x") == "weights-partial"


def test_headers_and_values(tmp_path: Path) -> None:
    table = [5, -3, 2**40]
    write(tmp_path, DRAFT, draft_tensors(DRAFT, table))
    headers = checkpoint.read_headers(OPTION, tmp_path)
    assert headers is not None
    assert headers["fc.weight"].shape == (32, 96)
    assert checkpoint.read_integers(headers["d2t"]) == table
    assert checkpoint.read_integers(headers["fc.weight"]) is None
    assert checkpoint.weight_bytes(tmp_path) == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("keep", [0, 5, 60, -2])
def test_file_cut_short(tmp_path: Path, keep: int) -> None:
    write(tmp_path, DRAFT, draft_tensors(DRAFT))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert code(checkpoint.read_headers, OPTION, tmp_path) == "weights-broken"


def test_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert code(checkpoint.read_headers, OPTION, tmp_path) == "weights-broken"


def test_sglang_24051_permuted_tokenizer(tmp_path: Path) -> None:
    target, draft = tmp_path / "t", tmp_path / "d"
    for directory, vocabulary in ((target, {"a": 0, "b": 1}), (draft, {"a": 1, "b": 0})):
        directory.mkdir()
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert "hardly ever accepted" in (tokenizers.remark(target, draft, draft_path="d") or "")
    (draft / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"b": 1, "a": 0}}, "version": "1.0"})
    )
    assert tokenizers.remark(target, draft, draft_path="d") is None
    (draft / "tokenizer.json").unlink()
    assert tokenizers.remark(target, draft, draft_path="d") is None
