"""Where the checks meet upstream: around the resolution of ``ServerArgs`` and around its two ways in.

``resolve`` runs before and after upstream's own resolution, whoever builds a ``ServerArgs`` (command line,
``sglang.Engine``, a test). ``prepare`` and ``launch`` add what only matters where a server starts.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.speculative.arguments import checkpoint, choices, configs, draft, flags, machine, tokenizers
from sglang.srt.speculative.arguments.faults import ArgumentFault, one_line

logger = logging.getLogger("sglang.fork.arguments")

TARGET_PATH = "--model-path"
NO_MODEL = ("none", "dummy")
LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
OWN_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODELSCOPE = "SGLANG_USE_MODELSCOPE"


@dataclass(frozen=True)
class Side:
    """A target or a draft as found: its configuration, and its directory where it lies on this machine."""

    config: checkpoint.Config | None = None
    directory: Path | None = None


def resolve(original: Callable[[Any], None], server_args: Any) -> None:
    """Around ``ServerArgs.__post_init__``: check and fill in, then upstream, then choose the draft's backend.

    Raises:
        ArgumentFault: a ``ValueError`` with one sentence.
    """
    if str(server_args.model_path).lower() in NO_MODEL:
        original(server_args)
        return
    draft_config = _before(server_args)
    original(server_args)
    if draft_config is not None:
        _choose_backend(server_args, draft_config)


def _before(args: Any) -> checkpoint.Config | None:
    """Checks and fillings that upstream's resolution depends on; returns an EAGLE-3 draft's configuration."""
    target = _find(TARGET_PATH, args.model_path, args.revision, "the model", args)
    algorithm = args.speculative_algorithm and str(args.speculative_algorithm).upper()
    path = args.speculative_draft_model_path
    if algorithm is None:
        if path is not None:
            logger.warning("%s has no effect without --speculative-algorithm", draft.DRAFT_PATH)
        return None
    context: int | None = args.context_length
    if context is None and target.config is not None:
        context = configs.context_length(target.config)
    _fill_numbers(args, algorithm, context)
    if algorithm not in flags.EAGLE_FAMILY:
        return None
    if path is None:
        if target.config is not None:
            draft.require_draft(target.config, algorithm=algorithm, target_path=args.model_path)
        return None
    proposer = _find(draft.DRAFT_PATH, path, args.speculative_draft_model_revision, "the draft", args)
    if proposer.directory is not None and target.directory is not None:
        remark = tokenizers.remark(target.directory, proposer.directory, draft_path=path)
        if remark:
            logger.warning("%s", remark)
    if algorithm != "EAGLE3" or target.config is None or proposer.config is None:
        return None
    _check_pair(args, target.config, proposer)
    _fill_shared(args, target.config, proposer.config)
    return proposer.config


def _find(option: str, path: str, revision: str | None, what: str, args: Any) -> Side:
    """The configuration behind a path option, from a directory here or from the model hub."""
    if option == TARGET_PATH and args.load_format in ("gguf", "remote", "remote_instance"):
        return Side()
    directory = checkpoint.local_directory(option, path, what=what)
    if directory is None:
        directory = _hub_directory(option, path, revision)
        if directory is None:
            return Side()
    config = checkpoint.read_config(option, directory, what=what, overrides=args.json_model_override_args)
    return Side(config, directory)


def _hub_directory(option: str, path: str, revision: str | None) -> Path | None:
    """Where the hub's cache keeps a repository's ``config.json``, fetched if need be; None where that says nothing."""
    if not checkpoint.is_hub_id(path) or os.environ.get(MODELSCOPE, "").lower() in ("1", "true"):
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(path, checkpoint.CONFIG_NAME, revision=revision)).parent
    except LocalEntryNotFoundError as error:
        reason = "it is not in the cache and the hub cannot be reached"
        _raise_unreachable(option, path, reason, error)
    except EntryNotFoundError:
        return None  # A repository without config.json may be of a kind that only upstream knows.
    except (OSError, ValueError) as error:
        _raise_unreachable(option, path, one_line(error), error)
    return None


def _raise_unreachable(option: str, path: str, reason: str, cause: Exception) -> None:
    raise ArgumentFault(
        f"{option} {path}",
        f"is no directory on this machine, and no such repository could be fetched ({reason})",
        "correct the path, or download the checkpoint and give its directory",
        code="path-unreachable",
    ) from cause


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
    """Ranks that attention heads are divided over: with data-parallel attention only those of one replica."""
    if args.enable_dp_attention and args.dp_size > 1:
        return max(int(args.tp_size) // int(args.dp_size), 1)
    return int(args.tp_size)


def _check_pair(args: Any, target: checkpoint.Config, proposer: Side) -> None:
    config = proposer.config or {}
    path = args.speculative_draft_model_path
    own = bool(os.environ.get(OWN_MODELS))
    if not own:
        draft.check_model_type(
            config, path=path, known=known_model_types(), trust_remote_code=bool(args.trust_remote_code)
        )
    directory = proposer.directory
    tensors = checkpoint.read_headers(draft.DRAFT_PATH, directory) if directory is not None else None
    pair = draft.Pair(
        target=target,
        draft=config,
        draft_path=path,
        tensors=tensors,
        attention_ranks=attention_ranks(args),
        served_context=args.context_length,
        allow_longer_context=os.environ.get(LONGER_CONTEXT, "").lower() in ("1", "true", "yes", "y"),
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
    choices.draft_backend(args.speculative_draft_attention_backend, (), config)


def _choose_backend(args: Any, config: checkpoint.Config) -> None:
    """Set the draft's attention backend once the target's is resolved."""
    choice = choices.draft_backend(
        args.speculative_draft_attention_backend, tuple(args.get_attention_backends()), config
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
        server_args = original(argv)
        check_machine(server_args)
        if server_args.node_rank == 0:
            machine.check_port(server_args.host, server_args.port)
    except ArgumentFault as fault:
        print(f"sglang: error: {fault}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return server_args


def check_machine(args: Any) -> None:
    """Refuse checkpoints without weights, and weights that cannot fit into this machine's memory."""
    if str(args.model_path).lower() in NO_MODEL or args.load_format not in ("auto", "safetensors"):
        return
    total = 0.0
    sides = [(TARGET_PATH, args.model_path, "the model")]
    if args.speculative_algorithm is not None and args.speculative_draft_model_path not in (
        None,
        args.model_path,
    ):
        sides.append((draft.DRAFT_PATH, args.speculative_draft_model_path, "the draft"))
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
        machine.available_bytes() if on_host else _device_bytes(args.device),
        place="this machine" if on_host else "one GPU",
        path=args.model_path,
        ranks=1 if on_host else int(args.tp_size) * int(args.pp_size),
    )


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


def _device_bytes(device: str) -> int | None:
    """Memory of the smallest accelerator in sight; None where upstream cannot tell."""
    from sglang.srt.utils import get_device_memory_capacity

    try:
        mebibytes = get_device_memory_capacity(device)
    except (OSError, RuntimeError, ValueError):
        return None
    return int(mebibytes * (1 << 20)) if mebibytes else None
