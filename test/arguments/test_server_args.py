"""The checks in the composed server's own ``ServerArgs``, each held against upstream alone.

Where the fork refuses or fills in, the same arguments are also given to upstream's undecorated functions: they
must then fail without a word or be taken as they are, or the check would not be needed.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import DEEPSEEK, DRAFT, KIMI, LLAMA, MLA_DRAFT, Tensors, draft_tensors, write
from sglang import fork
from sglang.srt import server_args as upstream
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.arguments import ArgumentFault, hooks
from sglang.srt.speculative.arguments.choices import DRAFTING
from sglang.srt.speculative.arguments.draft import EAGLE3_ARCHITECTURES
from sglang.srt.speculative.arguments.hooks import prepare
from sglang.srt.speculative.arguments.pair import DRAFT_PATH
from sglang.srt.speculative.arguments.target import can_capture

SMALL: Tensors = {"model.norm.weight": ("BF16", (32,), None)}
IDS = "eagle_aux_hidden_state_layer_ids"

Make = Callable[..., ServerArgs]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of hub repositories are answered from the cache, which is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream as it is with every topic switched off: the decorated functions themselves."""
    for name in ("__post_init__", "check_server_args"):
        monkeypatch.setattr(ServerArgs, name, inspect.unwrap(getattr(ServerArgs, name)))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Build a ``ServerArgs`` for a made-up target and draft."""

    def build(
        target: dict[str, Any] = LLAMA,
        draft: dict[str, Any] | None = DRAFT,
        *,
        table: list[int] | None = None,
        **options: Any,
    ) -> ServerArgs:
        # Upstream keeps configurations by path, so that a path must not change its contents.
        here = tmp_path / str(len(list(tmp_path.iterdir())))
        options.setdefault("model_path", str(write(here / "target", target, SMALL)))
        if draft is not None:
            place = write(here / "draft", draft, draft_tensors(draft, table))
            options.setdefault("speculative_draft_model_path", str(place))
        options.setdefault("speculative_algorithm", "EAGLE3")
        return ServerArgs(device=options.pop("device", "cpu"), **options)

    return build


def numbers(args: ServerArgs) -> tuple[Any, Any, Any]:
    """Steps, top-k and draft tokens as resolved."""
    return args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens


ALONE = (
    ({"speculative_num_steps": 2}, (2, 1, 3), TypeError),
    ({"speculative_eagle_topk": 1}, (3, 1, 4), AssertionError),
    ({"speculative_num_draft_tokens": 3}, (2, 1, 3), AssertionError),
)


@pytest.mark.parametrize(("given", "expected", "_"), ALONE)
def test_sglang_22895(
    make: Make, caplog: pytest.LogCaptureFixture, given: dict[str, int], expected: tuple[int, ...], _: type
) -> None:
    with caplog.at_level(logging.INFO, "sglang.fork.arguments"):
        assert numbers(make(**given)) == expected
    assert sum("filled in with" in record.message for record in caplog.records) == 2


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize(("given", "_", "error"), ALONE)
def test_sglang_22895_upstream_alone(
    make: Make, given: dict[str, int], _: object, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        make(**given)
    assert "--speculative" not in str(caught.value)


def test_nothing_given_is_upstreams_choice(make: Make) -> None:
    assert numbers(make()) == (5, 4, 8)
    assert numbers(make(DEEPSEEK, MLA_DRAFT)) == (3, 1, 4)


@dataclass(frozen=True)
class Case:
    """A configuration that the fork refuses by ``code`` and that upstream takes."""

    name: str
    code: str
    options: dict[str, Any]
    target: dict[str, Any] | None = None
    draft: dict[str, Any] | None = None
    lone: bool = False


CHAIN = {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
CASES = (
    Case("sglang_22895 steps -1", "number-low", CHAIN | {"speculative_num_steps": -1}),
    Case("sglang_22895 steps 0", "number-low", CHAIN | {"speculative_num_steps": 0}),
    Case("topk 1 with 8 tokens", "chain-width", CHAIN | {"speculative_num_draft_tokens": 8}),
    Case("sglang_8228 2 tokens", "chain-width", CHAIN | {"speculative_num_draft_tokens": 2}),
    Case("huge", "number-high", {"speculative_num_steps": 4000, "speculative_eagle_topk": 1}),
    Case(
        "tree too wide",
        "tree-width",
        CHAIN | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 64},
    ),
    Case("sglang_36528 Kimi without draft", "draft-absent", CHAIN, target=KIMI, lone=True),
    Case("sglang_36528 Llama without draft", "draft-absent", CHAIN, lone=True),
    Case("sglang_36528 DeepSeek without draft", "draft-absent", CHAIN, target=DEEPSEEK, lone=True),
    Case("a target as draft", "draft-architecture", CHAIN, draft=LLAMA | {"draft_vocab_size": 1000}),
    Case("vllm_43369", "vocabulary", CHAIN, draft=DRAFT | {"vocab_size": 1200}),
    Case("vllm_43369 no map", "map-missing", CHAIN, draft=DRAFT | {"draft_vocab_size": 320}),
    Case("width", "width", CHAIN, draft=DRAFT | {"hidden_size": 64}),
    Case("head count", "heads-ranks", CHAIN | {"tp_size": 8}),
    Case("vllm_46788 last layer", "aux-outside", CHAIN, draft=DRAFT | {"eagle_config": {IDS: [1, 3, 6]}}),
    Case(
        "no default layers",
        "aux-default",
        CHAIN,
        target=LLAMA | {"num_hidden_layers": 6},
        draft=DRAFT | {"eagle_config": {}},
    ),
    Case("context", "context", CHAIN, draft=DRAFT | {"max_position_embeddings": 100}),
    Case("sglang_25673 model_type", "model-type", CHAIN, draft=DRAFT | {"model_type": "kimi_k22"}),
    Case("model_type of the target", "model-type", CHAIN, target=LLAMA | {"model_type": "lama"}),
    Case(
        "target without hidden states",
        "target-capture",
        CHAIN,
        target=LLAMA | {"architectures": ["OlmoForCausalLM"]},
    ),
    Case("served context", "context-target", CHAIN | {"context_length": 4096}),
    Case("unknown algorithm", "algorithm", CHAIN | {"speculative_algorithm": "EAGEL3"}),
    Case("draft backend", "draft-backend", CHAIN | {"speculative_draft_attention_backend": "flashmla"}),
    Case("draft quantisation", "draft-quantization", CHAIN | {"speculative_draft_model_quantization": "awq"}),
    Case("draft path missing", "path-missing", CHAIN | {"speculative_draft_model_path": "/no/such/draft"}),
    Case("draft not on the hub", "path-unreachable", CHAIN | {"speculative_draft_model_path": "no/draft"}),
    Case("model path missing", "path-missing", CHAIN | {"model_path": "./no/model"}),
    Case("page of no tokens", "page-size", CHAIN | {"page_size": 0}),
    Case("no ranks", "number-low", CHAIN | {"tp_size": 0}),
    Case("no context", "number-low", CHAIN | {"context_length": 0}),
    Case("no requests", "number-low", CHAIN | {"max_running_requests": -1}),
    Case("no memory", "number-low", CHAIN | {"mem_fraction_static": 0.0}),
    Case("more than all the memory", "number-high", CHAIN | {"mem_fraction_static": 1.5}),
    Case("not a share", "number-high", CHAIN | {"mem_fraction_static": float("nan")}),
    Case("model not on the hub", "path-unreachable", CHAIN | {"model_path": "no/model"}),
)


# Without speculation upstream's own resolution meets these, and ends in a traceback.
PLAIN = {"speculative_algorithm": None, "speculative_draft_model_path": None}
CASES += (
    Case("no architectures", "config-values", PLAIN, target=LLAMA | {"architectures": []}, lone=True),
    Case("no heads", "config-values", PLAIN, target=LLAMA | {"num_attention_heads": 0}, lone=True),
    Case("width in words", "config-values", PLAIN, target=LLAMA | {"hidden_size": "x"}, lone=True),
    Case("dtype of none", "config-values", PLAIN, target=LLAMA | {"torch_dtype": "float7"}, lone=True),
    Case("a type of none", "model-type", PLAIN, target=LLAMA | {"model_type": "lama"}, lone=True),
)


def build(make: Make, case: Case) -> ServerArgs:
    """``ServerArgs`` of a case."""
    draft = None if case.lone else case.draft or DRAFT
    return make(case.target or LLAMA, draft, **case.options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(make: Make, case: Case) -> None:
    with pytest.raises(ArgumentFault) as caught:
        build(make, case)
    assert caught.value.code == case.code, str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_upstream_alone_takes_it_or_fails_unclearly(make: Make, case: Case) -> None:
    """Negative control: without the topic none of these is one sentence that names the option."""
    try:
        build(make, case)
    except Exception as error:
        text = str(error)
        assert not isinstance(error, ArgumentFault)
        assert "--speculative" not in text or "\n" in text, text


def test_sglang_23490_draft_backend_is_chosen(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """An MHA draft beside an MLA target on an MLA-only backend."""
    with caplog.at_level(logging.INFO, "sglang.fork.arguments"):
        args = make(KIMI, device="cuda", attention_backend="flashmla", **CHAIN)
    assert args.get_attention_backends() == ("flashmla", "flashmla")
    assert args.speculative_draft_attention_backend == "triton"
    assert "flashmla cannot serve the draft's GQA attention" in caplog.text


@pytest.mark.usefixtures("stock")
def test_sglang_23490_upstream_alone(make: Make) -> None:
    args = make(KIMI, device="cuda", attention_backend="flashmla", **CHAIN)
    assert args.speculative_draft_attention_backend is None


def test_one_dtype_for_both(make: Make) -> None:
    assert make(draft=DRAFT | {"torch_dtype": "float16"}, **CHAIN).dtype == "bfloat16"
    assert make(**CHAIN).dtype == "auto"


def test_numbers_without_an_algorithm_are_named(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """They would be ignored without a word, and the user would wonder where the speed is."""
    with caplog.at_level(logging.WARNING, "sglang.fork.arguments"):
        make(speculative_algorithm=None, speculative_draft_model_path=None, speculative_num_steps=2)
    assert "--speculative-num-steps has no effect without --speculative-algorithm" in caplog.text


def test_map_into_the_target(make: Make) -> None:
    reduced = DRAFT | {"draft_vocab_size": 320}
    make(draft=reduced, table=[2 * 320] * 320, **CHAIN)
    with pytest.raises(ArgumentFault, match="sends draft token 0 to target token 1000"):
        make(draft=reduced, table=[1000] * 320, **CHAIN)


def test_wrapper_with_both_kinds_of_draft(make: Make) -> None:
    """Kimi-K2.5's wrapper, whose numbers stand in ``text_config``."""
    for draft in (DRAFT, MLA_DRAFT):
        args = make(KIMI, draft, **CHAIN)
        assert numbers(args) == (2, 1, 3)


SHIPPED = Path(__file__).parents[2] / "models"


def test_the_shipped_pair(make: Make, tmp_path: Path) -> None:
    """Real weights with a real map; and the same draft for a target of half its vocabulary."""
    paths = {
        "model_path": str(SHIPPED / "nano"),
        "speculative_draft_model_path": str(SHIPPED / "nano-eagle3"),
    }
    assert numbers(make(draft=None, speculative_num_steps=2, **paths)) == (2, 1, 3)
    other = json.loads((SHIPPED / "nano" / "config.json").read_text()) | {"vocab_size": 1280}
    paths["model_path"] = str(write(tmp_path / "half", other))
    with pytest.raises(ArgumentFault, match=r"vocab_size 2560 .* must be the target's 1280"):
        make(draft=None, speculative_num_steps=2, **paths)


def test_resolved_arguments_resolve_to_themselves(make: Make) -> None:
    """Copies are resolved again in some launch modes, and sent to child processes."""
    args = make(speculative_num_steps=2)
    again = ServerArgs(
        model_path=args.model_path,
        device="cpu",
        speculative_algorithm=args.speculative_algorithm,
        speculative_draft_model_path=args.speculative_draft_model_path,
        speculative_num_steps=args.speculative_num_steps,
        speculative_eagle_topk=args.speculative_eagle_topk,
        speculative_num_draft_tokens=args.speculative_num_draft_tokens,
    )
    assert numbers(again) == numbers(args) == numbers(pickle.loads(pickle.dumps(args)))


def test_other_algorithms_are_left_alone(make: Make) -> None:
    args = make(draft=None, speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)
    assert args.speculative_num_draft_tokens == 8


def test_a_draft_without_an_algorithm_is_remarked(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(speculative_algorithm=None)
    assert f"{DRAFT_PATH} has no effect" in caplog.text


def test_dummy_models_pass() -> None:
    assert ServerArgs(model_path="dummy").model_path == "dummy"


def test_weights_are_asked_for_at_launch_only(make: Make, tmp_path: Path) -> None:
    """Flags of a deployment can be resolved on a machine that lacks its weights."""
    target = write(tmp_path / "bare", LLAMA)
    args = make(model_path=str(target), **CHAIN)
    with pytest.raises(ArgumentFault) as caught:
        args.check_server_args()
    assert caught.value.code == "weights-missing"


def test_too_large_for_the_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    args = make(**CHAIN)
    monkeypatch.setattr("sglang.srt.speculative.arguments.machine.available_bytes", lambda: 1000)
    with pytest.raises(ArgumentFault) as caught:
        args.check_server_args()
    assert caught.value.code == "memory"


def test_wider_in_memory_than_on_disk(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = make(dtype="float32", **CHAIN)
    on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr(
        "sglang.srt.speculative.arguments.machine.available_bytes", lambda: int(1.5 * on_disk)
    )
    with pytest.raises(ArgumentFault, match="for weights alone"):
        args.check_server_args()


def test_the_list_of_draft_architectures_is_the_servers() -> None:
    """Every model file of the composed server that names an EAGLE-3 entry class, and no other."""
    found = set()
    for file in (Path(upstream.__file__).parent / "models").glob("*eagle*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                found |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    assert {name for name in found if "eagle3" in name.lower()} == set(EAGLE3_ARCHITECTURES)


def test_the_list_of_drafting_backends_is_the_servers() -> None:
    """Keys of both tables of upstream's factory."""
    tree = ast.parse(
        (Path(upstream.__file__).parent / "speculative" / "draft_utils.py").read_text(encoding="utf-8")
    )
    tables = [
        {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.targets[0]) == "backend_map"
    ]
    assert len(tables) == 2
    assert tables[0] == tables[1] == set(DRAFTING)


def test_which_targets_hand_out_hidden_states() -> None:
    """Read from the composed server's model files."""
    models = Path(upstream.__file__).parent / "models"
    for name in (
        "DeepseekV3ForCausalLM",
        "LlamaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Qwen3ForCausalLM",
    ):
        assert can_capture(models, name) is True, name
    for name in ("OlmoForCausalLM", "GPT2LMHeadModel"):
        assert can_capture(models, name) is False, name
    assert can_capture(models, "NotThereForCausalLM") is None


def test_more_ranks_than_gpus(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    args = make(DEEPSEEK, MLA_DRAFT, device="cuda", tp_size=8, attention_backend="triton", **CHAIN)
    for visible, says in ((0, "none is visible"), (7, "take 8 GPUs but only 7")):
        monkeypatch.setattr("torch.cuda.device_count", lambda visible=visible: visible)
        with pytest.raises(ArgumentFault, match=says):
            args.check_server_args()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    args.check_server_args()


def test_upstreams_own_refusals_are_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal with a text from upstream's argument files; anything else keeps its traceback."""
    target = str(write(tmp_path / "target", LLAMA, SMALL))
    with pytest.raises(SystemExit) as caught:
        upstream.prepare_server_args(
            ["--model-path", target, "--device", "cpu", "--speculative-draft-window-size", "-1"]
        )
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sglang: error: ")]
    assert "--speculative-draft-window-size must be positive, got -1" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--served-model-name", "a:b"), "colon"),
        (("--tokenizer-worker-num", "0"), "worker num"),
        (("--disable-cuda-graph-padding", "--enable-torch-compile"), "--disable-cuda-graph-padding"),
        (("--retraction-policy", "priority"), "--enable-priority-scheduling"),
        (("--schedule-conservativeness", "-1"), "non-negative"),
    ],
)
def test_what_the_engine_would_refuse_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Upstream asks these after parsing, in the engine, where they end in a traceback."""
    target = str(write(tmp_path / "target", LLAMA, SMALL))
    with pytest.raises(SystemExit) as ended:
        upstream.prepare_server_args(["--model-path", target, "--device", "cpu", *arguments])
    assert ended.value.code == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("sglang: error: ")]
    assert says in line


def test_the_engines_checks_leave_the_arguments_as_they_are(make: Make) -> None:
    args = make()
    before = {name: repr(value) for name, value in vars(args).items()}
    hooks._check_as_engine(args)
    assert {name: repr(value) for name, value in vars(args).items()} == before


def test_a_slip_in_the_code_is_no_refusal() -> None:
    for error in (ValueError("from elsewhere"), AssertionError(), KeyError("x")):
        with pytest.raises(type(error)):
            prepare(_raiser(error), [])


def _raiser(error: Exception) -> Callable[[list[str]], Any]:
    def build(argv: list[str]) -> Any:
        raise error

    return build


def test_topic_is_in_force() -> None:
    assert fork.enabled("spec-arguments")


def test_a_required_verify_graph_is_refused_where_it_cannot_be(make: Make) -> None:
    with pytest.raises(ArgumentFault, match="a CPU has no graphs"):
        make(speculative_verify_graph="require")
    assert make(speculative_verify_graph="off").speculative_verify_graph == "off"
    assert make().speculative_verify_graph == "auto"
