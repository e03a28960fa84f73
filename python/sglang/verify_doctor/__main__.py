"""``python -m sglang.verify_doctor``: status 0 where serving can start, 1 on a fault, 2 on a misuse of the doctor."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang.verify_doctor import checks, deployment, report, server
from sglang.verify_doctor.facts import document, models
from sglang.verify_doctor.findings import Finding, Level, worst

# Form of what ``--json`` prints; a reader checks it before anything else.
DOCUMENT = "verify-doctor/2"
USAGE = """\
What the doctor does not know is passed on to the server's own parser, so that a launch command can be checked as it is:
  python -m sglang.verify_doctor --model-path DIR --speculative-draft-model-path DIR --tp 8 --attention-backend triton
  python -m sglang.verify_doctor --config recipe.yaml --from facts.json
"""


def parser() -> argparse.ArgumentParser:
    """The doctor's own options."""
    made = argparse.ArgumentParser(
        prog="python -m sglang.verify_doctor",
        description="Looks at packages, driver, GPUs, links, settings and a deployment, and names a cure for every fault.",
        epilog=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--json", action="store_true", help="everything as one JSON document")
    made.add_argument(
        "--from", dest="source", metavar="FILE", help="judge recorded facts instead of this machine"
    )
    made.add_argument(
        "--save-facts", metavar="FILE", help="keep this machine's facts (no serial numbers, no host name)"
    )
    made.add_argument(
        "--load", action="store_true", help="also look at clocks and links under 3 s of work on idle GPUs"
    )
    made.add_argument(
        "--serving", choices=("cpu", "gpu"), help="judge for this kind of serving (default: what is here)"
    )
    made.add_argument(
        "--server", metavar="URL", help="look at a running server instead: what its ranks counted"
    )
    made.add_argument("--model-path", "--model", metavar="DIR", help="also judge this deployment")
    made.add_argument(
        "--speculative-draft-model-path",
        "--draft-path",
        dest="draft",
        metavar="DIR",
        help="its EAGLE-3 draft",
    )
    made.add_argument(
        "--config", metavar="FILE", action="append", help="a deployment as the server's --config takes it"
    )
    return made


def launch_arguments(
    options: argparse.Namespace, rest: Sequence[str], mode: str, given: Sequence[str] = ()
) -> list[str]:
    """The server's command line; empty where no deployment was named.

    ``given`` are the doctor's own words: a slip in the form of ``--config`` is left for the server to refuse.
    """
    argv = list(rest)
    for file in options.config or []:
        joined = f"--config={file}"
        argv += [joined] if joined in given else ["--config", file]
    if options.model_path is not None:
        argv += ["--model-path", options.model_path]
    if options.draft is not None:
        argv += ["--speculative-draft-model-path", options.draft]
        if "--speculative-algorithm" not in argv and not options.config:
            argv += ["--speculative-algorithm", "EAGLE3"]
    if argv and mode == "cpu" and "--device" not in argv and not options.config:
        argv += ["--device", "cpu"]
    return argv


def _misuse(options: argparse.Namespace, rest: Sequence[str]) -> str | None:
    """Options that would have no effect, in words; None where there are none."""
    named = options.model_path is not None or options.config is not None
    if (rest or options.draft is not None) and not named:
        return (
            f"{' '.join(rest) or '--speculative-draft-model-path'} needs --model-path or --config: a draft and the "
            "server's flags are judged with the model that they are for"
        )
    beside = [
        option
        for option, value in (
            ("--from", options.source),
            ("--save-facts", options.save_facts),
            ("--load", options.load or None),
            ("--serving", options.serving),
            ("--model-path", options.model_path),
            ("--config", options.config),
        )
        if value is not None
    ]
    if options.server is not None and beside:
        return f"--server looks at a running server and not at {', '.join(beside)}; ask for one at a time"
    both = [option for option in beside if option in ("--save-facts", "--load")]
    if options.source is not None and both:
        return f"{', '.join(both)} looks at this machine, and --from at another; leave one out"
    return None


def main(argv: list[str] | None = None) -> int:
    """Gather or read facts, judge them, show the findings."""
    made = parser()
    options, rest = made.parse_known_args(argv)
    wrong = _misuse(options, rest)
    if wrong is not None:
        made.error(wrong)
    if options.server is not None:
        return _running(options)
    try:
        facts = _facts(options)
    except OSError as error:
        option = (
            f"--from {options.source}" if options.source is not None else f"--save-facts {options.save_facts}"
        )
        use = "read; give a file" if options.source is not None else "written; give a path"
        return _refuse(f"{option} cannot be {use} that this user may use ({error.strerror or error})")
    except ValueError as error:
        return _refuse(str(error))
    mode = options.serving or checks.serving(facts)
    if options.model_path is not None or options.config is not None:
        argv = launch_arguments(options, rest, mode, sys.argv[1:] if argv is None else argv)
        try:
            facts["deployment"] = deployment.gather(argv, facts, here=options.source is None, mode=mode)
        except Exception as error:
            # Facts of a file that name a machine which cannot be.
            facts["deployment"] = {"argv": argv} | deployment.unanswered(
                f"the facts describe no machine to plan for ({type(error).__name__}: {error})",
                "record them again on that machine: python -m sglang.verify_doctor --save-facts FILE",
            )
        _models(facts, options)
    findings = checks.judge(facts, mode)
    return _show(options, findings, mode, facts)


def _refuse(text: str) -> int:
    print(f"verify_doctor: error: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _facts(options: argparse.Namespace) -> document.Facts:
    if options.source is not None:
        return document.read(Path(options.source))
    if options.save_facts is not None:
        document.check_place(Path(options.save_facts))
    facts = document.gather(under_load=options.load)
    if options.save_facts is not None:
        document.write(facts, Path(options.save_facts))
    return facts


def _models(facts: document.Facts, options: argparse.Namespace) -> None:
    """The pair as its files tell, where they are on this disk."""
    paths = facts["deployment"].get("paths") or {"target": options.model_path, "draft": options.draft}
    if paths["target"] and Path(paths["target"]).is_dir():
        draft = paths["draft"] if paths["draft"] and Path(paths["draft"]).is_dir() else None
        try:
            facts["models"] = models.gather(paths["target"], draft)
        except Exception as error:
            facts["models"] = {"error": f"{type(error).__name__}: {error}"}


def _running(options: argparse.Namespace) -> int:
    try:
        state = server.fetch(options.server)
    except OSError as error:
        return _refuse(f"{options.server or '--server'}: {error}")
    return _show(options, server.judge(state), "running", {"server": state})


def _show(options: argparse.Namespace, findings: list[Finding], mode: str, facts: dict[str, Any]) -> int:
    verdict = worst(findings)
    status = 1 if verdict is Level.FAULT else 0
    if options.json:
        content = {
            "document": DOCUMENT,
            "status": verdict.value,
            "exit_status": status,
            "serving": mode,
            "findings": [finding.as_dict() for finding in findings],
            "facts": facts,
        }
        _print(lambda: print(json.dumps(content, indent=2, sort_keys=True)))
    else:
        _print(lambda: report.show(findings, mode, facts=facts))
    return status


def _print(show: Callable[[], None]) -> None:
    """Show the report, whatever listens: a pipe that was closed early, or a terminal that lacks a character."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
