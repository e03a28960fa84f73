"""Negative controls over HTTP: with one topic off, the suite must find the faults that this topic repairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .cases import Case, greedy, reports
from .conftest import Asked
from .nasty import nasty
from .pair import ask, findings
from .servers import Asked as Server
from .servers import eagle_server, plain_server

pytestmark = [pytest.mark.server, pytest.mark.slow]
# Topic to requests of which one at least must be answered wrongly without it, or end the server.
CONTROLS = {
    "run-end": ["E1 stop token before the cap", "E1 stop text before the cap", "E1 stop on token 2"],
    "run-penalties": ["E7 frequency penalty", "E7 all penalties", "E8 minimum"],
    "run-processors": ["E6 processor on every row"],
    "run-sampling": ["E6 min_p", "a temperature"],
    "run-seeds": ["a temperature"],
    "run-hidden-states": ["hidden states"],
    "run-limits": ["limit of the context", "a fraction of a token"],
    "run-nonfinite": ["A12 NaN after 3 tokens"],
    "run-grammar": ["E15 yes or no"],
    "run-logprobs": ["no token with everything"],
    "run-chat-logprobs": ["chat stream with usage all along"],
    "run-processor-guard": ["no processor", "processor raises"],
}
OWN = (
    greedy("a temperature", temperature=1.0, sampling_seed=3, max_new_tokens=20),
    greedy("a fraction of a token", max_new_tokens=1.5),
)


def known() -> dict[str, Case]:
    """Requests by name; those of ``nasty`` also without their number."""
    cases = {case.name: case for case in (*reports(), *OWN)}
    for case in nasty():
        cases.setdefault(case.name.partition(": ")[2], case)
    renamed = {"no processor": "no processor 0", "processor raises": "processor raises after 2"}
    renamed["no token with everything"] = "0 tokens with everything"
    return cases | {name: cases[real] for name, real in renamed.items()}


def answer(server: Server, case: Case) -> Any:
    """The answer; None where the server ended instead. One at a time: a wrong one is the request's own fault."""
    try:
        return ask(server, [case])[0]
    except (OSError, ValueError):
        return None


@pytest.fixture(scope="module")
def right(asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a plain server with all topics answers; ``asked`` comes first, so that its servers are gone."""
    names = {name for each in CONTROLS.values() for name in each}
    cases = known()
    with plain_server(tmp_path_factory.mktemp("right")) as server:
        return {name: answer(server, cases[name]) for name in sorted(names)}


def answers(topic: str, folder: Path) -> dict[str, Any]:
    """What an EAGLE-3 server without the topic answers; a server that ends is started again for the rest."""
    cases, out = known(), {}
    while left := [name for name in CONTROLS[topic] if name not in out]:
        with eagle_server(folder, off=topic) as server:
            for name in left:
                out[name] = answer(server, cases[name])
                if out[name] is None:
                    break
    return out


@pytest.mark.parametrize("topic", CONTROLS)
def test_the_fault_comes_back(topic: str, right: dict[str, Any], tmp_path: Path) -> None:
    cases, caught = known(), []
    for name, got in answers(topic, tmp_path).items():
        assert right[name] is not None
        told = "the server ended" if got is None else findings([cases[name]], [right[name]], [got])
        print(f"{topic} off: {name!r}: {str(told)[:300]}")
        caught += [name] if told else []
    # A fault needs a run that goes beyond the place in question, and which draft is right depends on the machine's rounding.
    assert caught, f"{topic} is off, and {CONTROLS[topic]} are answered as with it"
