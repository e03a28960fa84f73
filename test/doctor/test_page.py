"""The rows that docs/doctor.md shows are those that the doctor gives for the machine and the recipe it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hub_models import KIMI_K25, MLA_DRAFT
from sglang.verify_doctor import checks, deployment, report
from sglang.verify_doctor.deployment import child
from sglang.verify_doctor.facts import document

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / "test" / "doctor" / "facts" / "rtxpro6000_x8_switches.json"
RECIPE = ROOT / "recipes" / "kimi-k2.5-mla.8x-rtx-pro-6000.yaml"


def shown() -> list[str]:
    """Lines of the sample; ``...`` stands for what is left out at the end of a line."""
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    block = re.search(r"(?ms)^## A deployment\n.*?^```\n(.*?)^```", page)
    assert block is not None
    return block[1].splitlines()


def test_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    argv = ["--config", str(RECIPE), "--load-format", "dummy"]
    for option, config in (("--model-path", KIMI_K25), ("--speculative-draft-model-path", MLA_DRAFT)):
        place = tmp_path / option.strip("-")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        argv += [option, str(place)]
    facts = document.read(MACHINE)
    request = json.loads(json.dumps(deployment.request(argv, facts, here=False, mode="gpu")))
    facts["deployment"] = {"argv": argv} | child.answer(request)
    lines = [" ".join(line.split()) for line in report.plain(checks.judge(facts, "gpu"), "gpu").splitlines()]
    wanted = [" ".join(line.split()) for line in shown()]
    assert len(wanted) >= 5
    for line in wanted:
        begin = line.removesuffix("...").rstrip()
        assert any(found.startswith(begin) for found in lines), f"{line}\nnot in\n" + "\n".join(lines)
