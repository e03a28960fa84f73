"""Command line of the engine: ``python -m patches.engine COMMAND``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from patches.engine import check as checking
from patches.engine import compose as composing
from patches.engine import export as exporting
from patches.engine import forward as forwarding
from patches.engine import page
from patches.engine import pin as pinning
from patches.engine.errors import EngineError, UsageError
from patches.engine.fetch import fetch_other
from patches.engine.project import Project, find_root
from patches.engine.review import LOST, Review
from patches.engine.survey import table


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors of the engine become one message and status 1 or 2."""
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(Project(find_root(options.root)), options)
        return status
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        # A full disk or a folder without permission, wherever it shows; scratch folders are gone by now.
        print(f"error: {error}; nothing was changed", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was changed", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m patches.engine", description=__doc__)
    parser.add_argument("--root", type=Path, help="checkout to work on (default: the engine's own)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("compose", help="bring build/composed up to date")
    _wheel_option(one)
    one.add_argument("--python", metavar="TAG", help="compose from the wheel of this Python, e.g. cp312")
    one.add_argument("--force", action="store_true", help="compose anew; hand edits in the tree are lost")
    one.set_defaults(run=_compose)

    one = commands.add_parser("check", help="resolve every anchor, verify hashes, compile what changed")
    _wheel_option(one)
    one.set_defaults(run=_check)

    one = commands.add_parser("export", help="write build/export/NNNN-topic.patch against clean upstream")
    _wheel_option(one)
    one.set_defaults(run=_export)

    one = commands.add_parser("forward", help="which anchors still resolve in another upstream version")
    which = one.add_mutually_exclusive_group()
    which.add_argument("--wheel", type=Path, help="the other version's wheel; hashes are waived")
    which.add_argument("--version", help="fetch that version's wheel through pip (default: the recorded one)")
    one.add_argument("--record", action="store_true", help="write the outcome to patches/forward.toml")
    one.add_argument("--strict", action="store_true", help="exit status 1 if a topic no longer applies")
    one.set_defaults(run=_forward)

    one = commands.add_parser("page", help="renew the table of docs/upstream.md (pin does it too)")
    one.add_argument("--check", action="store_true", help="write nothing; status 1 if it is stale")
    one.set_defaults(run=_page)

    one = commands.add_parser("pin", help="record hashes in upstream.toml")
    _wheel_option(one)
    one.add_argument("--wheels", type=Path, metavar="DIR", help="also take the wheel hashes anew from here")
    one.set_defaults(run=_pin)
    return parser


def _wheel_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wheel-dir", type=Path, help="directory of the upstream wheels (default: fetch)")


def _compose(project: Project, options: argparse.Namespace) -> int:
    begin = time.monotonic()
    done = composing.compose(
        project, tag=options.python, wheel_directory=options.wheel_dir, force=options.force
    )
    took = f"{time.monotonic() - begin:.1f} s"
    print(f"{'composed' if done.fresh else 'up to date:'} {done.path} ({took}), tree {done.tree[:16]}")
    for result in done.patched.topics if done.patched is not None else ():
        print(f"  {result.topic.name}: {result.state} ({result.reason})")
    if done.tree != project.pins().composed:
        print(
            "note: the tree is not the one that upstream.toml pins; record it with `python -m patches.engine pin`"
        )
    return 0


def _check(project: Project, options: argparse.Namespace) -> int:
    rows, faults = checking.check(project, wheel_directory=options.wheel_dir)
    print(table(rows))
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if not faults:
        print(
            f"all {len(rows)} edits resolve on sglang {project.pins().base}; hashes match; all files compile"
        )
    return 1 if faults else 0


def _export(project: Project, options: argparse.Namespace) -> int:
    patches = exporting.export(project, wheel_directory=options.wheel_dir)
    for path in patches:
        print(path)
    print(f"cover letters: {project.build / 'review'}")
    print(
        f"{len(patches)} patches apply in order to clean sglang {project.pins().base}, and the result compiles"
    )
    return 0


def _forward(project: Project, options: argparse.Namespace) -> int:
    recorded = Review(project).forward
    wheel = options.wheel
    if wheel is None:
        version = options.version or recorded.get("version")
        if not version:
            raise UsageError("give --version or --wheel: patches/forward.toml records no version yet")
        wheel = fetch_other(project.pins(), str(version))
    outcome = forwarding.forward(project, wheel)
    print(table(outcome.rows))
    for fault in outcome.faults:
        print(f"also: {fault}")
    unneeded = f"; not needed: {', '.join(outcome.unneeded)}" if outcome.unneeded else ""
    print(
        f"sglang {outcome.version}: {len(outcome.applies)} of {outcome.total} topics apply: "
        f"{', '.join(outcome.applies)}{unneeded}"
    )
    found = forwarding.states(outcome)
    if options.record:
        forwarding.record(project, outcome.version, found)
        page.write(project)
    whole = len(outcome.applies) + len(outcome.unneeded) == outcome.total and not outcome.faults
    if options.strict and not whole:
        return 1
    asked = options.wheel is not None or options.version is not None
    return 0 if asked or options.record else _against_record(project, dict(recorded.get("topics", {})), found)


def _against_record(project: Project, recorded: dict[str, str], found: dict[str, str]) -> int:
    """Without a version named, the look forward is a test: status 1 on whatever the record does not say."""
    wrong, new = forwarding.differences(recorded, found)
    review = Review(project)
    for topic in project.topics():
        if found.get(topic.name, "").startswith(LOST):
            print(f"{topic.name}: {found[topic.name]}\n  plan: {review.plan(topic) or 'none'}")
    for line in new:
        print(f"new, not in patches/forward.toml: {line}")
    for line in wrong:
        print(f"error: differs from patches/forward.toml: {line}", file=sys.stderr)
    if wrong:
        print("adapt the topic, or record it: make check-forward RECORD=1", file=sys.stderr)
    return 1 if wrong else 0


def _page(project: Project, options: argparse.Namespace) -> int:
    fresh = page.render(project)
    path = project.root / page.PAGE
    if fresh is None or fresh == path.read_text(encoding="utf-8"):
        print(f"{page.PAGE} is up to date")
        return 0
    if options.check:
        print(f"error: {page.PAGE} is not what the topics say; run `make pin`", file=sys.stderr)
        return 1
    page.write(project)
    print(f"wrote {page.PAGE}")
    return 0


def _pin(project: Project, options: argparse.Namespace) -> int:
    pins = pinning.pin(project, wheel_directory=options.wheel_dir, wheels=options.wheels)
    page.write(project)
    print(f"pinned {len(pins.wheels)} wheels, {len(pins.files)} files, tree {pins.composed[:16]}")
    return 0
