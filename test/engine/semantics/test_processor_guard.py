"""What is wrong with a custom logit processor ends its own request, and neither the server nor a neighbour."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor
from sglang.srt.speculative.semantics.nonfinite_hooks import _abort
from sglang.srt.speculative.semantics.processor_guard import FAULT, Guarded, load_fault, text_fault
from sglang.srt.speculative.semantics.processor_guard_hooks import admit, check_request, guarded
from sglang.srt.speculative.semantics.row_history import RequestAtRow

SOUND = DisallowedTokensLogitsProcessor.to_str()
VOCABULARY = 7


def callable_of(data: bytes) -> str:
    return json.dumps({"callable": data.hex()})


# A pickle that names a module which no server has: sound as a pickle, not loadable.
ELSEWHERE = callable_of(b"cno_such_module_here\nProcessor\n.")
NO_CLASS = callable_of(b"\x80\x04K\x07.")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("x", "not JSON"),
        ("[1]", "not an object"),
        ("{}", "not an object"),
        ('{"callable": 7}', "not an object"),
        ('{"callable": "xyz"}', "not hexadecimal"),
        ('{"callable": ""}', "no pickle"),
        (callable_of(b"\x80\x04K"), "no pickle"),
        (callable_of(b"not a pickle"), "no pickle"),
        (7, "must be text"),
        (["x"], "must be text"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_text_that_is_no_processor_is_told_with_the_remedy(value: Any, says: str) -> None:
    fault = text_fault(value)
    assert fault is not None and says in fault and "to_str()" in fault and len(fault) < 300


@pytest.mark.parametrize("value", [SOUND, ELSEWHERE])
def test_serialised_processors_pass_without_being_loaded(value: str) -> None:
    assert text_fault(value) is None


def test_nothing_is_executed_by_the_check(tmp_path: Any) -> None:
    """A pickle that would make a file: the check only reads it."""
    made = tmp_path / "made"
    harmful = callable_of(f"cbuiltins\nopen\n(V{made}\nVw\ntR.".encode())
    assert text_fault(harmful) is None and not made.exists()
    with pytest.raises(TypeError):
        CustomLogitProcessor.from_str(harmful)
    assert made.exists()


def passes(*_: object) -> None:
    """Upstream's own checks, all met."""


@pytest.mark.parametrize("value", [None, "", SOUND])
def test_sound_requests_pass(value: str | None) -> None:
    check_request(passes, None, SimpleNamespace(custom_logit_processor=value), [1])


def test_refused_before_the_scheduler() -> None:
    with pytest.raises(ValueError, match="no serialised processor"):
        check_request(passes, None, SimpleNamespace(custom_logit_processor="x"), [1])


class Queued:
    """A request on its way into the queue."""

    def __init__(self, processor: str | None) -> None:
        self.custom_logit_processor = processor
        self.aborted: str | None = None

    def set_finish_with_abort(self, reason: str) -> None:
        self.aborted = reason


@pytest.mark.parametrize(("processor", "says"), [(ELSEWHERE, "no_such_module_here"), (NO_CLASS, "TypeError")])
def test_what_cannot_be_loaded_ends_its_request_in_the_queue(processor: str, says: str) -> None:
    """The request goes on as an aborted one, so that its client is answered, and no batch loads the text."""
    request, queued = Queued(processor), []
    admit(lambda _, each, retracted: queued.append((each, retracted)), None, request, False)
    assert request.aborted is not None and says in request.aborted
    assert request.custom_logit_processor is None and queued == [(request, False)]


@pytest.mark.parametrize(("processor", "left"), [(SOUND, SOUND), ("", None), (None, None)])
def test_what_can_be_loaded_stays(processor: str | None, left: str | None) -> None:
    request = Queued(processor)
    admit(lambda *_: None, None, request)
    assert request.aborted is None and request.custom_logit_processor == left


def test_a_class_that_wants_arguments_or_a_plain_value_is_told() -> None:
    def wants(_: str) -> Any:
        raise TypeError("missing 1 required positional argument")

    assert "needs no arguments" not in (load_fault("", wants) or "") and "TypeError" in (
        load_fault("", wants) or ""
    )
    assert "cannot be called" in (load_fault("", lambda _: 7) or "")


def bans(logits: torch.Tensor, parameters: Any) -> torch.Tensor:
    """In place, then an exception where ``ban`` is missing: half of the work is done by then."""
    for row, own in zip(logits, parameters, strict=True):
        row[0] += 1
        row[own["ban"]] = float("-inf")
    return logits


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * VOCABULARY, dtype=torch.float32).reshape(count, VOCABULARY)


def test_sound_processors_see_all_rows_at_once() -> None:
    calls: list[int] = []

    def counted(logits: torch.Tensor, parameters: Any) -> torch.Tensor:
        calls.append(len(logits))
        return bans(logits, parameters)

    parameters = [{"ban": n} for n in (1, 2, 3)]
    assert torch.equal(Guarded(counted)(rows(3), parameters), bans(rows(3), parameters))
    assert calls == [3]


def test_only_the_rows_that_raise_become_nan() -> None:
    faulty, sound = SimpleNamespace(), SimpleNamespace()
    parameters = [{"ban": 1, "__req__": sound}, {"__req__": faulty}, {"ban": 3, "__req__": sound}]
    out = Guarded(bans)(rows(3), parameters)
    alone = bans(rows(3)[[0, 2]], [parameters[0], parameters[2]])
    assert torch.equal(out[[0, 2]], alone)
    assert out[1].isnan().all()
    assert "KeyError: 'ban'" in getattr(faulty, FAULT) and not hasattr(sound, FAULT)


def test_a_row_of_a_verify_tells_its_request() -> None:
    request = SimpleNamespace(origin_input_ids=[1])
    Guarded(bans)(rows(1), [{"__req__": RequestAtRow(request, [5])}])
    assert hasattr(request, FAULT)


def test_rows_without_parameters() -> None:
    out = Guarded(bans)(rows(2), [None, {"ban": 2}])
    assert out[0].isnan().all() and out[1, 2] == float("-inf")


@pytest.mark.parametrize("answer", [None, torch.zeros(1), "text"])
def test_an_answer_of_another_shape_is_a_fault(answer: Any) -> None:
    assert Guarded(lambda *_: answer)(rows(2), [{}, {}]).isnan().all()


def test_two_requests_that_upstreams_processor_refuses_together() -> None:
    """Upstream's own processor asserts that all rows ban the same tokens: alone each is served."""
    parameters = [{"token_ids": [1]}, {"token_ids": [2, 3]}]
    processor = DisallowedTokensLogitsProcessor()
    with pytest.raises(AssertionError):
        processor(rows(2), parameters)
    out = Guarded(processor)(rows(2), parameters)
    expected = torch.cat([processor(rows(2)[n : n + 1], [parameters[n]]) for n in range(2)])
    assert torch.equal(out, expected)


def test_the_request_ends_with_what_its_processor_raised() -> None:
    request = SimpleNamespace(to_finish=None, **{FAULT: "Bans raised KeyError: 'ban'"})
    _abort(request, made=4)
    assert request.to_finish.status_code == HTTPStatus.BAD_REQUEST
    assert "KeyError: 'ban'" in request.to_finish.message and "after 4" in request.to_finish.message


def test_without_the_abort_of_bad_rows_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN rows need ``run-nonfinite``: with that topic off, the processor is upstream's."""

    def load(_: str) -> Callable[..., Any]:
        return bans

    assert isinstance(guarded(load, ""), Guarded)
    monkeypatch.setattr("sglang.srt.speculative.semantics.processor_guard_hooks.enabled", lambda _: False)
    assert guarded(load, "") is bans


def test_the_patches_are_in_place_and_what_they_prevent() -> None:
    """Negative control: what upstream does with such a text while it builds a batch."""
    for method in (TokenizerManager._validate_one_request, Scheduler._add_request_to_queue):
        assert method.__wrapped__ is not method  # type: ignore[attr-defined]
    for text in ("x", ELSEWHERE):
        with pytest.raises((ValueError, ModuleNotFoundError)):
            CustomLogitProcessor.from_str(text)
