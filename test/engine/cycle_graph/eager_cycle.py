"""Test-only plugin: the program of the cycle graph, run eagerly on a CPU server.

The buffers are allocated for the batch at hand, the glue is the PyTorch one, and the passes are upstream's model
passes over the same static tensors that a GPU server captures. Scheduler, relay and hooks are the real ones, so joins,
ends, aborts and retractions meet the cycle as they do on a GPU. Needs ``overlapped_cpu``: the relay only works there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

ENTRY = "eager_cycle"
MARK = "cycles run as one eager program"


class EagerGraphs:
    """Stands in for ``CycleGraphs``: same calls, no capture."""

    def __init__(self, worker: Any, future_map: Any) -> None:
        from sglang.srt.speculative.cycle_graph.wiring import prepare_relay
        from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

        self.worker = worker
        self.width = int(worker.speculative_num_draft_tokens)
        size, dtype = get_draft_recurrent_hidden_state_spec(worker.draft_worker.draft_runner)
        self.relay = prepare_relay(future_map, torch.zeros(1, size, dtype=dtype))
        self._turn = 0
        self._held: list[Any] = []
        self.entries: dict[Any, Any] = {}

    def size_for(self, batch: int, drawn: bool = False) -> int:
        """Any batch size runs."""
        return batch

    def current(self, worker: Any) -> bool:
        """Nothing is captured."""
        return True

    def launch(self, rows: torch.Tensor, simulated: int = 0, sampling: Any = None) -> Any:
        """One cycle, eagerly."""
        from sglang.srt.speculative.cycle_graph import program, steps
        from sglang.srt.speculative.cycle_graph.buffers import RING
        from sglang.srt.speculative.cycle_graph.graphs import Launched

        batch, slot = rows.shape[0], self._turn % RING
        self._turn += 1
        buffers = self._buffers(batch, sampling is not None)
        steps.load(buffers, rows, slot, simulated, self._turn)
        if sampling is not None:
            steps.load_sampling(buffers, sampling)
        program.run(buffers, steps, EagerPasses(self.worker, buffers))
        results = buffers.results
        return Launched(
            batch, results.tokens[slot], results.lengths[slot], results.good[slot], results.marks[slot]
        )

    def _buffers(self, b: int, drawn: bool) -> Any:
        from sglang.srt.speculative.cycle_graph import buffers as kinds
        from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

        w = self.width
        drafter, target = self.worker.draft_worker.draft_runner, self.worker.target_worker.model_runner
        packed = get_draft_input_from_target_hidden_dim(drafter)
        dtype = drafter.model_config.dtype
        hidden = self.relay.hidden.shape[1]
        vocabulary = target.model_config.vocab_size
        config = drafter.model_config.hf_config
        drafts = getattr(config, "draft_vocab_size", None) or vocabulary

        def number(*size: int, of: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=of)

        rows, lens = number(b), number(b)
        tokens, positions, slots = number(b * w), number(b * w), number(b * w)
        made = kinds.CycleBuffers(
            batch=b,
            width=w,
            table=target.req_to_token_pool.req_to_token,
            control=kinds.Control(number(4, of=torch.int32), number(b)),
            draft=kinds.DraftInputs(
                rows, lens, number(b), number(b * (w - 1)), number(b, 1), number(b, 1, of=torch.float32),
                number(b, hidden, of=dtype), number(b, w - 1),
            ),
            verify=kinds.VerifyInputs(
                rows, lens, tokens, positions, slots, number(b * w, vocabulary, of=torch.float32),
                number(b * w, packed, of=dtype),
            ),
            extend=kinds.ExtendInputs(
                rows, lens, tokens, positions, slots, number(b * w, packed, of=dtype),
                *(number(b, of=torch.int32) for _ in range(3)),
                number(b * w, drafts, of=torch.float32), number(b * w, hidden, of=dtype),
            ),
            relay=self.relay,
            results=kinds.Results.allocate(b, w, torch.device("cpu")),
            scratch=kinds.Scratch.allocate(b, w, 1, 1, torch.device("cpu")),
            sampling=kinds.Sampling.allocate(b, torch.device("cpu")) if drawn else None,
        )  # fmt: skip
        made.check()
        return made


class EagerPasses:
    """Upstream's three passes over the static tensors."""

    def __init__(self, worker: Any, buffers: Any) -> None:
        self.worker, self.buffers = worker, buffers
        self.drafter = worker.draft_worker
        self.target = worker.target_worker.model_runner

    def _batch(
        self, mode: Any, inputs: Any, tokens: Any, slots: Any, spec: Any, hidden: Any, runner: Any
    ) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        return ForwardBatch(
            forward_mode=mode,
            batch_size=self.buffers.batch,
            input_ids=tokens,
            req_pool_indices=inputs.rows,
            seq_lens=inputs.lens,
            out_cache_loc=slots,
            seq_lens_sum=int(inputs.lens.sum()),
            seq_lens_cpu=inputs.lens,
            positions=inputs.positions,
            spec_algorithm=runner.spec_algorithm,
            spec_info=spec,
            capture_hidden_mode=hidden,
        )

    def draft(self) -> None:
        """Draft steps into ``proposed``."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        d = self.buffers.draft
        spec = EagleDraftInput(
            topk_p=d.probability, topk_index=d.token, hidden_states=d.hidden, num_tokens_per_req=1,
            capture_hidden_mode=CaptureHiddenMode.LAST,
        )  # fmt: skip
        batch = self._batch(
            ForwardMode.DECODE, d, None, d.slots, spec, CaptureHiddenMode.LAST, self.drafter.draft_runner
        )
        self.drafter.draft_attn_backend.init_forward_metadata(batch)
        batch.mark_forward_metadata_ready()
        proposed = self.drafter.draft_forward(batch)[2]
        d.positions.sub_(self.buffers.steps - 1)
        d.proposed.copy_(proposed)

    def verify(self) -> None:
        """Target verify into ``logits`` and ``hidden``."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        v = self.buffers.verify
        spec = EagleVerifyInput(
            draft_token=v.tokens, custom_mask=None, positions=v.positions, retrieve_index=None,
            retrieve_next_token=None, retrieve_next_sibling=None, retrieve_cum_len=None,
            spec_steps=self.buffers.steps, topk=1, draft_token_num=self.buffers.width,
            capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
        )  # fmt: skip
        batch = self._batch(
            ForwardMode.TARGET_VERIFY, v, v.tokens, v.slots, spec, CaptureHiddenMode.FULL, self.target
        )
        output = self.target.forward(batch).logits_output
        v.logits.copy_(output.next_token_logits)
        v.hidden.copy_(output.hidden_states)

    def extend(self) -> None:
        """Draft extend into ``logits`` and ``states``."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

        e, width = self.buffers.extend, self.buffers.width
        runner = self.drafter.draft_runner
        spec = EagleDraftExtendInput(
            hidden_states=e.hidden, num_correct_drafts=e.correct, num_accept_tokens=e.accepted,
            num_tokens_per_req=width, num_tokens_for_logprob_per_req=width,
        )  # fmt: skip
        batch = self._batch(
            ForwardMode.DRAFT_EXTEND_V2, e, e.tokens, e.slots, spec, CaptureHiddenMode.FULL, runner
        )
        batch.extend_seq_lens = e.widths
        batch.extend_seq_lens_cpu = [width] * self.buffers.batch
        batch.extend_prefix_lens = e.lens - width
        batch.extend_num_tokens = self.buffers.batch * width
        runner.attn_backend.init_forward_metadata(batch)
        batch.mark_forward_metadata_ready()
        output = runner.forward(batch).logits_output
        e.logits.copy_(output.next_token_logits)
        e.states.copy_(output.hidden_states)


def activate() -> None:
    """Entry point: in a scheduler process, admit the CPU server and run its cycles as the eager program."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.speculative.cycle_graph import facts, hooks
    from sglang.srt.speculative.cycle_graph.admission import Admission, ServerFacts

    hooks.server_facts = lambda scheduler: ServerFacts()  # type: ignore[assignment]
    hooks._build = lambda worker, future_map: (EagerGraphs(worker, future_map), Admission(True))  # type: ignore[assignment]
    facts.stock_attention = lambda worker, batch: ""
    print(MARK, file=sys.stderr, flush=True)
