"""What the demo prints: progress while a server starts, answers as they stream, and the closing table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from sglang.verify_demo.client import Client, Prompt
from sglang.verify_demo.figures import PHASES, Difference
from sglang.verify_demo.process import Server, ServerError

NO_CLAIM = "Tokens a second on a CPU say nothing about speed on a GPU: this table is no performance claim."
BAR = 32


def wait_healthy(console: Console, server: Server, client: Client, name: str, timeout: float) -> float:
    """Seconds until the server answers its health check, with a display of time and the log's last line.

    Raises ServerError if the server exits, or is not healthy within `timeout` seconds.
    """
    start, told = time.monotonic(), 0.0
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{name}: starting")
        while not client.healthy():
            server.check()
            waited = time.monotonic() - start
            if waited > timeout:
                raise ServerError(
                    f"{name} was not healthy after {timeout:.0f} s (--timeout); the end of {server.log}:\n{server.tail(20)}"
                )
            line = _last_news(server.tail(8))[: max(20, console.width - len(name) - 24)]
            progress.update(task, description=f"{name}: {escape(line) or 'starting'}")
            if not console.is_terminal and waited - told >= 15:
                told = waited
                console.print(f"  {name}: waiting for health, {waited:.0f} s", highlight=False)
            time.sleep(0.3)
    return time.monotonic() - start


def _last_news(log: str) -> str:
    """The last line of a log that is not about the demo's own health checks."""
    return next((line.strip() for line in reversed(log.splitlines()) if "/health" not in line), "")


def bar(console: Console) -> Progress:
    """Progress bar over requests."""
    return Progress(
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True
    )


def print_question(console: Console, text: str) -> None:
    """The question of a streamed answer."""
    console.print(f"[bold cyan]> {escape(text)}[/]", highlight=False)


def print_differences(console: Console, prompts: Sequence[Prompt], found: Sequence[Difference]) -> None:
    """Where the answers part, for the first few prompts."""
    for item in found[:5]:
        name = prompts[item.prompt].get("id", item.prompt)
        console.print(
            f"[red]{name}: token {item.position} is {item.speculative} with speculation and {item.plain} without[/]"
        )


def closing_table(figures: dict[str, Any], dtype: str) -> Table:
    """The table at the end of the demo."""
    table = Table(title="Speculation on a CPU: what it changes", title_style="bold", show_header=True)
    for column, justify in (("", "left"), ("with EAGLE-3", "right"), ("without", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    differing, prompts = figures["differing"], figures["prompts"]
    verdict = "[green]equal[/]" if not differing else f"[red]{differing} of {prompts} prompts differ[/]"
    table.add_row(f"answers to {prompts} prompts, {figures['tokens']} tokens, {dtype}, greedy", verdict, "")
    table.add_row("accept length (tokens a cycle)", f"{figures['accept_length']:.2f}", "1")
    hits = " / ".join(f"{share:.0%}" for share in figures["by_position"])
    table.add_row("drafts right, up to position 1 / 2 / ...", hits or "not told", "")
    table.add_section()
    phases = figures["phases_ms"]
    for name in PHASES:
        if name in phases:
            table.add_row(f"{name.replace('_', ' ')}, ms a cycle", f"{phases[name]:.2f}", "")
    table.add_row("cycle or decode step, ms", f"{figures['cycle_ms']:.2f}", f"{figures['decode_ms']:.2f}")
    table.add_row("ms a token as streamed", f"{figures['token_ms']:.2f}", f"{figures['decode_ms']:.2f}")
    table.add_section()
    for label, name, form in (
        ("tokens a second, one request at a time, prefill included", "tok_s", "{:.0f}"),
        ("start-up, s", "startup_s", "{:.0f}"),
    ):
        table.add_row(label, form.format(figures[name]), form.format(figures[f"plain_{name}"]))
    memory = (f"{figures[key] / 2**30:.2f}" for key in ("peak_bytes", "plain_peak_bytes"))
    table.add_row("peak memory of all its processes, GiB", *memory)
    return table


def histogram_lines(counts: Sequence[int]) -> list[str]:
    """Bars of the accept-length histogram, one line per number of tokens kept."""
    top = max(counts, default=0)
    return [
        f"  {right + 1} token{'s' if right else ' '}  {count:6d}  {'#' * max(round(BAR * count / top), bool(count))}"
        for right, count in enumerate(counts)
        if top
    ]
