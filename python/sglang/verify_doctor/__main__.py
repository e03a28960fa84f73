"""``python -m sglang.verify_doctor``: status 0 where serving can start, 1 on a fault, 2 on a misuse of the doctor."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sglang.verify_doctor import checks, report
from sglang.verify_doctor.facts import document, models
from sglang.verify_doctor.findings import Level, worst


def main(argv: list[str] | None = None) -> int:
    """Gather or read facts, judge them, show the findings."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.verify_doctor",
        description="Looks at packages, driver, GPUs, links and settings, and names a cure for every fault.",
    )
    parser.add_argument("--json", action="store_true", help="facts and findings as JSON")
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="judge recorded facts instead of this machine"
    )
    parser.add_argument(
        "--serving", choices=("cpu", "gpu"), help="judge for this kind of serving (default: what is here)"
    )
    parser.add_argument("--model-path", metavar="DIR", help="also judge this target: its size, and its draft")
    parser.add_argument("--draft-path", metavar="DIR", help="the EAGLE-3 draft for --model-path")
    options = parser.parse_args(argv)
    if options.draft_path and not options.model_path:
        parser.error("--draft-path needs --model-path, because a draft is judged against its target")
    try:
        facts = document.read(Path(options.source)) if options.source else document.gather()
    except (OSError, ValueError) as error:
        print(f"verify_doctor: error: {error}", file=sys.stderr)
        return 2
    if options.model_path:
        facts["models"] = models.gather(options.model_path, options.draft_path)
    mode = options.serving or checks.serving(facts)
    findings = checks.judge(facts, mode)
    verdict = worst(findings)
    if options.json:
        content = {
            "status": verdict.value,
            "serving": mode,
            "findings": [finding.as_dict() for finding in findings],
            "facts": facts,
        }
        print(json.dumps(content, indent=2, sort_keys=True))
    else:
        report.show(findings, mode)
    return 1 if verdict is Level.FAULT else 0


if __name__ == "__main__":
    sys.exit(main())
