"""Run semantics on a CUDA device: the same numbers as on the CPU, and no host sync on the paths that must not wait.

The CPU results are the oracle; they are held against upstream's own classes in test/engine/semantics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sglang.srt.speculative.semantics import penalty_rows
from sglang.srt.speculative.semantics.nonfinite import (
    bad_rows,
    good_run,
    good_tokens,
    is_bad,
    row_maxima,
)
from sglang.srt.speculative.semantics.seed_hash import murmur3
from sglang.srt.speculative.semantics.seed_hooks import kept_tokens
from sglang.srt.speculative.semantics.verify_tree import ancestor_mask, chain_mask, repeats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BATCH, ROWS, VOCABULARY = 7, 3, 1009


@contextmanager
def no_sync() -> Iterator[None]:
    """Any operation that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def penalised(device: str) -> list[torch.Tensor]:
    """Rows under every penalty, and the states after an accept, on one device."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(BATCH, ROWS, VOCABULARY, generator=generator).to(device)
    tokens = torch.randint(0, 4, (BATCH, ROWS), generator=generator).to(device)
    factor = (torch.rand(BATCH, 1, generator=generator) + 0.5).to(device)
    counted = torch.randint(0, 3, (BATCH, VOCABULARY), generator=generator).float().to(device) * factor
    scaled = torch.ones(BATCH, VOCABULARY, device=device)
    valid = torch.tensor([[True, n % 2 == 0, n % 4 == 0] for n in range(BATCH)], device=device)
    stop = torch.zeros(BATCH, VOCABULARY, device=device)
    stop[:, 2] = float("-inf")
    produced = torch.arange(BATCH, dtype=torch.int32, device=device).unsqueeze(1)
    minimum = torch.full_like(produced, 4)
    mask = chain_mask(ROWS, device)
    depth = mask.sum(-1, dtype=torch.int32).expand(BATCH, ROWS)

    def work() -> None:
        counts = repeats(tokens, mask)
        penalty_rows.subtract_frequency(logits, counted, factor, tokens, counts)
        penalty_rows.subtract_presence(logits, counted, factor, tokens, counts)
        penalty_rows.scale_repetition(logits, scaled, factor, tokens, counts)
        penalty_rows.block_stops(logits, produced, minimum, stop, depth)
        penalty_rows.grow_frequency(counted, factor, tokens, valid)
        penalty_rows.grow_presence(scaled, factor, tokens, valid)

    if device == "cuda":
        with no_sync():
            work()
    else:
        work()
    return [logits.cpu(), counted.cpu(), scaled.cpu()]


def test_penalties_equal_the_cpu_without_a_sync() -> None:
    for here, there in zip(penalised("cpu"), penalised("cuda"), strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-5)


def test_trees_without_a_sync() -> None:
    child = torch.tensor([[1, 3, 5, -1, -1, -1], [1, 2, 3, 4, 5, -1]])
    sibling = torch.tensor([[-1, 2, -1, 4, -1, -1], [-1] * 6])
    with_device = child.cuda(), sibling.cuda()
    with no_sync():
        mask = ancestor_mask(*with_device)
    assert torch.equal(mask.cpu(), ancestor_mask(child, sibling))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_rows_without_a_sync(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 163_840, device="cuda").to(dtype)
    logits[1, 77] = float("nan")
    logits[5] = float("-inf")
    accepted = torch.tensor([[0, 1, -1], [3, 4, 5], [6, 7, 8]], device="cuda")
    with no_sync():
        bad = bad_rows(logits)
        good = good_tokens(bad, accepted)
    assert bad.nonzero().flatten().tolist() == [1, 5]
    assert good.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1009, 163_840])
def test_maxima_and_levels_without_a_sync(dtype: torch.dtype, vocabulary: int) -> None:
    logits = torch.randn(BATCH, vocabulary, device="cuda").to(dtype)
    logits[1, 77], logits[4, vocabulary - 1] = float("nan"), float("inf")
    logits[5] = float("-inf")
    logits[6, 1:] = float("-inf")  # a mask that leaves one token is no fault
    expected = logits.clone()
    expected[[1, 4, 5]] = 0.0
    with no_sync():
        maxima = row_maxima(logits, level=True)
    assert [row for row, top in enumerate(maxima.tolist()) if is_bad(top)] == [1, 4, 5]
    assert torch.equal(logits, expected)


def test_counts_and_levels_in_a_graph_follow_the_logits() -> None:
    """Captured on clean rows, replayed on others: nothing of the first is remembered."""
    rows = torch.randn(3 * BATCH, VOCABULARY, device="cuda")
    accepted = torch.arange(3 * BATCH, device="cuda", dtype=torch.int32).view(BATCH, 3)
    row_maxima(rows, level=True), good_run(rows, accepted)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        good = good_run(rows, accepted)
        maxima = row_maxima(rows, level=True)
    for bad in ([], [0], [4, 5], [20], list(range(3 * BATCH))):
        rows.normal_()
        rows[bad] = float("nan")
        good.fill_(-7)
        expected = good_tokens(bad_rows(rows).cpu(), accepted.cpu())
        graph.replay()
        assert torch.equal(good.cpu(), expected)
        assert [row for row, top in enumerate(maxima.tolist()) if is_bad(top)] == bad
        assert bool(torch.isfinite(rows).all())


def test_hash_is_the_triton_kernels() -> None:
    """The undecorated kernel against our arithmetic: a seed means the same on every device."""
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    stock = getattr(murmur_hash32, "__wrapped__", murmur_hash32)
    seeds = torch.randint(0, 2**62, (11,), device="cuda")
    positions = torch.randint(0, 2**20, (11,), device="cuda")
    columns = torch.arange(4099, device="cuda")
    expected = stock(seeds.to(torch.uint64), positions, columns).to(torch.int64)
    assert torch.equal(murmur3(seeds.cpu(), positions.cpu(), columns.cpu()), expected.cpu())


def test_filters_equal_the_cpu() -> None:
    probabilities = torch.softmax(torch.randn(13, 1009) * 3, -1)
    top_ks = torch.tensor([1, 5, 1 << 30] * 4 + [2])
    top_ps, min_ps = torch.linspace(0.1, 1.0, 13), torch.linspace(0.0, 0.5, 13)
    here = kept_tokens(probabilities, top_ks, top_ps, min_ps)
    there = kept_tokens(*(tensor.cuda() for tensor in (probabilities, top_ks, top_ps, min_ps)))
    # A cumulative sum may round differently where it meets top_p; one token a row at most.
    assert int((here != there.cpu()).sum(-1).max()) <= 1
