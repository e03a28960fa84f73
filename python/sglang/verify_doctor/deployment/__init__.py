"""What a deployment will run on a machine: resolved by the composed server itself, in a process of its own.

``gather`` is called by the doctor and needs no torch. The child (``child``) lets upstream resolve the arguments on
the machine of the facts (``subject``), ``describe``, ``attention`` and ``parts`` turn the outcome into rows,
``memory`` into a plan of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.verify_doctor.deployment.machine import Machine
from sglang.verify_doctor.facts import children

LIMIT_S = 240.0
# What rows are made from besides the arguments.
PASSED_ON = ("nvidia", "host", "pci", "sysfs", "environment", "torch")
_PROGRAM = """
import json, os, sys
request = json.loads(sys.stdin.read())
if request["machine"] is not None:
    # Modules of a GPU build cannot be imported here: the machine is put in place once all is imported.
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.stdout, answer = sys.stderr, sys.stdout
from sglang.verify_doctor.deployment import child
json.dump(child.answer(request), answer)
"""


def gather(argv: Sequence[str], facts: Mapping[str, Any], *, here: bool, mode: str) -> dict[str, Any]:
    """``argv``, ``rows``, ``memory`` and ``fault``, or ``{"error": text, "cure": text}``.

    An error means that what was asked has no answer: whether the server would start is then not known.

    Args:
        argv: the server's arguments, as after ``python -m sglang.launch_server``.
        facts: the machine.
        here: whether the facts are of this very machine, whose GPUs then need not be stood in for.
        mode: ``cpu`` or ``gpu``.
    """
    asked = request(argv, facts, here=here, mode=mode)
    if asked is None:
        return {"argv": list(argv)} | unanswered(
            "the facts name no GPU to plan for",
            "run it on the machine that will serve, give --from its facts, or plan for a processor with --serving cpu",
        )
    found = children.run(_PROGRAM, limit_s=LIMIT_S, request=asked)
    if "error" in found:
        found = unanswered(str(found["error"]), _cure(str(found["error"]), real=asked["machine"] is None))
    return {"argv": list(argv)} | found


def unanswered(error: str, cure: str) -> dict[str, Any]:
    """A deployment about which nothing can be said, and what to do about that."""
    return {"error": error, "cure": cure}


def _cure(error: str, *, real: bool) -> str:
    """What to do where the child that resolves gave no answer."""
    if error.startswith(("ModuleNotFoundError", "ImportError")):
        return "install what is missing (the software part of this report), or run the doctor where the server runs"
    if "no answer within" in error or "killed by signal" in error:
        return (
            "look at this machine's memory and disk, and run the doctor again; nothing of the machine was set"
        )
    if real:
        return (
            "a start would end in the same way: change what it names in the model's files or in the command"
        )
    return (
        "run the doctor on the machine itself, without --from; if it says the same there, change what it names in the "
        "model's files or in the command"
    )


def request(argv: Sequence[str], facts: Mapping[str, Any], *, here: bool, mode: str) -> dict[str, Any] | None:
    """What the child is asked; None where a GPU is to be planned for and the facts have none.

    ``machine`` is the one to stand in for this one (None: this one is meant), ``gpu`` the one to plan for.
    """
    gpu = Machine.of(facts) if mode == "gpu" else None
    if gpu is None and mode == "gpu":
        return None
    real = here and bool((facts.get("torch") or {}).get("devices"))
    described = None if gpu is None else gpu.as_dict()
    return {
        "argv": list(argv),
        "machine": None if real else described,
        "gpu": described,
        "facts": {name: facts.get(name) for name in PASSED_ON},
    }
