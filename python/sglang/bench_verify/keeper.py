"""Rows of a run that may end at any moment: each is kept, and written, as soon as it is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang.bench_verify.errors import BenchError
from sglang.bench_verify.rows import Results, Row

UNFINISHED = "incomplete: the run ended early"


class Keeper:
    """The results of one run. With a path the file holds every kept row at any time, also after a SIGKILL.

    Raises:
        BenchError: the file cannot be written. Asked before the first server starts, not after the last one ended.
    """

    def __init__(self, path: str) -> None:
        self.results = Results()
        self._path = path
        if path:
            target = Path(path)
            try:
                if target.is_dir():
                    raise IsADirectoryError(f"{target} is a folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                scratch = target.with_name(target.name + ".part")
                scratch.touch()
                scratch.unlink()
            except OSError as error:
                raise BenchError(f"--out {path} cannot be written: {error}") from error

    def __call__(self, row: Row) -> None:
        """Keep a row; its environment is in ``results`` already."""
        self.results.add(row)
        self.write()

    def write(self) -> None:
        """Write the file, where there is one."""
        if self._path and self.results.rows:
            self.results.save(self._path)

    def finish(self, rows: Sequence[Row]) -> None:
        """Add the closing rows, write, and say where."""
        for row in rows:
            self.results.add(row)
        self.write()
        if self._path and self.results.rows:
            print(f"rows written to {self._path}")
