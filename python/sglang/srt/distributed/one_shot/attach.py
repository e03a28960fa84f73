"""From a process group to a communicator, or to a reason why NCCL keeps the reductions. Collective, at start."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from sglang.fork import fallbacks
from sglang.srt.distributed.one_shot import cures, gate, preflight, settings, table_file, topology
from sglang.srt.distributed.one_shot.communicator import PATH, Communicator
from sglang.srt.distributed.one_shot.errors import OneShotError
from sglang.srt.distributed.one_shot.exchange import Exchange
from sglang.srt.distributed.one_shot.gate import Decision, RankFacts
from sglang.srt.distributed.one_shot.kernels import OneShotKernels, open_kernels
from sglang.srt.distributed.one_shot.policy import FUSED, PLAIN, Key, forced, with_protocol

logger = logging.getLogger("sglang.fork")

#: Ranks come here from one barrier; a rank that needs longer than this has another problem.
ANSWER_S = 60.0
#: Building the kernels for the first time takes a compiler run.
OPEN_S = 600.0


class Group(Protocol):
    """The part of upstream's ``GroupCoordinator`` that is used here."""

    unique_name: str
    rank_in_group: int
    world_size: int
    ranks: list[int]
    device: torch.device
    cpu_group: Any


@dataclass
class State:
    """What became of one group, for the doctor and the server's own report.

    Attributes:
        group: name of the group.
        communicator: the communicator, or None.
        reason: why there is none, in words.
        detail: values, peer, link, cure.
        facts: lines about machine, table and preflight.
    """

    group: str
    communicator: Communicator | None = None
    reason: str = ""
    detail: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)

    def describe(self) -> list[tuple[str, str]]:
        """Lines for a person."""
        if self.communicator is not None:
            return [("all-reduce", f"one-shot for {self.group}"), *self.facts, *self.communicator.describe()]
        words = f"stock for {self.group}: {self.reason}" + (f" ({self.detail})" if self.detail else "")
        return [("all-reduce", words), *self.facts]


Opener = Callable[[Any, torch.device], OneShotKernels]
Look = Callable[[], Mapping[str, Any]]


def open_default(group: Any, device: torch.device) -> OneShotKernels:
    """The kernels of this machine."""
    return open_kernels(group, device)


def attach(
    group: Group,
    exchange: Exchange,
    opener: Opener = open_default,
    look: Look = topology.gather_facts,
    facts_of: Callable[[torch.device], RankFacts] | None = None,
) -> State:
    """Try to give a group the one-shot all-reduce. Collective; every rank ends with the same outcome.

    Args:
        group: upstream's coordinator.
        exchange: of the same ranks.
        opener: makes the kernels; tests bring simulated ones.
        look: facts of the machine, asked on rank 0 only: the tools are slow and the answer is everybody's.
        facts_of: what this rank says about itself; tests bring their own.

    Raises:
        Silent: ranks fell silent, so that there is no common outcome to act on.
        RuntimeError: a preflight kernel did not end; the process cannot go on with this GPU.
    """
    state = State(group.unique_name)
    mine = (facts_of or rank_facts)(group.device)
    said = [_facts(answer) for answer in exchange.require("facts", asdict(mine), ANSWER_S)]
    decision = gate.members(said)
    if not decision:
        return _refuse(state, decision, quiet=decision.reason == "switched off")
    # Rank 0 reads machine and table for all: a file that one rank sees and another does not would split them.
    plan = exchange.require("plan", _plan(look, said) if exchange.rank == 0 else {"of": 0}, ANSWER_S)[0]
    machine = topology.from_facts(plan["facts"])
    table = table_file.from_document(plan["table"])
    state.facts = [*machine.describe(), *([("table advice", plan["advice"])] if plan["advice"] else [])]
    if not (table.crossover(PLAIN) or table.crossover(FUSED)):
        return _refuse(state, Decision(False, "the table leaves all to stock", table.origin), quiet=True)
    kernels, decision = _open(group, exchange, opener)
    if kernels is None:
        return _refuse(state, decision)
    verdict = preflight.run(kernels, exchange, group.device, settings.preflight_s())
    state.facts.append(("preflight", f"{'passed' if verdict.ok else 'failed'} in {verdict.seconds:.1f} s"))
    if verdict.fault is not None:
        indices = [machine.index_of(fact.bus) for fact in said]
        return _refuse(state, explain(verdict.fault, machine, indices), wedged=verdict.wedged)
    state.communicator = Communicator(kernels, table, group.device, settings.wait_s())
    if exchange.rank == 0:
        for line in state.describe():
            logger.info("%s: %s: %s", PATH, *line)
    return state


def _refuse(state: State, decision: Decision, quiet: bool = False, wedged: bool = False) -> State:
    state.reason, state.detail = decision.reason, decision.detail
    if quiet:
        logger.info(
            "%s: %s keeps the stock all-reduce: %s (%s)", PATH, state.group, state.reason, state.detail
        )
    else:
        fallbacks.record(PATH, decision.reason, detail=decision.detail)
    if wedged:
        raise RuntimeError(
            f"all-reduce preflight: {decision.detail}. The GPU may be wedged, and NCCL would hang on it too: "
            f"reset it, then start with {settings.NAME}=off {cures.P2P_OFF}"
        )
    return state


def explain(fault: preflight.Fault, machine: topology.Topology, indices: list[int]) -> Decision:
    """The one line about a failed preflight: rank, peer, link and the likely cure.

    Args:
        fault: what the ranks agreed on.
        machine: facts.
        indices: the driver's index of every rank's GPU, -1 where it is not known.
    """
    if fault.peer >= 0:
        link = machine.pair(indices[fault.rank], indices[fault.peer])
        where = f"rank {fault.rank}, peer {fault.peer}, link {link}"
    else:
        link = machine.link(indices)
        where = f"rank {fault.rank}, link {link}"
    cure = cures.cure(fault.kind, link, machine)
    return Decision(False, f"preflight failed: {fault.kind}", f"{where}: {fault.detail}; {cure}")


def _open(group: Group, exchange: Exchange, opener: Opener) -> tuple[OneShotKernels | None, Decision]:
    kernels: OneShotKernels | None = None
    try:
        kernels = opener(group.cpu_group, group.device)
        outcome = {"kind": "", "text": ""}
    except (OneShotError, RuntimeError, ValueError, OSError, ImportError) as error:
        outcome = {"kind": type(error).__name__, "text": str(error).strip() or repr(error)}
    answers = exchange.require("kernels", outcome, OPEN_S)
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer["kind"]]
    if not failed:
        return kernels, gate.YES
    if kernels is not None:
        kernels.close()
    rank, answer = failed[0]
    kind = cures.REFUSED if answer["kind"] == "SharingFailed" else cures.KERNEL
    text = answer["text"].splitlines()[0]
    return None, Decision(False, f"no kernels: {answer['kind']}", f"rank {rank}: {text} [{kind}]")


def _plan(look: Look, said: list[RankFacts]) -> dict[str, Any]:
    simulated = said[0].mode == gate.SIMULATE
    facts = {} if simulated else dict(look())
    machine = topology.from_facts(facts)
    indices = [machine.index_of(fact.bus) for fact in said]
    key = Key(said[0].name, machine.link(indices), len(said), machine.driver)
    if said[0].mode in ("force", gate.SIMULATE):
        table, advice = forced(key), ""
    else:
        found = table_file.find(key, settings.table())
        table, advice = found.table, found.advice
        if found.refused:
            fallbacks.record(PATH, "table refused", detail=advice)
    table = with_protocol(table, settings.protocol())
    return {"facts": facts, "table": table_file.to_document(table), "advice": advice}


def rank_facts(device: torch.device) -> RankFacts:
    """This rank about itself."""
    if device.type == "cpu":
        return RankFacts(platform.node(), f"cpu{os.getpid()}", "cpu", (0, 0), settings.mode(), os.getpid())
    found: Any = torch.cuda.get_device_properties(device)
    bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return RankFacts(
        platform.node(), bus, found.name, (found.major, found.minor), settings.mode(), os.getpid()
    )


def _facts(answer: Mapping[str, Any]) -> RankFacts:
    return RankFacts(**{**answer, "capability": tuple(answer["capability"])})
