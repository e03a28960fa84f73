"""Choosing one token a row by a draw, in PyTorch: what ``draw_kernel`` must equal, and what a CPU runs.

The same rule as in ``semantics``: a row's token is drawn from the target's filtered distribution, and a draft is kept
where it equals the draw (docs/sampling.md). The draw inverts the distribution function at a uniform variate, which the
step before the graph's launch makes possible without any state of the host inside the graph: ``coins`` hashes a
counter of cycles and the row, and nothing else.
"""

from __future__ import annotations

import torch
from sglang.srt.speculative.cycle_graph.buffers import COUNTER, CycleBuffers, Sampling
from sglang.srt.speculative.sampling.filters import filtered_probabilities
from sglang.srt.speculative.sampling.rejection import draw

_MASK = 0xFFFFFFFF


def mix(value: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (the multiply-xorshift rounds of MurmurHash3) on int64 values in [0, 2^32)."""
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _MASK
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _MASK
    return value ^ (value >> 16)


def coins(counter: torch.Tensor, rows: int) -> torch.Tensor:
    """Uniform variates in [0, 1), float64 [rows].

    Args:
        counter: int32 [1], another value each cycle; its bits count, not its sign.
        rows: one variate each.

    53 bits a variate, from two chains of hashes over the counter, the row and a constant of the chain.
    """
    row = torch.arange(rows, dtype=torch.int64, device=counter.device)
    base = counter.to(torch.int64) & _MASK
    words = []
    for chain in (0x9E3779B9, 0x7F4A7C15):
        word = mix((base ^ chain) & _MASK)
        word = mix((word + (row + 1) * 0x632BE5AB) & _MASK)
        words.append(mix(word ^ ((base * 0x2545F491) & _MASK)))
    return ((words[0] << 21) | (words[1] >> 11)).to(torch.float64) * 2.0**-53


def choose(
    logits: torch.Tensor, sampling: Sampling, variates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and the row's largest logit.

    Args:
        logits: [B * W, V].
        sampling: parameters of the B requests.
        variates: float64 [B * W].

    Returns:
        Tokens int64 [B * W]; largest logits float32 [B * W], +inf where a NaN is. A row that holds no numbers gets
        the first column of its maximum: the caller ends its request by that maximum.
    """
    width = logits.shape[0] // sampling.temperatures.shape[0]
    number = torch.where(torch.isnan(logits), float("inf"), logits.float())
    maxima = number.amax(dim=-1)
    clean = number.masked_fill(~torch.isfinite(maxima).unsqueeze(-1), 0.0)

    def rows(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(width, dim=0, output_size=values.shape[0] * width)

    probabilities = filtered_probabilities(
        clean,
        rows(sampling.temperatures).unsqueeze(1),
        rows(sampling.top_ks),
        rows(sampling.top_ps),
        rows(sampling.min_ps),
    )
    # A bad row names the first column of its maximum, so that any two ways to draw agree on it.
    first = (number == maxima.unsqueeze(-1)).int().argmax(dim=-1)
    return torch.where(torch.isfinite(maxima), draw(probabilities, variates), first), maxima


def draw_rows(buffers: CycleBuffers) -> None:
    """Choices and maxima of all rows into the scratch that the accept step reads."""
    assert buffers.sampling is not None
    logits = buffers.verify.logits
    counter = buffers.control.state[COUNTER : COUNTER + 1]
    chosen, maxima = choose(logits, buffers.sampling, coins(counter, logits.shape[0]))
    buffers.scratch.maxima[:, 0] = maxima
    buffers.scratch.indices[:, 0] = chosen.to(torch.int32)
