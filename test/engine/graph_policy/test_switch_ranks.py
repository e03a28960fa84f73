"""Two ranks whose clocks disagree take the same decision in every step: rank 0's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ranks

LIMIT_S = 600
STEPS = 1200


def rank_main(rank: int, size: int, folder: Path) -> list[str]:
    """One rank: a slow cycle for rank 0, a fast one for rank 1; the modes it ran."""
    import torch.distributed as dist
    from sglang.srt.speculative.auto.cells import PLAIN, SPECULATE
    from sglang.srt.speculative.auto.controller import Controller
    from sglang.srt.speculative.auto.runtime import WHOLE, Runtime

    group = SimpleNamespace(world_size=size, ranks=[0, 1], cpu_group=dist.group.WORLD)
    runner = SimpleNamespace(tp_group=group, ps=SimpleNamespace(tp_rank=rank))
    worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=runner))

    class Told(Runtime):
        """Times are told, not taken."""

        def _tell_time(self, size: int) -> None:
            if self._last is not None:
                mode, cycle = self._last.mode, 6.0 if rank == 0 else 2.5
                self.controller.took(mode, size, self._last.context, 2.0 if mode == PLAIN else cycle)

    runtime = Told(worker, None, None, None, Controller())  # type: ignore[arg-type]
    request = SimpleNamespace(origin_input_ids=[1] * 50, output_ids=[], **{WHOLE: True})
    info = SimpleNamespace(penalizer_orchestrator=None, has_custom_logit_processor=False)
    batch: Any = SimpleNamespace(
        reqs=[request],
        sampling_info=info,
        has_grammar=False,
        return_logprob=False,
        return_hidden_states=False,
    )
    modes = []
    for _ in range(STEPS):
        mode = runtime.choose(batch)
        modes.append(mode)
        if mode == SPECULATE:
            runtime.settled(SimpleNamespace(num_correct_drafts_per_req_cpu=[1]))
    return modes


def test_ranks_agree(tmp_path: Path) -> None:
    outcomes, _ = ranks.run(rank_main, 2, tmp_path, deadline_s=LIMIT_S)
    for outcome in outcomes:
        assert outcome.error == "" and outcome.value is not None, outcome.output[-2000:]
    first, second = (outcome.value for outcome in outcomes)
    assert first == second
    assert first[-200:].count("plain") > 180, "rank 0 finds that cycles lose, and rank 1 follows"
