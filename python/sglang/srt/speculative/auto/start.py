"""Setting the switch up on a worker, or saying why it stays off."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from sglang.srt.speculative.auto import graphs
from sglang.srt.speculative.auto.admission import ServerFacts, admit_server
from sglang.srt.speculative.auto.plain import Stubs
from sglang.srt.speculative.auto.rows import RowRing, ring_bytes, span_for
from sglang.srt.speculative.auto.runtime import SCRIPT, Runtime, make_controller

logger = logging.getLogger("sglang.fork.auto")

ON_CPU, ON_SIMULATED = "SGLANG_SPEC_AUTO_ON_CPU", "SGLANG_SPEC_AUTO_ON_SIMULATED"


def asked(variable: str) -> bool:
    """Whether a variable is set to something other than 0."""
    return os.environ.get(variable, "") not in ("", "0")


def server_facts(worker: Any) -> ServerFacts:
    """Read a worker whose pools, backends and graphs exist."""
    from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

    args = worker.server_args
    target, draft = worker.target_worker.model_runner, worker.draft_worker
    extend = draft.draft_extend_attn_backend or draft.draft_runner.attn_backend
    config = draft.draft_runner.model_config
    decode = getattr(args.cuda_graph_config, "decode", None)
    return ServerFacts(
        wanted=str(getattr(args, "speculative_auto", "off")) == "on",
        algorithm=str(args.speculative_algorithm or "").upper(),
        topk=int(worker.topk),
        device=str(worker.device).split(":")[0],
        graphs=getattr(decode, "backend", "disabled") == "full",
        target_backend=type(target.attn_backend).__name__,
        draft_backend=type(extend).__name__,
        draft_layers=int(config.num_hidden_layers),
        simulated=SIMULATE_ACC_LEN > 0,
        on_cpu=asked(ON_CPU) or asked(SCRIPT),
        on_simulated=asked(ON_SIMULATED),
        dp_attention=bool(args.enable_dp_attention),
        pipeline=int(args.pp_size) > 1,
        two_batch=bool(args.enable_two_batch_overlap),
        pdmux=bool(args.enable_pdmux),
        adaptive=bool(args.speculative_adaptive),
        multi_layer=bool(args.enable_multi_layer_eagle),
        disaggregated=str(args.disaggregation_mode or "null") != "null",
        lora=bool(args.enable_lora),
        mrope=bool(target.model_config.model_is_mrope),
        hybrid_pool=hasattr(target.req_to_token_pool, "mamba_pool"),
        sliding_window=bool(target.is_hybrid_swa),
        rejection_sampling=bool(args.speculative_use_rejection_sampling),
        hisparse=target.hisparse_coordinator is not None,
        encoder=bool(target.model_config.is_encoder_decoder),
        streaming_session=bool(args.enable_streaming_session),
    )


def start(worker: Any) -> tuple[Runtime | None, str | None]:
    """The switch of ``worker``, or None and the reason in words."""
    reason = admit_server(server_facts(worker))
    if reason is not None:
        return None, reason
    target = worker.target_worker.model_runner
    slots, span, width, dtype = ring_shape(worker)
    captured = None
    if not str(worker.device).startswith("cpu"):
        captured, reason = graphs.build(target, ring_bytes(slots, span, width, dtype.itemsize))
        if captured is None:
            return None, reason
    ring = RowRing(slots, span, width, dtype, worker.device)
    return Runtime(worker, ring, make_stubs(worker), captured, make_controller()), None


def ring_shape(worker: Any) -> tuple[int, int, int, torch.dtype]:
    """Request slots, rows a request, columns and dtype of the rows that wait for the draft."""
    from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

    runner = worker.draft_worker.draft_runner
    slots = int(worker.target_worker.model_runner.req_to_token_pool.req_to_token.shape[0])
    width = int(get_draft_input_from_target_hidden_dim(runner))
    dtype: torch.dtype = runner.model_config.dtype
    return slots, span_for(slots, width, dtype.itemsize), width, dtype


def make_stubs(worker: Any) -> Stubs:
    """What a plain result carries in the place of draft inputs."""
    from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

    runner = worker.draft_worker.draft_runner
    hidden, dtype = get_draft_recurrent_hidden_state_spec(runner)
    return Stubs(int(worker.topk), hidden, dtype or runner.model_config.dtype, worker.device)
