"""Topic ``run-processor-guard``: a bad custom logit processor ends its own request, not the server.

Upstream loads a processor while it builds a batch in the scheduler, and calls it in the sampler: text that is no
processor, a class that the server cannot import, parameters that a processor cannot do with, or two requests whose
parameters it will not take together end the scheduler, with everybody's requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.fork.topics import enabled
from sglang.srt.speculative.semantics.processor_guard import Guarded, load_fault, text_fault


def check_request(
    original: Callable[..., None], manager: Any, obj: Any, input_ids: list[int] | None, *rest: Any
) -> None:
    """Around the checks of one request, before it reaches the scheduler.

    Raises:
        ValueError: the processor is no serialised one; upstream answers it with status 400.
    """
    original(manager, obj, input_ids, *rest)
    value = getattr(obj, "custom_logit_processor", None)
    if value is None or value == "":
        return
    fault = text_fault(value)
    if fault is not None:
        raise ValueError(fault)


def admit(original: Callable[..., None], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Around the queue of the scheduler: a processor that cannot be loaded here ends its request with 400.

    Loading runs the client's code, so it is done where it is going to run, on every rank alike.
    """
    if request.custom_logit_processor:
        from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

        fault = load_fault(request.custom_logit_processor, CustomLogitProcessor.from_str)
        if fault is not None:
            request.custom_logit_processor = None
            request.set_finish_with_abort(fault)
    else:
        # Upstream skips None, but tries to load an empty text if a neighbour in the batch has a processor.
        request.custom_logit_processor = None
    original(scheduler, request, *args, **kwargs)


def guarded(load: Callable[[str], Any], text: str) -> Any:
    """In place of loading a batch's processor; without the topic that ends single requests, as upstream."""
    processor = load(text)
    return Guarded(processor) if enabled("run-nonfinite") else processor
