"""Two ranks whose clocks disagree take the same decision in every step: rank 0's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIMIT_S = 150
STEPS = 1200


def rank_main(rank: int, folder: Path) -> None:
    """One rank: a slow cycle for rank 0, a fast one for rank 1; writes the modes it ran."""
    import torch.distributed as dist
    from sglang.srt.speculative.auto.cells import PLAIN, SPECULATE
    from sglang.srt.speculative.auto.controller import Controller
    from sglang.srt.speculative.auto.runtime import WHOLE, Runtime

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=dist.group.WORLD)
    runner = SimpleNamespace(tp_group=group, ps=SimpleNamespace(tp_rank=rank))
    worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=runner))

    class Told(Runtime):
        """Times are told, not taken."""

        def _tell_time(self, size: int, context: int) -> None:
            if self._last is not None:
                mode = self._last[0]
                cycle = 6.0 if rank == 0 else 2.5
                self.controller.took(mode, size, context, 2.0 if mode == PLAIN else cycle)

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
    (folder / f"{rank}.json").write_text(json.dumps(modes))
    dist.barrier()


def test_ranks_agree(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors[-2000:]
    finally:
        for process in ranks:
            process.kill()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first[-200:].count("plain") > 180, "rank 0 finds that cycles lose, and rank 1 follows"


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), Path(sys.argv[2]))
