"""Seeds: the hash, the draws with and without a verify, and batches that mix seeded requests with others."""

from __future__ import annotations

import random
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from sglang.srt.layers import sampler as upstream
from sglang.srt.speculative.semantics import seed_hooks
from sglang.srt.speculative.semantics.row_sampling import draw_rows, per_row
from sglang.srt.speculative.semantics.seed_hash import murmur3

from .distributions import chi_square, filtered
from .fakes import FakeBatch, FakeRequest
from .test_sampling import TorchSampler, info_for

MASK = 0xFFFFFFFF


def reference(data: bytes) -> int:
    """MurmurHash3 x86 32 of whole words, seed 0, in plain integers."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & MASK
        word = (word << 15 | word >> 17) & MASK
        state ^= word * 0x1B873593 & MASK
        state = (state << 13 | state >> 19) & MASK
        state = (state * 5 + 0xE6546B64) & MASK
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & MASK
    return state ^ state >> 16


def test_hash_is_murmur3() -> None:
    generator = random.Random(5)
    seeds = [0, 1, 42, 2**63 - 1, *(generator.getrandbits(63) for _ in range(7))]
    positions = [0, 1, *(generator.getrandbits(20) for _ in range(9))]
    columns = [0, 1, 2, 163_839]
    hashed = murmur3(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [reference(struct.pack("<QII", s, p, c)) for c in columns]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected


def test_known_value_of_murmur3() -> None:
    assert reference(b"test") == 0xBA6BD213
    assert reference(b"") == 0


def test_largest_hash_is_never_used() -> None:
    """A uniform variate of exactly 1 has infinite Gumbel noise and wins whatever its probability."""
    top = torch.tensor([[MASK, 7]], dtype=torch.int64)
    on_device: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    hashed = seed_hooks.hash_columns(lambda *_: top.clone(), on_device, top, top)
    assert hashed.tolist() == [[MASK - 1, 7]]
    noise = -torch.log(-torch.log(hashed.double() / MASK))
    assert torch.isfinite(noise).all()


def test_upstreams_largest_hash_draws_a_token_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the largest hash at a filtered column, that column is what upstream returns."""
    monkeypatch.setattr(upstream, "murmur_hash32", lambda s, p, c: torch.tensor([[7, MASK, 9]]))
    drawn = upstream.multinomial_with_seed(
        torch.log(torch.tensor([[0.9, 0.0, 0.1]])), torch.tensor([1]), torch.tensor([0])
    )
    assert drawn.item() == 1


def test_patched_hash_serves_the_cpu() -> None:
    hashed = murmur_hash32(torch.tensor([42]).to(torch.uint64), torch.tensor([3]), torch.arange(5))
    assert hashed.shape == (1, 5)


@pytest.mark.parametrize(
    "settings", [{}, dict(top_p=0.8), dict(top_k=3, min_p=0.2, temperature=1.5)], ids=str
)
def test_verify_draws_what_plain_decoding_draws(settings: dict[str, Any]) -> None:
    """Row ``t`` at position ``p + t`` draws the token that a plain step at that position would draw."""
    torch.manual_seed(2)
    batch, rows, vocabulary = 5, 3, 61
    seeds = torch.randint(0, 2**40, (batch,))
    logits = torch.randn(batch * rows, vocabulary) * 2
    positions = (torch.arange(batch).unsqueeze(1) * 17 + torch.arange(rows)).reshape(-1)
    together = draw_rows(
        logits, per_row(info_for(batch, seed=seeds, **settings), rows), positions, TorchSampler()
    )
    for i in range(batch):
        for t in range(rows):
            at = i * rows + t
            alone = info_for(1, seed=seeds[i : i + 1], **settings)
            single = draw_rows(logits[at : at + 1], per_row(alone, 1), positions[at : at + 1], TorchSampler())
            assert single.item() == together[at].item()
    again = draw_rows(
        logits, per_row(info_for(batch, seed=seeds, **settings), rows), positions, TorchSampler()
    )
    assert torch.equal(together, again)
    other = draw_rows(
        logits, per_row(info_for(batch, seed=seeds + 1, **settings), rows), positions, TorchSampler()
    )
    assert not torch.equal(together, other)


@pytest.mark.parametrize(
    "settings", [{}, dict(top_p=0.8), dict(top_k=2), dict(min_p=0.6), dict(temperature=2.0)], ids=str
)
def test_seeded_draws_have_the_targets_distribution(settings: dict[str, Any]) -> None:
    draws = 200_000
    base = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    info = info_for(draws, seed=torch.arange(draws), **settings)
    drawn = draw_rows(base.expand(draws, 4), per_row(info, 1), torch.full((draws,), 9), TorchSampler())
    statistic, bound = chi_square(
        torch.bincount(drawn, minlength=4), torch.tensor(filtered(base.tolist(), **settings))
    )
    assert statistic < bound


def test_upstream_refuses_min_p_with_a_seed() -> None:
    """Negative control: an AssertionError inside the sampler ends the scheduler."""
    draw = upstream.top_k_top_p_min_p_sampling_from_probs_torch
    arguments = (
        torch.full((1, 4), 0.25),
        torch.tensor([4]),
        torch.tensor([1.0]),
        torch.tensor([0.5]),
        True,
        torch.tensor([1]),
        torch.tensor([0]),
    )
    assert draw(*arguments).shape == (1,)
    with pytest.raises(AssertionError):
        draw.__wrapped__(*arguments)


def test_neighbours_with_filters_do_not_change_a_seeded_draw() -> None:
    """The noise is the token's: with top-k 64 of 64 tokens, that is without a filter, the draws are the same."""
    torch.manual_seed(8)
    draws, vocabulary = 500, 64
    logits = torch.randn(draws, vocabulary) * 3
    seeds, positions = torch.arange(draws), torch.full((draws,), 3)
    alone = draw_rows(logits, per_row(info_for(draws, seed=seeds), 1), positions, TorchSampler())
    beside = draw_rows(logits, per_row(info_for(draws, seed=seeds, top_k=64), 1), positions, TorchSampler())
    assert torch.equal(alone, beside)
    stock = upstream.top_k_top_p_min_p_sampling_from_probs_torch.__wrapped__
    everything, ones = torch.full((draws,), 64), torch.ones(draws)
    ranked = stock(torch.softmax(logits, -1), everything, ones, ones, False, seeds, positions)
    assert not torch.equal(alone, ranked.long()), (
        "negative control: upstream's draws depend on the neighbours"
    )


def batch_with(seeds: list[int | None]) -> FakeBatch:
    return FakeBatch([FakeRequest(max_new_tokens=9, sampling_seed=seed) for seed in seeds])


def test_seeds_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    build = lambda cls, batch, size: SimpleNamespace(sampling_seed=None)  # noqa: E731
    monkeypatch.setattr(seed_hooks, "_backend", lambda: "pytorch")
    batch = batch_with([5, None, None])
    info = seed_hooks.seed_batch(build, object, batch, 7)
    assert info.sampling_seed[0] == 5
    assert info.sampling_seed[1] != info.sampling_seed[2]
    assert torch.equal(seed_hooks.seed_batch(build, object, batch, 7).sampling_seed, info.sampling_seed)
    assert seed_hooks.seed_batch(build, object, batch_with([None]), 7).sampling_seed is None
    monkeypatch.setattr(seed_hooks, "_backend", lambda: "flashinfer")
    assert seed_hooks.seed_batch(build, object, batch, 7).sampling_seed is None


@pytest.mark.parametrize("seeded_first", [True, False])
def test_merging_with_an_unseeded_batch(seeded_first: bool) -> None:
    """Upstream joins seeds only if both sides have them and else keeps a tensor of the wrong length."""
    batches = [batch_with([5, 6]), batch_with([None, None, None])]
    infos = [
        SimpleNamespace(sampling_seed=None, penalizer_orchestrator=SimpleNamespace(batch=b)) for b in batches
    ]
    infos[0].sampling_seed = torch.tensor([5, 6])
    left, right = infos if seeded_first else infos[::-1]

    def join(info: Any, other: Any) -> None:
        info.sampling_seed = torch.cat([info.sampling_seed, other.sampling_seed])

    seed_hooks.merge(join, left, right)
    assert len(left.sampling_seed) == 5
    assert (
        left.sampling_seed[:2].tolist() == [5, 6]
        if seeded_first
        else left.sampling_seed[3:].tolist() == [5, 6]
    )
