"""The work list of a forward pass: when it is written anew, and who says where a pass begins."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged import Batch, Case
from sglang.srt.layers.attention.verify import hooks
from sglang.srt.layers.attention.verify.binding import Binding, Scratch
from sglang.srt.layers.attention.verify.context import KVContext
from sglang.srt.layers.attention.verify.plan import DeviceTraits, SplitPlan, make_plan
from sglang.srt.layers.attention.verify.work_list import PassList

BF16 = torch.bfloat16
TRAITS = DeviceTraits((9, 0), 8, warpgroup="always")


class Owner:
    """Stands for a batch object of a forward pass."""


# --- when a list is written ---------------------------------------------------------------------------------------


class Pass:
    """Calls of one batch object, whose tensors a test may change."""

    def __init__(self) -> None:
        self.work = PassList()
        self.batch: Any = Owner()
        self.context = KVContext(
            seq_lens=torch.tensor([70, 9]),
            lens_include_new=False,
            req_to_token=torch.zeros(4, 80, dtype=torch.int32),
            req_pool_indices=torch.tensor([1, 2]),
        )
        self.plan: SplitPlan = make_plan(Batch(Case("key", dtype=BF16, lengths=(70, 9))).request, TRAITS, 80)
        self.stream, self.capture = 7, 0

    def layer(self, number: int) -> bool:
        """Whether a call of this layer writes a list."""
        self.work.enter(number, self.batch)
        return self.work.take(self.plan, self.context, self.stream, self.capture)[1]


def test_one_list_serves_the_layers_of_a_pass() -> None:
    it = Pass()
    assert [it.layer(n) for n in (0, 1, 2, 5)] == [True, False, False, False]


@pytest.mark.parametrize("again", [(0,), (1,), (5,), (-1,)], ids=str)
def test_a_layer_that_is_not_above_the_last_begins_a_pass(again: tuple[int, ...]) -> None:
    it = Pass()
    assert it.layer(1) and not it.layer(5)
    assert it.layer(*again)


def other_tensor(it: Pass, name: str) -> None:
    it.context = replace(it.context, **{name: getattr(it.context, name).clone()})


CHANGES: dict[str, Callable[[Pass], Any]] = {
    "metadata initialised": lambda it: it.work.begin(),
    "another batch object": lambda it: setattr(it, "batch", Owner()),
    "lengths changed in place": lambda it: it.context.seq_lens.add_(1),
    "lengths changed in place through a view": lambda it: it.context.seq_lens[:1].add_(1),
    "table changed in place": lambda it: it.context.req_to_token[0].zero_(),  # type: ignore[index]
    "other lengths": lambda it: other_tensor(it, "seq_lens"),
    "other requests": lambda it: other_tensor(it, "req_pool_indices"),
    "another table": lambda it: other_tensor(it, "req_to_token"),
    "another width of the table": lambda it: setattr(
        it, "context", replace(it.context, req_to_token=it.context.req_to_token.view(8, 40))  # type: ignore[union-attr]
    ),
    "lengths count the new": lambda it: setattr(it, "context", replace(it.context, lens_include_new=True)),
    "another stream": lambda it: setattr(it, "stream", 8),
    "a capture": lambda it: setattr(it, "capture", 3),
    "more chunks": lambda it: setattr(it, "plan", replace(it.plan, target=it.plan.target + 1)),
    "a larger grid": lambda it: setattr(it, "plan", replace(it.plan, items=it.plan.items + 1)),
    "other least keys": lambda it: setattr(
        it, "plan", replace(it.plan, splits=replace(it.plan.splits, min_keys=1))
    ),
    "more tokens": lambda it: setattr(
        it, "plan", replace(it.plan, request=replace(it.plan.request, tokens=2))
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_list_depends_on_writes_it_anew(change: str) -> None:
    it = Pass()
    assert it.layer(0) and not it.layer(1)
    CHANGES[change](it)
    assert it.layer(2)
    assert not it.layer(3)


def test_in_inference_mode_the_next_pass_sees_lengths_changed_in_place() -> None:
    """Tensors have no version there, so nothing but the order of the layers tells passes apart."""
    with torch.inference_mode():
        it = Pass()
        assert it.layer(0) and not it.layer(1)
        it.context.seq_lens.add_(1)
        assert it.layer(0)


def test_an_address_means_one_tensor_as_long_as_a_list_is_kept() -> None:
    it = Pass()
    it.layer(0)
    lengths = weakref.ref(it.context.seq_lens)
    other_tensor(it, "seq_lens")
    gc.collect()
    assert lengths() is not None
    it.work.begin()
    assert lengths() is None


def test_batch_objects_that_cannot_be_told_apart_share_nothing() -> None:
    it = Pass()
    it.batch = 5
    assert it.layer(0) and it.layer(1)


def test_the_batch_object_is_not_kept() -> None:
    it = Pass()
    it.layer(0)
    batch = weakref.ref(it.batch)
    it.batch = Owner()
    gc.collect()
    assert batch() is None
    assert it.layer(1)


# --- who says where a pass begins ---------------------------------------------------------------------------------


class ForwardMode:
    """A decode, of a draft step or not."""

    is_target_verify = is_draft_extend_v2 = staticmethod(lambda: False)
    is_decode = staticmethod(lambda: True)


class ForwardBatch(Owner):
    """What the hooks read of upstream's."""

    forward_mode, spec_info, batch_size = ForwardMode(), None, 2

    def __init__(self) -> None:
        self.seq_lens = self.positions = torch.tensor([70, 9])
        self.req_pool_indices = torch.tensor([1, 2])


class Model:
    """A backend with a binding; its layers attend through the product's hooks."""

    def __init__(self, layers: int = 61) -> None:
        table = torch.zeros(4, 80, dtype=torch.int32)
        self.fork_verify_binding = Binding(None, None, 1, 80, table, Scratch("cpu"), layers=layers)
        self.plan = Pass().plan
        self.wrote: list[bool] = []

    def layer(self, number: int, batch: ForwardBatch) -> bool | None:
        """Whether the layer writes a list; None if it has none."""
        q = torch.empty(2, 8, 576)
        layer = SimpleNamespace(layer_id=number, is_cross_attention=False, sliding_window_size=-1)
        found: bool | None = hooks.forward_decode(self._attend, self, q, None, None, layer, batch)
        return found

    @staticmethod
    def _attend(self: Model, *args: Any) -> bool | None:
        binding = self.fork_verify_binding
        call, binding.current = binding.current, None
        assert call is not None
        work = binding.work_for(call.mode)
        return None if work is None else work.take(self.plan, call.context, 7, 0)[1]


INITS: dict[str, Callable[[Model, ForwardBatch], Any]] = {
    "eager": lambda m, b: hooks.init_metadata(lambda *a: None, m, b),
    "capture": lambda m, b: hooks.init_metadata_out_graph(lambda *a, **k: None, m, b, in_capture=True),
    "replay": lambda m, b: hooks.init_metadata_out_graph(lambda *a, **k: None, m, b),
}


@pytest.mark.parametrize("init", INITS)
def test_metadata_and_layers_say_where_a_pass_begins(init: str) -> None:
    model, batch = Model(), ForwardBatch()
    assert [model.layer(n, batch) for n in (0, 1, 2)] == [True, False, False]
    INITS[init](model, batch)
    assert [model.layer(n, batch) for n in (3, 4)] == [True, False]
    # A warm-up run, a repeated capture: nothing was initialised.
    assert [model.layer(n, batch) for n in (0, 1)] == [True, False]


def test_two_batches_that_take_turns_never_share_a_list() -> None:
    model, batches = Model(), (ForwardBatch(), ForwardBatch())
    assert all(model.layer(n, batch) for n in (0, 1) for batch in batches)


def test_a_draft_step_and_a_model_of_few_layers_have_no_list() -> None:
    assert Model(layers=1).layer(0, ForwardBatch()) is None
    model, batch = Model(), ForwardBatch()
    assert model.fork_verify_binding.work_for("draft_decode") is None
    assert model.layer(0, batch) is True
