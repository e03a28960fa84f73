"""Every recipe, through the composed server's own parser and resolution, on the machines it is written for."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_machines import B200, BY_SUFFIX, H200, RTX, Machine
from hub_models import (
    DEEPSEEK_DRAFT,
    HUB,
    KIMI_K25,
    LLAMA_70B_DRAFT,
    MHA_DRAFT,
    MLA_DRAFT,
    MLA_DRAFT_TRAINING,
    Hub,
)
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.speculative.arguments.configs import is_mla, text_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
NAMES = [path.name for path in RECIPES]
CASES = [
    pytest.param(path, machine, id=f"{path.stem} on {machine.name}")
    for path in RECIPES
    for machine in BY_SUFFIX.get(path.stem.rpartition(".")[2], ())
]
MODELS = ("model-path", "speculative-draft-model-path")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Hub:
    """Checkpoints under their hub names, shared by the tests of this file."""
    return Hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test asks a hub, no port is bound, and variables that upstream sets while resolving do not stay."""
    before = dict(os.environ)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sglang.srt.speculative.arguments.machine.check_port", lambda *_: None)
    yield
    os.environ.clear()
    os.environ.update(before)


def settings(path: Path) -> dict[str, Any]:
    """The recipe as YAML."""
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def resolve(path: Path, hub: Hub, *more: str, **configs: dict[str, Any]) -> ServerArgs:
    """What a server started with ``--config path`` would run with; hub names become directories.

    ``configs`` replaces the configuration of ``target`` or ``draft``.
    """
    argv = ["--config", str(path)]
    for option, side in zip(MODELS, ("target", "draft"), strict=True):
        name = settings(path).get(option)
        if name is not None:
            argv += [f"--{option}", hub.path(name, configs.get(side)) if name in HUB else str(ROOT / name)]
    return prepare_server_args([*argv, *more])


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_every_key_is_an_option_of_the_server(path: Path) -> None:
    """In full: argparse would take a prefix, and a prefix stops being one when upstream adds an option."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    for key, value in settings(path).items():
        assert f"--{key}" in known, key
        # Upstream would pass the text "None".
        assert value is not None, f"{key} has no value"


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_says_what_it_rests_on(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    comment = re.sub(r"(?m)^# ?", "", text[: text.index("\n\n")])
    for word in ("Target", "Draft", "Measured", "Not measured"):
        assert re.search(rf"(?m)^{word}: \S", comment), word
    assert f"--config recipes/{path.name}" in comment
    names = [settings(path).get(option) for option in MODELS]
    for name in filter(None, names):
        assert name in HUB or (ROOT / name / "config.json").is_file()
        assert name in comment


def test_each_target_has_the_machines_asked_for() -> None:
    stems = {path.stem for path in RECIPES}
    eight = {"kimi-k2.5-mha", "kimi-k2.5-mla", "kimi-k2", "deepseek-r1", "llama-3.3-70b"}
    assert {f"{name}.{machine}" for name in eight for machine in ("8x-rtx-pro-6000", "8x-h200")} <= stems
    assert {"nano.cpu", "nano.1x-gpu", "llama-3.1-8b.1x-gpu"} <= stems


@pytest.mark.parametrize(("path", "machine"), CASES)
def test_resolves(path: Path, machine: Machine, hub: Hub) -> None:
    """Parsed, checked against target and draft, and resolved to backends that serve both."""
    asked = settings(path)
    with machine.seen():
        args = resolve(path, hub)
    assert args.device == "cuda"
    for key, value in asked.items():
        if key not in (*MODELS, "kv-cache-dtype") and isinstance(value, (int, str)):
            assert getattr(args, key.replace("-", "_")) == value, key
    assert args.get_attention_backends() == ("triton", "triton")
    assert args.speculative_draft_attention_backend in (None, "triton")
    assert args.speculative_attention_mode == "prefill"
    assert not args.disable_cuda_graph
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (2, 1)
    # Every batch that may run has a graph (sglang#33483).
    assert args.max_running_requests <= max(args.cuda_graph_config.decode.bs)
    assert args.kv_cache_dtype in ("auto", "bfloat16")


def kimi(kind: str, machine: str) -> Path:
    """A recipe of Kimi-K2.5."""
    return ROOT / "recipes" / f"kimi-k2.5-{kind}.{machine}.yaml"


@pytest.mark.parametrize(("kind", "draft"), (("mha", MHA_DRAFT), ("mla", MLA_DRAFT)))
def test_kimi_wrapper_and_both_kinds_of_draft(kind: str, draft: dict[str, Any]) -> None:
    """The target is the wrapper; the drafts are of the kind that the file's name says."""
    assert KIMI_K25["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert is_mla(draft) == (kind == "mla")
    name = settings(kimi(kind, "8x-h200"))["speculative-draft-model-path"]
    assert HUB[name] is draft


@pytest.mark.parametrize(
    ("machine", "target_backend"),
    ((H200, "flashmla"), (B200, "trtllm_mla"), (RTX, "trtllm_mla")),
    ids=lambda value: getattr(value, "name", value),
)
def test_sglang_23490(machine: Machine, target_backend: str, hub: Hub, tmp_path: Path) -> None:
    """D1: an MLA-only backend for the target and no draft backend given; the MHA draft gets one that serves it."""
    asked = settings(kimi("mha", "8x-h200")) | {"attention-backend": target_backend}
    del asked["speculative-draft-attention-backend"]
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump(asked), encoding="utf-8")
    with machine.seen():
        args = resolve(changed, hub)
    assert args.get_attention_backends()[1] == target_backend
    assert args.speculative_draft_attention_backend == "triton"


@pytest.mark.parametrize(
    ("path", "machine", "backend"),
    (
        (kimi("mha", "8x-h200"), H200, "fa3"),
        (kimi("mha", "8x-h200"), B200, "trtllm_mla"),
        (kimi("mha", "8x-rtx-pro-6000"), RTX, "triton"),
        (ROOT / "recipes" / "llama-3.3-70b.8x-h200.yaml", H200, "fa3"),
        (ROOT / "recipes" / "llama-3.3-70b.8x-h200.yaml", B200, "trtllm_mha"),
        (ROOT / "recipes" / "llama-3.3-70b.8x-rtx-pro-6000.yaml", RTX, "flashinfer"),
    ),
    ids=lambda value: getattr(value, "stem", getattr(value, "name", value)),
)
def test_what_upstream_would_choose(
    path: Path, machine: Machine, backend: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the recipes name the backend, and what their comments say of the choice without it."""
    asked = {key: value for key, value in settings(path).items() if not key.endswith("attention-backend")}
    bare = tmp_path / "bare.yaml"
    bare.write_text(yaml.safe_dump(asked), encoding="utf-8")
    monkeypatch.setattr("sglang.srt.server_args.is_flashinfer_available", lambda: True)
    with machine.seen():
        args = resolve(bare, hub)
    assert args.get_attention_backends() == (backend, backend)
    if backend != "triton" and machine is not B200:
        assert f"pstream would choose {backend}" in path.read_text(encoding="utf-8")


def test_sglang_25673(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """D2: the MLA draft's model_type is known; a misspelt one is refused in a line."""
    path = kimi("mla", "8x-h200")
    with H200.seen():
        resolve(path, hub)
    with H200.seen(), pytest.raises(SystemExit):
        resolve(path, hub, draft=MLA_DRAFT | {"model_type": "kimi_k22"})
    assert "kimi_k22" in capsys.readouterr().err


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("ids", "fits"),
    (
        ([2, 30, 58], True),
        ([1, 29, 57], True),
        ([2, 30, 60], True),
        ([2, 30, 61], False),
        ([2, 30, 99], False),
        ([], False),
    ),
)
def test_vllm_46788(
    ids: list[int],
    fits: bool,
    hub: Hub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """D4: auxiliary layers against the wrapper's 61 layers."""
    assert text_config(KIMI_K25)["num_hidden_layers"] == 61
    draft = MHA_DRAFT | {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    with RTX.seen():
        if fits:
            resolve(kimi("mha", "8x-rtx-pro-6000"), hub, draft=draft)
            return
        with pytest.raises(SystemExit):
            resolve(kimi("mha", "8x-rtx-pro-6000"), hub, draft=draft)
    assert IDS in capsys.readouterr().err


@pytest.mark.parametrize("kind", ("mha", "mla"))
def test_sglang_23461(kind: str, hub: Hub) -> None:
    """D10: this version has no cache type of the draft's own, so the recipe's remark about it holds."""
    assert not any("draft" in name and "kv" in name for name in vars(ServerArgs))
    with H200.seen():
        args = resolve(kimi(kind, "8x-h200"), hub, "--kv-cache-dtype", "fp8_e4m3")
    assert args.kv_cache_dtype == "fp8_e4m3"
    assert args.get_attention_backends() == ("triton", "triton")
    assert args.speculative_draft_attention_backend == "triton"


@pytest.mark.parametrize("machine", ("8x-rtx-pro-6000", "8x-h200"))
def test_deepseek_v3_and_an_eagle3_draft(machine: str, hub: Hub) -> None:
    """V3 by the command line; EAGLE-3 with SpecForge's configuration, whose layer ids start with 1."""
    path = ROOT / "recipes" / f"deepseek-r1.{machine}.yaml"
    draft = hub.path("deepseek-draft", DEEPSEEK_DRAFT)
    with BY_SUFFIX[machine][0].seen():
        args = resolve(path, hub, "--model-path", hub.path("deepseek-ai/DeepSeek-V3"))
        assert (args.speculative_algorithm, args.speculative_num_draft_tokens) == ("EAGLE", 3)
        assert args.speculative_draft_model_path == args.model_path
        more = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft)
        args = resolve(path, hub, *more)
    assert args.speculative_draft_model_path == draft
    # The draft is published in float16 and loaded as its target is.
    assert args.dtype == "bfloat16"


@pytest.mark.parametrize("machine", ("8x-rtx-pro-6000", "8x-h200"))
def test_either_public_form_of_the_mla_draft(machine: str, hub: Hub) -> None:
    """The published file could not be read: what resolves must be true of both configurations that could."""
    for draft in (MLA_DRAFT, MLA_DRAFT_TRAINING):
        with BY_SUFFIX[machine][0].seen():
            args = resolve(kimi("mla", machine), hub, draft=draft)
        assert args.context_length == 131072


def test_a_draft_that_is_narrower_than_its_target(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """sglang#4716: it names the target's width; without that it would be another model's draft."""
    path = ROOT / "recipes" / "llama-3.3-70b.8x-h200.yaml"
    with H200.seen():
        assert resolve(path, hub).speculative_num_draft_tokens == 3
    bare = {key: value for key, value in LLAMA_70B_DRAFT.items() if key != "target_hidden_size"}
    with H200.seen(), pytest.raises(SystemExit):
        resolve(path, hub, draft=bare)
    assert "hidden_size 6144" in capsys.readouterr().err


def test_the_command_line_wins(hub: Hub) -> None:
    more = ("--context-length", "4096", "--cuda-graph-config", '{"decode": {"max_bs": 16}}')
    with RTX.seen():
        args = resolve(kimi("mla", "8x-rtx-pro-6000"), hub, *more)
    assert args.context_length == 4096
    assert max(args.cuda_graph_config.decode.bs) == 16


def test_a_longer_context_than_the_draft_knows_is_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why the Llama recipes state a context at all."""
    path = ROOT / "recipes" / "llama-3.1-8b.1x-gpu.yaml"
    with H200.seen(), pytest.raises(SystemExit):
        resolve(path, hub, "--context-length", "8192")
    assert "context length 2048" in capsys.readouterr().err
    with H200.seen():
        monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
        assert resolve(path, hub, "--context-length", "8192").context_length == 8192


def test_cpu_recipe(hub: Hub) -> None:
    args = resolve(ROOT / "recipes" / "nano.cpu.yaml", hub)
    assert args.device == "cpu"
    assert args.dtype == "float32"
    assert args.speculative_num_draft_tokens == 3


def test_the_page_lists_every_recipe() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(\.\./recipes/([\w.-]+)\)", page)) == NAMES
