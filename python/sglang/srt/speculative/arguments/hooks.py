"""Where the checks meet upstream: around the resolution of ``ServerArgs`` and around its two ways in.

``resolve`` runs before and after upstream's own resolution, whoever builds a ``ServerArgs`` (command line,
``sglang.Engine``, a test). ``prepare`` and ``launch`` add what only matters where a server starts.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.speculative.arguments import (
    checkpoint,
    choices,
    config_file,
    configs,
    draft,
    explain,
    flags,
    hub,
    machine,
    tokenizers,
)
from sglang.srt.speculative.arguments.faults import ArgumentFault, one_line
from sglang.srt.speculative.arguments.pair import DRAFT_PATH, Pair
from sglang.srt.speculative.arguments.target import require_capture

logger = logging.getLogger("sglang.fork.arguments")

TARGET_PATH = "--model-path"
NO_MODEL = ("none", "dummy")
# Upstream lets a context exceed what a model states under either of these.
LONGER_CONTEXT = ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_IS_IN_CI")
OWN_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODELSCOPE = "SGLANG_USE_MODELSCOPE"
ARGUMENT_FILES = (
    "/sglang/srt/server_args.py",
    "/sglang/srt/server_args_config_parser.py",
    "/sglang/srt/configs/model_config.py",
)
REFUSAL_LENGTH = 600


@dataclass(frozen=True)
class Side:
    """A target or a draft as found.

    ``directory`` is where its description lies; ``whole`` says that its weights belong there too, which a hub's
    cache does not promise.
    """

    config: checkpoint.Config | None = None
    directory: Path | None = None
    whole: bool = False


def resolve(original: Callable[[Any], None], server_args: Any) -> None:
    """Around ``ServerArgs.__post_init__``: check and fill in, then upstream, then choose the draft's backend.

    Raises:
        ArgumentFault: a ``ValueError`` with one sentence.
    """
    if str(server_args.model_path).lower() in NO_MODEL:
        original(server_args)
        return
    machine.check_page_size(server_args.page_size)
    flags.check_server_numbers(server_args)
    target, draft_config = _before(server_args)
    try:
        original(server_args)
    except Exception as error:
        if target is not None and not is_refusal(error):
            known = None if os.environ.get(OWN_MODELS) else known_model_types()
            trust = bool(server_args.trust_remote_code)
            explain.explain(target, error, path=server_args.model_path, known=known, trust=trust)
        raise
    if draft_config is not None:
        _choose_backend(server_args, draft_config)


def _before(args: Any) -> tuple[checkpoint.Config | None, checkpoint.Config | None]:
    """Checks and fillings that upstream's resolution depends on.

    Returns the target's configuration and that of an EAGLE-3 draft, each None where there is none to go by.
    """
    target = _find(TARGET_PATH, args.model_path, args.revision, "the model", args)
    algorithm = args.speculative_algorithm and str(args.speculative_algorithm).upper()
    path = args.speculative_draft_model_path
    context = _served_context(args, target.config)
    if algorithm is None:
        idle = [option for option, value in _speculative_options(args) if value is not None]
        if idle:
            has = "has" if len(idle) == 1 else "have"
            logger.warning("%s %s no effect without --speculative-algorithm", ", ".join(idle), has)
        return target.config, None
    _check_algorithm(args.speculative_algorithm)
    _fill_numbers(args, algorithm, context)
    if algorithm not in flags.EAGLE_FAMILY:
        return target.config, None
    if path is None:
        if target.config is not None:
            draft.require_draft(target.config, algorithm=algorithm, target_path=args.model_path)
        return target.config, None
    proposer = _find(DRAFT_PATH, path, args.speculative_draft_model_revision, "the draft", args)
    if proposer.directory is not None and target.directory is not None:
        remark = tokenizers.remark(target.directory, proposer.directory, draft_path=path)
        if remark:
            logger.warning("%s", remark)
    if algorithm != "EAGLE3" or target.config is None or proposer.config is None:
        return target.config, None
    _check_pair(args, target.config, proposer)
    _fill_shared(args, target.config, proposer.config)
    return target.config, proposer.config


def _speculative_options(args: Any) -> tuple[tuple[str, object], ...]:
    """What only a proposer reads, with the values given."""
    return (
        (DRAFT_PATH, args.speculative_draft_model_path),
        (flags.STEPS, args.speculative_num_steps),
        (flags.TOPK, args.speculative_eagle_topk),
        (flags.TOKENS, args.speculative_num_draft_tokens),
    )


def _check_algorithm(name: str) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    known = {member.name for member in SpeculativeAlgorithm} - {"NONE"} | {"NEXTN"}
    if name.upper() in known:
        return
    try:
        SpeculativeAlgorithm.from_string(name)  # Plugins may have registered others.
    except ValueError:
        raise flags.unknown_algorithm(name, known) from None


def _served_context(args: Any, target: checkpoint.Config | None) -> int | None:
    served: int | None = args.context_length
    if target is None:
        return served
    draft.check_served_context(
        target, served, path=args.model_path, allow_longer=_switched_on(*LONGER_CONTEXT)
    )
    return served or configs.context_length(target)


def _switched_on(*variables: str) -> bool:
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "y") for name in variables)


def _find(option: str, path: str, revision: str | None, what: str, args: Any) -> Side:
    """The configuration behind a path option, from a directory here or from the model hub."""
    if option == TARGET_PATH and args.load_format in ("gguf", "remote", "remote_instance"):
        return Side()
    local = checkpoint.local_directory(option, path, what=what)
    directory = local
    if directory is None and checkpoint.is_hub_id(path) and not _switched_on(MODELSCOPE):
        directory = hub.config_directory(option, path, revision)
    if directory is None:
        return Side()
    config = checkpoint.read_config(option, directory, what=what, overrides=args.json_model_override_args)
    return Side(config, directory, whole=local is not None)


def _fill_numbers(args: Any, algorithm: str, context: int | None) -> None:
    given = flags.Numbers(
        args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens
    )
    found = flags.resolve(algorithm, given, adaptive=bool(args.speculative_adaptive), context_length=context)
    args.speculative_num_steps = found.numbers.steps
    args.speculative_eagle_topk = found.numbers.topk
    args.speculative_num_draft_tokens = found.numbers.tokens
    for note in found.notes:
        logger.info("%s", note)


def attention_ranks(args: Any) -> int:
    """Ranks that attention heads are divided over: those of one data-parallel replica and one context part."""
    replicas = int(args.dp_size) if args.enable_dp_attention else 1
    return max(int(args.tp_size) // max(replicas, 1) // max(int(args.attn_cp_size), 1), 1)


def _check_pair(args: Any, target: checkpoint.Config, proposer: Side) -> None:
    config = proposer.config or {}
    path = args.speculative_draft_model_path
    own = bool(os.environ.get(OWN_MODELS))
    if not own:
        known, trust = known_model_types(), bool(args.trust_remote_code)
        draft.check_model_type(target, path=args.model_path, known=known, trust_remote_code=trust)
        draft.check_model_type(config, path=f"draft {path}", known=known, trust_remote_code=trust)
        models = Path(inspect.getfile(type(args))).parent / "models"
        require_capture(models, configs.architecture(target), path=args.model_path)
    tensors = None
    if proposer.directory is not None and proposer.whole:
        checkpoint.require_shards(DRAFT_PATH, proposer.directory)
        tensors = checkpoint.read_headers(DRAFT_PATH, proposer.directory)
    pair = Pair(
        target=target,
        draft=config,
        draft_path=path,
        tensors=tensors,
        attention_ranks=attention_ranks(args),
        served_context=args.context_length,
        allow_longer_context=_switched_on(*LONGER_CONTEXT),
        own_architectures=own,
    )
    for remark in draft.check(pair):
        logger.warning("%s", remark)


def known_model_types() -> frozenset[str]:
    """Every ``model_type`` that the installed transformers and upstream have a configuration class for."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

    return frozenset(CONFIG_MAPPING_NAMES) | frozenset(_CONFIG_REGISTRY)


def _fill_shared(args: Any, target: checkpoint.Config, config: checkpoint.Config) -> None:
    dtype = choices.shared_dtype(args.dtype, target, config)
    if dtype is not None:
        args.dtype = dtype.value
        logger.info("%s", dtype.note)
    method = choices.draft_quantization(args.quantization, args.speculative_draft_model_quantization, config)
    if method is not None:
        args.speculative_draft_model_quantization = method.value
        logger.info("%s", method.note)
    device = str(args.device or "")
    choices.draft_backend(args.speculative_draft_attention_backend, (), config, device=device.split(":")[0])


def _choose_backend(args: Any, config: checkpoint.Config) -> None:
    """Set the draft's attention backend once the target's is resolved."""
    choice = choices.draft_backend(
        args.speculative_draft_attention_backend,
        tuple(args.get_attention_backends()),
        config,
        device=str(args.device),
    )
    if choice is not None:
        args.override("spec-arguments", speculative_draft_attention_backend=choice.value)
        logger.info("%s", choice.note)


def launch(original: Callable[[Any], None], server_args: Any) -> None:
    """Around ``ServerArgs.check_server_args``, the last step before an engine starts its processes."""
    check_machine(server_args)
    original(server_args)


def prepare(original: Callable[[list[str]], Any], argv: list[str]) -> Any:
    """Around ``prepare_server_args``, the command line's way in: one line and status 2 in place of a traceback."""
    try:
        check_file(argv)
        server_args = original(argv)
        check_resolved(server_args)
        if server_args.node_rank == 0:
            machine.check_port(server_args.host, server_args.port)
    except Exception as error:
        if not is_refusal(error):
            raise
        logger.debug("where the arguments were refused", exc_info=error)
        print(f"sglang: error: {one_line(error, REFUSAL_LENGTH)}.", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return server_args


def check_file(argv: list[str]) -> None:
    """Refuse a ``--config`` file that upstream would ignore or misread.

    Raises:
        ArgumentFault: see ``config_file.check``.
    """
    config_file.check(argv, _options(argv))


def check_resolved(server_args: Any) -> None:
    """Refuse resolved arguments that this machine cannot serve, or that the engine refuses before it starts.

    Raises:
        ArgumentFault: ours. Upstream's own exceptions as ``is_refusal`` knows them.
    """
    check_machine(server_args)
    _check_as_engine(server_args)


def _options(argv: list[str]) -> dict[str, argparse.Action]:
    """Every option of the server; asked for only where a configuration file is named."""
    if not any(word.startswith(config_file.OPTION) for word in argv):
        return {}
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {option: action for action in parser._actions for option in action.option_strings}


def _check_as_engine(server_args: Any) -> None:
    """What the engine asks before it starts its processes, already here: a traceback there, a sentence here.

    A copy is asked, because some of upstream's checks fill in as well.
    """
    inspect.unwrap(type(server_args).check_server_args)(copy.deepcopy(server_args))


def is_refusal(error: Exception) -> bool:
    """Whether an exception was raised on purpose about arguments: ours, or upstream's where it resolves them.

    Upstream's count only with a text and from its argument files, so that a slip in the code keeps its traceback.
    """
    if isinstance(error, ArgumentFault):
        return True
    if not isinstance(error, (ValueError, AssertionError, NotImplementedError)) or not str(error).strip():
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    file = Path(place.tb_frame.f_code.co_filename).as_posix() if place is not None else ""
    return file.endswith(ARGUMENT_FILES) or "/sglang/srt/arg_groups/" in file


def check_machine(args: Any) -> None:
    """Refuse ranks without GPUs, checkpoints without weights, and weights that cannot fit into the memory."""
    if args.device == "cuda" and not (args.use_ray or args.is_ep_joiner):
        machine.check_devices(_devices_needed(args), _devices_visible())
    if str(args.model_path).lower() in NO_MODEL or args.load_format not in ("auto", "safetensors"):
        return
    total = 0.0
    sides = [(TARGET_PATH, args.model_path, "the model")]
    if args.speculative_algorithm is not None and args.speculative_draft_model_path not in (
        None,
        args.model_path,
    ):
        sides.append((DRAFT_PATH, args.speculative_draft_model_path, "the draft"))
    for option, path, what in sides:
        directory = checkpoint.local_directory(option, path, what=what)
        if directory is None:
            return
        checkpoint.require_weights(option, directory, what=what)
        total += checkpoint.weight_bytes(directory) * _widening(option, directory, what, args)
    if args.cpu_offload_gb > 0 or args.offload_group_size > 0:
        return
    on_host = args.device == "cpu"
    machine.check_memory(
        int(total),
        machine.available_bytes() if on_host else machine.device_bytes(args.device),
        place="this machine" if on_host else "one GPU",
        path=args.model_path,
        ranks=1 if on_host else int(args.tp_size) * int(args.pp_size),
    )


def _devices_needed(args: Any) -> int:
    """One more than the highest GPU number that this host's ranks take."""
    ranks = int(args.tp_size) * int(args.pp_size) // max(int(args.nnodes), 1)
    if args.dp_size > 1 and not args.enable_dp_attention:
        ranks *= int(args.dp_size)
    return int(args.base_gpu_id) + max(ranks - 1, 0) * int(args.gpu_id_step) + 1


def _devices_visible() -> int:
    import torch

    # Asks the driver's management library, so that no context is created in the launching process.
    return torch.cuda.device_count()


def _widening(option: str, directory: Path, what: str, args: Any) -> float:
    """Bytes in memory for each byte on disk, as far as ``--dtype`` and ``--quantization`` settle it."""
    config = checkpoint.read_config(option, directory, what=what, overrides=args.json_model_override_args)
    if config is None or configs.quantization(config) is not None:
        return 1.0
    if args.quantization is not None:
        return 0.25  # Quantised while loading, to four bits at the least.
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2}
    stated = configs.DTYPES.get(configs.named_dtype(config) or "")
    loaded = configs.loaded_dtype(config, str(args.dtype))
    return sizes[loaded] / sizes[stated] if stated and loaded else 1.0
