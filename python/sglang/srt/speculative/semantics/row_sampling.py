"""One draw per row of a verify, from the distribution that plain decoding would draw from.

A draft token is then accepted iff it equals the draw of its parent's row (docs/sampling.md proves that the
output has the target's distribution, for chains and trees). The draws come from upstream's own sampler with
the parameters repeated per row: whatever top-k, top-p, min-p or seed mean in plain decoding on this backend,
they mean here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.semantics.nonfinite import bad_rows


@dataclass(frozen=True)
class RowParameters:
    """Sampling parameters per row, under the names that upstream's sampler reads.

    Shapes for ``R`` rows: ``temperatures`` ``[R, 1]``; ``top_ps``, ``top_ks``, ``min_ps`` ``[R]``;
    ``sampling_seed`` int64 ``[R]`` or None.
    """

    temperatures: torch.Tensor
    sampling_seed: torch.Tensor | None
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    need_top_p_sampling: bool
    need_top_k_sampling: bool
    need_min_p_sampling: bool
    is_any_greedy: bool

    @property
    def unfiltered(self) -> bool:
        """No row restricts the vocabulary."""
        return not (self.need_top_p_sampling or self.need_top_k_sampling or self.need_min_p_sampling)


def per_row(info: Any, rows: int) -> RowParameters:
    """Repeat the parameters of each request for its ``rows`` rows."""

    def repeat(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(rows, dim=0)

    return RowParameters(
        temperatures=repeat(info.temperatures),
        top_ps=repeat(info.top_ps),
        top_ks=repeat(info.top_ks),
        min_ps=repeat(info.min_ps),
        sampling_seed=None if info.sampling_seed is None else repeat(info.sampling_seed),
        need_top_p_sampling=info.need_top_p_sampling,
        need_top_k_sampling=info.need_top_k_sampling,
        need_min_p_sampling=info.need_min_p_sampling,
        is_any_greedy=info.is_any_greedy,
    )


def draw_rows(
    logits: torch.Tensor, parameters: RowParameters, positions: torch.Tensor, sampler: Any
) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: ``[R, V]``, left unchanged. Rows from which nothing can be drawn (NaN, +inf, all -inf) get a
            uniform draw, so that one request cannot fail the others; ``nonfinite`` flags them.
        parameters: per-row parameters.
        positions: int ``[R]``, position of each row's input token; with a seed it fixes the row's noise, and
            it is the position that plain decoding would use at that point of the output.
        sampler: an object with upstream's ``_sample_from_probs``.

    Returns:
        int64 ``[R]``. Greedy rows (``top_ks`` 1) get the argmax, also where the sort inside a sampler would
        break a tie differently.
    """
    scaled = (logits / parameters.temperatures).masked_fill_(bad_rows(logits).unsqueeze(-1), 0.0)
    probabilities = torch.softmax(scaled, dim=-1)
    drawn: torch.Tensor = sampler._sample_from_probs(
        probabilities, parameters, positions, parameters.unfiltered
    ).long()
    if parameters.is_any_greedy:
        drawn = torch.where(parameters.top_ks <= 1, logits.argmax(-1), drawn)
    return drawn
