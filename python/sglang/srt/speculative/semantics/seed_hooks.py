"""Topic ``run-seeds``: a request's ``sampling_seed`` fixes its output, with and without speculation.

Upstream honours the seed only in its deterministic mode, which no CPU backend may enter. On the pytorch
sampling backend the seeded draw exists all the same; it is used here as soon as one request of a batch asks
for a seed. The noise depends on seed, position and token only, so the draws of a verify are those of plain
decoding, and equal seeds give equal texts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.speculative.semantics.seed_hash import murmur3

_SEED = "run_sampling_seed"
_LARGEST = 0xFFFFFFFF


def seed_batch(original: Callable[..., Any], cls: type, batch: Any, vocab_size: int) -> Any:
    """Around the building of a batch's sampling info: add seeds if a request has one and the backend can."""
    info = original(cls, batch, vocab_size)
    wanted = any(request.sampling_params.sampling_seed is not None for request in batch.reqs)
    if wanted and info.sampling_seed is None and _backend() == "pytorch":
        info.sampling_seed = _seeds(batch)
    return info


def merge(original: Callable[..., None], info: Any, other: Any) -> None:
    """Around the merging of two batches: if one side has seeds, the other gets them before they are joined.

    The requests are those of the batches before the merge, as for the penalisers.
    """
    if (info.sampling_seed is None) != (other.sampling_seed is None):
        bare = info if info.sampling_seed is None else other
        bare.sampling_seed = _seeds(bare.penalizer_orchestrator.batch)
    original(info, other)


def hash_columns(
    original: Callable[..., torch.Tensor], seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Around the hash: on a CPU ours; everywhere without the largest value.

    The largest hash becomes a uniform variate of exactly one, whose Gumbel noise is infinite. That column
    wins whatever its probability, zero included: once in 26,000 draws at a vocabulary of 163,840.
    """
    if seed.device.type == "cpu":
        hashed = murmur3(seed, positions, columns)
    else:
        hashed = original(seed, positions, columns).to(torch.int64)
    return hashed.clamp_(max=_LARGEST - 1)


def draw_filtered(original: Callable[..., torch.Tensor], probs: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Around the filtered draw: with a seed, the noise belongs to the token and not to its rank.

    Upstream hashes the rank here and the token where no request of the batch has a filter, so that a seeded
    request says something else when a neighbour uses top-k. It also refuses min-p with a seed by an assertion
    that ends the scheduler. The Gumbel draw needs no renormalisation: a common factor moves all columns alike.
    """
    top_ks, top_ps, min_ps, use_min_p, seed, positions = rest
    if seed is None:
        return original(probs, *rest)
    from sglang.srt.layers.sampler import multinomial_with_seed

    kept = kept_tokens(probs, top_ks, top_ps, min_ps if use_min_p else None)
    drawn: torch.Tensor = multinomial_with_seed(torch.log(probs.masked_fill(~kept, 0.0)), seed, positions)
    return drawn.view(-1).to(torch.int32)


def kept_tokens(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor | None
) -> torch.Tensor:
    """Tokens that the filters leave, bool ``[R, V]``, by plain decoding's rule.

    All filters look at the unfiltered probabilities ``[R, V]`` in descending order (``top_ks``, ``top_ps`` and
    ``min_ps`` are ``[R]``): the first ``top_k`` of them, those before which at most ``top_p`` has gathered, and
    those of at least ``min_p`` times the largest. Equal probabilities keep the order of their ids.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    left = (ranks < top_ks.unsqueeze(-1)) & (ranked.cumsum(-1) - ranked <= top_ps.unsqueeze(-1))
    if min_ps is not None:
        left &= ranked >= ranked[:, :1] * min_ps.unsqueeze(-1)
    return torch.zeros_like(left).scatter_(-1, order, left)


def _backend() -> str | None:
    from sglang.srt.runtime_context import get_exec

    backend: str | None = get_exec().kernel.sampling_backend
    return backend


def _seeds(batch: Any) -> torch.Tensor:
    """One seed a request, int64 ``[B]``; requests without one keep a random seed of their own."""
    return torch.tensor([_seed_of(request) for request in batch.reqs], dtype=torch.int64, device=batch.device)


def _seed_of(request: Any) -> int:
    chosen = request.sampling_params.sampling_seed
    if chosen is not None:
        return int(chosen)
    if not hasattr(request, _SEED):
        setattr(request, _SEED, secrets.randbits(62))
    seed: int = getattr(request, _SEED)
    return seed
