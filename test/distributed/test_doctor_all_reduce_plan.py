"""What the doctor says about who will reduce: the answers of the functions that a server asks, for each protocol."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.distributed.one_shot import gate, policy, table_file
from sglang.srt.distributed.one_shot.kernels import packet_bytes
from sglang.verify_doctor.contributed import all_reduce
from sglang.verify_doctor.deployment import parts
from sglang.verify_doctor.deployment.machine import Machine
from sglang.verify_doctor.deployment.subject import Deployment, Side
from sglang.verify_doctor.facts import document

FACTS = Path(__file__).resolve().parents[1] / "doctor" / "facts" / "rtxpro6000_x8_switches.json"
PROTOCOL = "SGLANG_FORK_ALL_REDUCE_PROTOCOL"
VERIFY, FUSED = "all-reduce, 3 rows", "all-reduce, 3 rows, add and norm"
BYTES = 7168 * 2
US = {policy.ONE_SHOT: 9.0, policy.STOCK: 24.0}


def deployment(
    environment: dict[str, str] | None = None,
    *,
    tables: Any = (),
    architecture: str = "DeepseekV3ForCausalLM",
    draft_tokens: int = 3,
    **arguments: Any,
) -> Deployment:
    """Eight ranks behind switches."""
    machine = copy.deepcopy(document.read(FACTS))
    machine["environment"] = environment or {}
    machine["all_reduce"] = {"tables": list(tables), "named": None}
    args = {
        "tp_size": 8,
        "speculative_algorithm": "EAGLE3",
        "speculative_num_draft_tokens": draft_tokens,
        "enable_dp_attention": False,
        "moe_a2a_backend": "none",
        "enable_deterministic_inference": False,
    }
    config = SimpleNamespace(hidden_size=7168, hf_config=SimpleNamespace(architectures=[architecture]))
    target = Side(True, 8, 1, 576, 512, 61, torch.bfloat16, torch.bfloat16, 4096, config)
    gpu = machine["nvidia"]["gpus"][0]
    card = SimpleNamespace(name=gpu["name"], capability=(12, 0))
    card_of: Machine = card  # type: ignore[assignment]
    return Deployment(SimpleNamespace(**args | arguments), card_of, target, None, machine)


def rows(*args: Any, **kwargs: Any) -> dict[str, tuple[str, str]]:
    """What and why of each row."""
    return {about: (what, why) for about, what, why in parts.one_shot(deployment(*args, **kwargs))}


def measured(folder: Path, points: list[policy.Point]) -> list[dict[str, Any]]:
    """A table of the machine."""
    gpu, driver = (deployment().facts["nvidia"]["gpus"][0], deployment().facts["nvidia"]["driver"])
    key = policy.Key(gpu["name"], "PXB", 8, driver)
    table_file.save(
        policy.from_measurements(key, points, "t"), folder / table_file.default_path(key).name, "2026"
    )
    return all_reduce.tables(folder)


@pytest.mark.parametrize("protocol", ["auto", "flags", "packets"])
def test_the_protocol_that_a_setting_asks_for(protocol: str) -> None:
    found = rows({PROTOCOL: protocol})
    method = "packets" if protocol == "packets" else "one-shot"
    assert set(found) == {"all-reduce, 1 row", VERIFY, "all-reduce, 1 row, add and norm", FUSED}
    for what, why in found.values():
        assert what.startswith(f"{method}, once the preflight")
        assert (f"{protocol} by the setting" in why) == (protocol != "auto")


def test_packets_that_a_table_found_faster(tmp_path: Path) -> None:
    """Only where they are: fused here. The setting takes them for the sum as well, or for neither."""
    points = [
        policy.Point(policy.PLAIN, 3, 3 * BYTES, {**US, policy.PACKETS: 10.0}),
        policy.Point(policy.FUSED, 3, 3 * BYTES, {**US, policy.PACKETS: 5.0}),
    ]
    tables = measured(tmp_path, points)
    found = rows(tables=tables)
    assert found[VERIFY][0].startswith("one-shot") and found[FUSED][0].startswith("packets")
    assert "5.0 us against 24.0" in found[FUSED][1]
    assert rows({PROTOCOL: "packets"}, tables=tables)[VERIFY][0].startswith("packets")
    assert rows({PROTOCOL: "flags"}, tables=tables)[FUSED][0].startswith("one-shot")


def test_what_is_too_large_for_packets_goes_with_flags() -> None:
    most = packet_bytes(8) // BYTES
    environment = {PROTOCOL: "packets", "SGLANG_FORK_ALL_REDUCE": "force"}
    for count, method in ((most, "packets"), (most + 1, "one-shot")):
        what, why = rows(environment, draft_tokens=count)[f"all-reduce, {count} rows"]
        assert what.startswith(method) and ("too large for packets" in why) == (method == "one-shot")


def test_what_the_kernels_refuse_stays_as_it_was() -> None:
    what, why = rows({"SGLANG_FORK_ALL_REDUCE": "force"}, draft_tokens=65)["all-reduce, 65 rows"]
    assert what.startswith("as above") and "more rows" in why


@pytest.mark.parametrize(
    "changed",
    [
        {"architecture": "LlamaForCausalLM"},
        {"enable_dp_attention": True},
        {"moe_a2a_backend": "deepep"},
        {"enable_deterministic_inference": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_model_that_leaves_nothing_to_its_norms_has_no_such_row(changed: dict[str, Any]) -> None:
    assert FUSED not in rows(**changed) and VERIFY in rows(**changed)


def test_upstreams_list_is_asked() -> None:
    quiet = {"data_parallel": False, "all_to_all": False, "deterministic": False}
    assert gate.defers("DeepseekV3ForCausalLM", **quiet) and not gate.defers("LlamaForCausalLM", **quiet)
