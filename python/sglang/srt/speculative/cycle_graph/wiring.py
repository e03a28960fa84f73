"""Pointing ``CycleBuffers`` at what upstream's three graph runners and its relay hold. Reads attributes, changes none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.cycle_graph.buffers import (
    Control,
    CycleBuffers,
    DraftInputs,
    ExtendInputs,
    Relay,
    Results,
    Sampling,
    Scratch,
    VerifyInputs,
)
from sglang.srt.speculative.cycle_graph.kernels import parts


@dataclass(frozen=True)
class Runners:
    """Upstream's graph runners of the three passes, each of which may be missing (None)."""

    draft: Any
    verify: Any
    extend: Any

    @classmethod
    def of(cls, worker: Any) -> Runners:
        """The runners of an EAGLE worker."""
        drafter = worker.draft_worker
        return cls(
            getattr(drafter, "cuda_graph_runner", None),
            getattr(worker.target_worker.model_runner, "decode_cuda_graph_runner", None),
            getattr(drafter, "cuda_graph_runner_for_draft_extend", None),
        )

    def present(self) -> dict[str, Any]:
        """Runners by pass, those that exist."""
        named = {"draft": self.draft, "verify": self.verify, "draft_extend": self.extend}
        return {name: runner for name, runner in named.items() if hasattr(runner, "backend")}

    def same(self, other: Runners) -> bool:
        """Whether all three are the same objects."""
        mine, theirs = (self.draft, self.verify, self.extend), (other.draft, other.verify, other.extend)
        return all(a is b for a, b in zip(mine, theirs, strict=True))

    def captured(self, name: str, batch: int) -> tuple[Any, Any] | None:
        """Graph and output of a pass at one batch size."""
        runner = self.present().get(name)
        graphs = getattr(getattr(runner, "backend", None), "_graphs", None)
        if runner is None or graphs is None:
            return None
        key = runner._make_graph_key(batch)
        if key not in graphs:
            return None
        return graphs[key], runner.backend._outputs[key]

    def batches(self) -> list[int]:
        """Batch sizes that all three passes were captured at, ascending."""
        if len(self.present()) < 3:
            return []
        return [
            batch
            for batch in sorted(self.verify.capture_bs)
            if all(self.captured(name, batch) for name in ("draft", "verify", "draft_extend"))
        ]


def prepare_relay(future_map: Any, hidden: torch.Tensor) -> Relay:
    """The relay's buffers, which upstream makes when the first prefill ends; here they are made now.

    Args:
        future_map: upstream's relay.
        hidden: a hidden state of the draft, [1, H] of its type, to size the buffers by.
    """
    from sglang.srt.managers.overlap_utils import RelayPayload

    if not future_map._forward_buf_initialized:
        device = hidden.device
        future_map._lazy_init_forward_buf(
            RelayPayload(
                bonus_tokens=torch.zeros(1, dtype=torch.int32, device=device),
                topk_p=torch.zeros(1, 1, dtype=torch.float32, device=device),
                topk_index=torch.zeros(1, 1, dtype=torch.int64, device=device),
                hidden_states=hidden,
            )
        )
    return Relay(
        lengths=future_map.new_seq_lens_buf,
        bonus=future_map.output_tokens_buf,
        token=future_map.topk_index_buf,
        probability=future_map.topk_p_buf,
        hidden=future_map.hidden_states_buf,
    )


def wire(
    runners: Runners,
    batch: int,
    relay: Relay,
    table: torch.Tensor,
    *,
    real_tokens: bool,
    drawn: bool = False,
) -> CycleBuffers:
    """Buffers of one captured batch size.

    Args:
        runners: of the three passes.
        batch: the captured size.
        relay: upstream's relay.
        table: upstream's request table.
        real_tokens: see ``CycleBuffers``.
        drawn: rows are sampled.

    Raises:
        ValueError: upstream's buffers are not what ``CycleBuffers`` describes.
    """
    width = int(runners.verify.captured_req_width)
    rows, steps, device = batch * width, width - 1, table.device
    drafted, verified, extended = (
        runners.captured(name, batch)[1]  # type: ignore[index]
        for name in ("draft", "verify", "draft_extend")
    )
    if verified.customized_info is not None:
        raise ValueError("the target returns customized_info, which a cycle does not carry to the host")
    d, v, e = runners.draft.buffers, runners.verify.buffers, runners.extend.buffers
    draft = DraftInputs(
        rows=d.req_pool_indices[:batch],
        lens=d.seq_lens[:batch],
        positions=d.positions[:batch],
        slots=d.out_cache_loc[: batch * steps],
        token=d.topk_index[:batch],
        probability=d.topk_p[:batch],
        hidden=d.hidden_states[:batch],
        proposed=drafted[2],
    )
    verify = VerifyInputs(
        rows=v.req_pool_indices[:batch],
        lens=v.seq_lens[:batch],
        tokens=v.input_ids[:rows],
        positions=v.positions[:rows],
        slots=v.out_cache_loc[:rows],
        logits=verified.next_token_logits,
        hidden=verified.hidden_states,
    )
    extend = ExtendInputs(
        rows=e.req_pool_indices[:batch],
        lens=e.seq_lens[:batch],
        tokens=e.input_ids[:rows],
        positions=e.positions[:rows],
        slots=e.out_cache_loc[:rows],
        hidden=e.hidden_states[:rows],
        correct=e.num_correct_drafts[:batch],
        accepted=e.num_accept_tokens[:batch],
        widths=e.extend_seq_lens[:batch],
        logits=extended.next_token_logits,
        states=extended.hidden_states,
    )
    buffers = CycleBuffers(
        batch=batch,
        width=width,
        table=table,
        control=Control(
            torch.zeros(4, dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        ),
        draft=draft,
        verify=verify,
        extend=extend,
        relay=relay,
        results=Results.allocate(batch, width, device),
        scratch=Scratch.allocate(
            batch, width, parts(verify.logits.shape[1]), parts(extend.logits.shape[1]), device
        ),
        real_tokens=real_tokens,
        sampling=Sampling.allocate(batch, device) if drawn else None,
    )
    buffers.check()
    return buffers
