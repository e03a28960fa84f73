"""Plans and batched attention against the oracle; the oracle against the definition, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.cpu_eagle import attend as attend_module
from sglang.srt.layers.attention.cpu_eagle.attend import attend
from sglang.srt.layers.attention.cpu_eagle.plan import (
    AttentionPlan,
    decode_plan,
    draft_step_plan,
    extend_plan,
    verify_plan,
)
from sglang.srt.layers.attention.cpu_eagle.reference import causal_mask, reference_attention
from torch import Tensor

POOL, COLUMNS = 257, 97
POISON = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """Heads and widths of a layer; `latent` means that values are the first columns of the keys."""

    name: str
    heads: int
    kv_heads: int
    width: int
    value: int
    latent: bool = False


SHAPES = [
    Shape("mha", 3, 3, 7, 7),
    Shape("gqa", 6, 2, 16, 16),
    Shape("gqa-narrow-values", 4, 2, 12, 5),
    Shape("mla-512-64", 8, 1, 576, 512, latent=True),
]


def pools(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Key and value pools; slots that no request owns hold NaN (see `table_for`)."""
    keys = torch.randn(POOL, shape.kv_heads, shape.width, generator=generator).to(dtype)
    if shape.latent:
        return keys, keys[..., : shape.value]
    return keys, torch.randn(POOL, shape.kv_heads, shape.value, generator=generator).to(dtype)


def table_for(lengths: list[int], keys: Tensor, values: Tensor, generator: torch.Generator) -> Tensor:
    """A slot table whose unused cells are bogus, over pools whose unused slots are NaN."""
    order = torch.randperm(POOL, generator=generator)
    table = torch.full((len(lengths) + 1, COLUMNS), POISON, dtype=torch.int32)
    used = 0
    for row, length in enumerate(lengths, start=1):
        table[row, :length] = order[used : used + length].to(torch.int32)
        used += length
    free = order[used:]
    keys[free] = float("nan")
    values[free] = float("nan")
    return table


def expected(
    plan: AttentionPlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    masks: list[Tensor],
    scale: float,
    cap: float,
) -> Tensor:
    slots = [plan.slots[i, :length] for i, length in enumerate(plan.kv_lens)]
    output, _ = reference_attention(
        query,
        keys,
        values,
        slots=slots,
        query_lens=plan.query_lens,
        scale=scale,
        masks=masks,
        logit_cap=cap,
        dtype=torch.float64,
    )
    return output


def check(
    plan: AttentionPlan,
    masks: list[Tensor],
    shape: Shape,
    keys: Tensor,
    values: Tensor,
    generator: torch.Generator,
    *,
    cap: float = 0.0,
    window: int = -1,
) -> None:
    """Compare `attend` with the oracle under masks that the test has made itself."""
    tokens = sum(plan.query_lens)
    query = torch.randn(tokens, shape.heads, shape.width, generator=generator).to(keys.dtype)
    scale = 1 / math.sqrt(shape.width)
    got = attend(query, keys, values, plan, scale=scale, logit_cap=cap, window=window)
    want = expected(plan, query, keys, values, masks, scale, cap)
    assert got.dtype == query.dtype
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[keys.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@shapes
@dtypes
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_decode(shape: Shape, dtype: torch.dtype, cap: float) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [31, 1, 17]
    keys, values = pools(shape, dtype, generator)
    table = table_for(lengths, keys, values, generator)
    plan = decode_plan(table, torch.tensor([1, 2, 3]), torch.tensor(lengths))
    assert plan.slots[0].tolist() == table[1, :31].tolist()
    check(
        plan, [torch.ones(1, n, dtype=torch.bool) for n in lengths], shape, keys, values, generator, cap=cap
    )


@shapes
@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_verify_chain(shape: Shape, dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    prefixes = [29, 0, 13]
    keys, values = pools(shape, dtype, generator)
    table = table_for([p + tokens for p in prefixes], keys, values, generator)
    plan = verify_plan(
        table, torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor(prefixes), tokens, None
    )
    masks = [
        torch.tensor([[column <= prefix + row for column in range(prefix + tokens)] for row in range(tokens)])
        for prefix in prefixes
    ]
    check(plan, masks, shape, keys, values, generator)


#: Node 0 has children 1 and 2, node 1 has 3 and 4, node 2 has 5.
TREE_PARENTS = [-1, 0, 0, 1, 1, 2]


def tree_square(parents: list[int]) -> Tensor:
    """The query-only mask of a tree, made by walking up from each node."""
    square = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        cursor = node
        while cursor != -1:
            square[node, cursor] = True
            cursor = parents[cursor]
    return square


@shapes
@pytest.mark.parametrize("window", [-1, 0, 1, 2, 9])
def test_verify_tree(shape: Shape, window: int) -> None:
    generator = torch.Generator().manual_seed(3)
    prefixes, tokens = [19, 2], len(TREE_PARENTS)
    keys, values = pools(shape, torch.float32, generator)
    table = table_for([p + tokens for p in prefixes], keys, values, generator)
    square = tree_square(TREE_PARENTS)
    mixed = torch.stack([square, torch.ones(tokens, tokens).tril().bool()])
    padded = torch.cat([mixed.flatten(), torch.ones(7, dtype=torch.bool)])
    plan = verify_plan(table, torch.tensor([1, 2]), torch.tensor(prefixes), tokens, padded)
    masks = []
    for prefix, own in zip(prefixes, mixed, strict=True):
        depth = [prefix + int(own[node].sum()) - 1 for node in range(tokens)]
        place = [*range(prefix), *depth]
        mask = torch.cat([torch.ones(tokens, prefix, dtype=torch.bool), own], dim=1)
        if window >= 0:
            mask &= torch.tensor([[place[column] >= depth[row] - window for column in range(prefix + tokens)] for row in range(tokens)])  # fmt: skip
        masks.append(mask)
    check(plan, masks, shape, keys, values, generator, window=window)


def test_ignoring_the_tree_mask_would_be_noticed() -> None:
    """Negative control: the same tree read as a chain gives another result."""
    generator = torch.Generator().manual_seed(4)
    shape = SHAPES[1]
    keys, values = pools(shape, torch.float32, generator)
    table = table_for([25], keys, values, generator)
    chain = verify_plan(table, torch.tensor([1]), torch.tensor([19]), 6, None)
    mask = torch.cat([torch.ones(6, 19, dtype=torch.bool), tree_square(TREE_PARENTS)], dim=1)
    with pytest.raises(AssertionError):
        check(chain, [mask], shape, keys, values, generator)


@shapes
@pytest.mark.parametrize("extends", [(7, 7), (31, 1, 5), (1,), (3, 3, 3)], ids=str)
@pytest.mark.parametrize("window", [-1, 3])
def test_extend_in_chunks(shape: Shape, extends: tuple[int, ...], window: int) -> None:
    """Whole prefills, chunks behind a prefix, and draft extends, of equal and unequal lengths."""
    generator = torch.Generator().manual_seed(6)
    lengths = [extend + prefix for extend, prefix in zip(extends, (0, 23, 5), strict=False)]
    keys, values = pools(shape, torch.float32, generator)
    table = table_for(lengths, keys, values, generator)
    rows = torch.arange(1, len(lengths) + 1)
    plan = extend_plan(table, rows, torch.tensor(lengths, dtype=torch.int32), torch.tensor(extends))
    masks = [causal_mask(extend, length, window) for extend, length in zip(extends, lengths, strict=True)]
    check(plan, masks, shape, keys, values, generator, window=window)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_draft_steps(page_size: int, topk: int, step: int) -> None:
    """Branches share the prefix and are blind to each other, wherever their slots lie."""
    generator = torch.Generator().manual_seed(7)
    shape, steps = SHAPES[1], 4
    prefixes = [17, 16, 3]
    keys, values = pools(shape, torch.float32, generator)
    layouts = []
    for prefix in prefixes:
        partial = prefix % page_size if page_size > 1 and topk > 1 else 0
        region = math.ceil((partial + steps) / page_size) * page_size if partial or topk > 1 else steps
        if page_size == 1 or topk == 1:
            starts = [prefix + t * steps for t in range(topk)]
        else:
            starts = [prefix - partial + t * region + partial for t in range(topk)]
        layouts.append([[start + i for i in range(step + 1)] for start in starts])
    lengths = [max(max(branch) for branch in layout) + 1 for layout in layouts]
    table = table_for(lengths, keys, values, generator)
    plan = draft_step_plan(
        table,
        torch.tensor([1, 2, 3]),
        torch.tensor(prefixes),
        step=step,
        num_steps=steps,
        topk=topk,
        page_size=page_size,
    )
    query = torch.randn(3 * topk, shape.heads, shape.width, generator=generator)
    scale = 0.3
    got = attend(query, keys, values, plan, scale=scale)
    slots = [
        torch.cat([table[b + 1, : prefixes[b]], table[b + 1, branch]]).long()
        for b, layout in enumerate(layouts)
        for branch in layout
    ]
    want, _ = reference_attention(query, keys, values, slots=slots, query_lens=[1] * len(slots), scale=scale)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_pool_of_another_dtype_is_read_as_it_is(stored: torch.dtype) -> None:
    """An 8-bit pool under float32 queries: the stored values, not rounded again."""
    generator = torch.Generator().manual_seed(9)
    shape = SHAPES[3]
    keys, _ = pools(shape, torch.float32, generator)
    keys = keys.to(stored)
    plan = decode_plan(torch.arange(20, dtype=torch.int32).view(1, 20), torch.tensor([0]), torch.tensor([20]))
    query = torch.randn(1, shape.heads, shape.width, generator=generator)
    got = attend(query, keys, keys[..., :512], plan, scale=0.1)
    wide = keys.float()
    want, _ = reference_attention(
        query, wide, wide[..., :512], slots=[plan.slots[0]], query_lens=[1], scale=0.1, dtype=torch.float64
    )
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


def test_blocks_and_the_loop_over_requests_agree_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(8)
    shape = SHAPES[1]
    keys, values = pools(shape, torch.float32, generator)
    table = table_for([40, 40], keys, values, generator)
    plan = extend_plan(table, torch.tensor([1, 2]), torch.tensor([40, 40]), torch.tensor([11, 11]))
    query = torch.randn(22, shape.heads, shape.width, generator=generator)
    batch = attend(query, keys, values, plan, scale=0.25)
    monkeypatch.setattr(attend_module, "MAX_SCORES", shape.heads * 40 * 3)
    torch.testing.assert_close(attend(query, keys, values, plan, scale=0.25), batch, rtol=1e-5, atol=1e-6)


def test_queries_of_another_batch_are_refused() -> None:
    plan = decode_plan(torch.zeros(1, 8, dtype=torch.int32), torch.tensor([0]), torch.tensor([3]))
    with pytest.raises(ValueError, match="2 query rows, the plan has 1"):
        attend(torch.zeros(2, 1, 4), torch.zeros(4, 1, 4), torch.zeros(4, 1, 4), plan, scale=1.0)
    with pytest.raises(ValueError, match="must include the new tokens"):
        extend_plan(
            torch.zeros(1, 8, dtype=torch.int32), torch.tensor([0]), torch.tensor([3]), torch.tensor([4])
        )
    with pytest.raises(ValueError, match="query-only masks"):
        verify_plan(
            torch.zeros(1, 8, dtype=torch.int32), torch.tensor([0]), torch.tensor([3]), 3, torch.ones(8)
        )


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.integers(0, 2**20),
)
def test_the_oracle_is_the_definition(
    queries: int, prefix: int, cap: float, heads: tuple[int, int], seed: int
) -> None:
    """Against sums written out number by number."""
    generator = torch.Generator().manual_seed(seed)
    tokens, (query_heads, kv_heads), width, value = prefix + queries, heads, 3, 2
    query = torch.randn(queries, query_heads, width, generator=generator, dtype=torch.float64)
    keys = torch.randn(11, kv_heads, width, generator=generator, dtype=torch.float64)
    values = torch.randn(11, kv_heads, value, generator=generator, dtype=torch.float64)
    slots = torch.randperm(11, generator=generator)[:tokens]
    output, lse = reference_attention(
        query,
        keys,
        values,
        slots=[slots],
        query_lens=[queries],
        scale=0.7,
        logit_cap=cap,
        dtype=torch.float64,
    )
    for row in range(queries):
        for head in range(query_heads):
            kv = head * kv_heads // query_heads
            weights = []
            for position in range(prefix + row + 1):
                key = keys[slots[position], kv]
                score = 0.7 * sum(float(query[row, head, d] * key[d]) for d in range(width))
                weights.append(math.exp(cap * math.tanh(score / cap) if cap else score))
            assert math.isclose(float(lse[row, head]), math.log(sum(weights)), rel_tol=1e-9, abs_tol=1e-9)
            for d in range(value):
                mean = sum(w * float(values[slots[i], kv, d]) for i, w in enumerate(weights)) / sum(weights)
                assert math.isclose(float(output[row, head, d]), mean, rel_tol=1e-9, abs_tol=1e-9)


def test_a_query_that_sees_nothing_has_output_zero() -> None:
    output, lse = reference_attention(
        torch.ones(1, 1, 2),
        torch.ones(3, 1, 2),
        torch.ones(3, 1, 2),
        slots=[torch.tensor([0, 1])],
        query_lens=[1],
        scale=1.0,
        masks=[torch.zeros(1, 2, dtype=torch.bool)],
    )
    assert output.abs().sum() == 0
    assert lse.item() == float("-inf")
