"""Print the model: constants, validation, field report, predictions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang.bench_verify.headline import collect

from benchmark.model import pages
from benchmark.model.check import (
    FIELD_ODD_VERIFY_MS,
    TOLERANCE,
    Comparison,
    context_of_verify,
    field_comparisons,
    mean_context,
    row_comparisons,
    slice_comparisons,
    what_would_explain_it,
)
from benchmark.model.constants import table
from benchmark.model.predict import PATHS, UPSTREAM, kimi, predict

CONTEXTS = (1024, 16384, 65536, 131072)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was asked for; status 1 when a validated figure is off by more than 15%."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.model", description=__doc__)
    parser.add_argument("--constants", action="store_true", help="print every constant with its source")
    parser.add_argument("--accept-length", type=float, default=2.0)
    parser.add_argument(
        "--repeat", type=float, default=0.0, help="excess chance that neighbours share an expert"
    )
    parser.add_argument(
        "--write", default="", metavar="FILE", help="put the table of predictions into this page"
    )
    parser.add_argument("--results", default="benchmark/results", help="rows to compare with")
    args = parser.parse_args(argv)
    if args.constants:
        for name, constant in table():
            print(f"{name:26} {constant.value:12.4g} {constant.unit:6} {constant.kind:9} {constant.source}")
        return 0
    if args.write:
        page = Path(args.write)
        page.write_text(pages.update(page.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    missed = validation() + committed_rows(args.results)
    field_report()
    predictions(args.accept_length, args.repeat)
    if missed:
        print(f"{missed} figures are off by more than {100 * TOLERANCE:.0f}%")
    return 1 if missed else 0


def validation() -> int:
    """The slice, predicted and measured; returns how many figures are missed."""
    print("Upstream on the H200 slice, ms")
    return print_comparisons(slice_comparisons())


def committed_rows(directory: str) -> int:
    """Rows of slice runs in the repository, predicted and measured; returns how many figures are missed."""
    rows = [source.row for source in collect(directory)] if Path(directory).is_dir() else []
    found = row_comparisons(rows)
    if found:
        print("\nRows of this repository, ms")
    return print_comparisons(found)


def field_report() -> None:
    """The field report's two figures and the one that nobody could reproduce."""
    print(
        f"\nField report: 8x RTX PRO 6000, mean context {mean_context()} (32 in, up to 2048 out), ms; a PREDICTION from H200 parts"
    )
    for item in field_comparisons():
        print_comparison(item)
    guess = predict(kimi("rtxpro6000x8"), UPSTREAM, mean_context())
    print("  the verify is " + ", ".join(f"{name} {ms:.1f}" for name, ms in guess.verify_parts_ms.items()))
    print(
        "  one part alone would explain the rest if it took: "
        + ", ".join(f"{one.part} x{one.factor:.2f}" for one in what_would_explain_it()[:4])
    )
    print(
        f"  a verify of {FIELD_ODD_VERIFY_MS:.0f} ms, seen once and not reproducible, is that of a mean context of {context_of_verify(FIELD_ODD_VERIFY_MS)} tokens"
    )


def predictions(accept_length: float, repeat: float) -> None:
    """Decode, cycle and verdict of each path on both deployments."""
    for machine in ("rtxpro6000x8", "h200x8"):
        print(f"\nPREDICTION, Kimi-K2.5 INT4 on {machine}, 3-token verify, accept length {accept_length:g}")
        print(f"  {'context':>8} {'path':32} {'decode':>8} {'verify':>8} {'cycle':>8}  verify is")
        for context in CONTEXTS:
            for path in PATHS:
                guess = predict(kimi(machine, repeat), path, context)
                verdict = guess.verdict(accept_length)
                top = sorted(guess.verify_parts_ms.items(), key=lambda item: -item[1])[:3]
                print(
                    f"  {context:8} {path.name:32} {guess.decode_ms:8.2f} {guess.phases_ms['verify']:8.2f} {guess.cycle_ms:8.2f}  "
                    f"{', '.join(f'{name} {ms:.1f}' for name, ms in top)}; needs {verdict.needed:.2f}: {verdict.speedup:.2f}x"
                )


def print_comparisons(items: Sequence[Comparison]) -> int:
    """A line each; returns how many are missed."""
    for item in items:
        print_comparison(item)
    return sum(not item.holds() for item in items)


def print_comparison(item: Comparison) -> None:
    """One line."""
    notes = ["waited for the host" if item.waited else "", item.exempt and f"not held to: {item.exempt}"]
    notes.append("" if item.holds() else "MISSED")
    shown = "; ".join(note for note in notes if note)
    print(
        f"  {item.name:96} predicted {item.predicted:8.3f}  measured {item.measured:8.3f}  {100 * item.error:+5.1f}%"
        + (f"  ({shown})" if shown else "")
    )


if __name__ == "__main__":
    raise SystemExit(main())
