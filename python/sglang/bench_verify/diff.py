"""What differs between two runs, and which difference can have moved the figures.

The field report lost a week to 89 against 82 tok/s of which "nobody could say what changed". Two
results files hold both environments, so the answer is a comparison; the work is in ranking it. The rules
of ``suspects`` say which phases of a cycle a difference can reach, and why, so that a suspect comes with
its reason and an uptime does not hide a topic that was off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.bench_verify.environment import Environment
from sglang.bench_verify.gpu import Load
from sglang.bench_verify.rows import Metric, Results, Row
from sglang.bench_verify.suspects import COMMUNICATION, ONE_RANK, rule_for

# Two medians closer than this are the same figure unless their repeats say otherwise.
SAME = 0.03


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same in both runs."""

    name: str
    a: str
    b: str
    weight: int
    phases: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Moved:
    """One figure of the same case that is not the same in both runs; ``once`` where a run has no repeat of it."""

    case: str
    metric: str
    unit: str
    a: float
    b: float
    noise: float
    once: bool = False

    @property
    def ratio(self) -> float:
        """B over A."""
        return self.b / self.a if self.a else float("inf")


@dataclass
class Report:
    """The comparison of two files."""

    moved: list[Moved] = field(default_factory=list)
    compared: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def suspects(self) -> list[Difference]:
        """Differences that can have moved a phase that did move, strongest first.

        Where no phase is known (only totals were measured) every weighted difference is one.
        """
        phases = {phase for item in self.moved if (phase := _phase(item.metric)) is not None}
        ranked = [
            item for item in self.differences if item.weight > 0 and (not phases or phases & set(item.phases))
        ]
        return sorted(ranked, key=lambda item: (-item.weight, item.name))


def compare(a: Results, b: Results) -> Report:
    """Compare the rows of the same cases and the environments behind them.

    Variants are part of the rows but not of the match when one file holds one variant and the other
    file the other: that is the comparison of fork with upstream.
    """
    report = Report()
    loose = len({row.variant for row in a.rows + b.rows}) > 1 and (
        len({row.variant for row in a.rows}) == 1 and len({row.variant for row in b.rows}) == 1
    )
    left, right = _cases(a.rows, loose), _cases(b.rows, loose)
    report.only_a = [rows[0].label() for key, rows in left.items() if key not in right]
    report.only_b = [rows[0].label() for key, rows in right.items() if key not in left]
    pairs = [(rows, right[key]) for key, rows in left.items() if key in right]
    for ones, others in pairs:
        report.compared += 1
        report.moved.extend(_moved(ones, others))
    seen: dict[str, Difference] = {}
    met = {(one.environment, other.environment) for ones, others in pairs for one in ones for other in others}
    for index_a, index_b in sorted(met) or [(0, 0)]:
        if index_a < len(a.environments) and index_b < len(b.environments):
            for item in differences(a.environments[index_a], b.environments[index_b]):
                seen.setdefault(item.name, item)
    for ones, others in pairs:
        for item in _topics_off(ones[0], others[0]):
            seen[item.name] = item
    report.differences = sorted(seen.values(), key=lambda item: (-item.weight, item.name))
    return report


def differences(a: Environment, b: Environment) -> list[Difference]:
    """Every named difference between two environment records, with the rule that weighs it."""
    left, right = dict(_flatten(a)), dict(_flatten(b))
    found: list[Difference] = []
    for name in sorted(set(left) | set(right)):
        one, other = left.get(name, ""), right.get(name, "")
        if one == other or (name.startswith("load.") and _close(one, other)):
            continue
        if name == "uptime_s" and not _rebooted(one, other):
            continue
        # A worker that reported nothing differs in knowledge, not in behaviour.
        if name.startswith("rank.") and (not a.ranks or not b.ranks):
            name, one, other = "rank.missing", str(len(a.ranks)), str(len(b.ranks))
            if any(item.name == name for item in found):
                continue
        # The same for clocks and link under load; a link at rest is not compared with one that works.
        if a.load.samples == 0 or b.load.samples == 0:
            if name.startswith("gpu.pcie_") and not (one and other):
                continue
            if name.startswith("load."):
                name, one, other = "load.missing", str(a.load.samples), str(b.load.samples)
                if one == other or any(item.name == name for item in found):
                    continue
        rule = rule_for(name)
        if COMMUNICATION.fullmatch(name) and _one_rank(a) and _one_rank(b):
            rule = ONE_RANK
        found.append(
            Difference(name, one or "(not set)", other or "(not set)", rule.weight, rule.phases, rule.why)
        )
    return found


def _one_rank(record: Environment) -> bool:
    """Whether the record is known to be of a server of one rank, which reduces nothing."""
    arguments = record.server_arguments
    sizes = [arguments.get(name, "1") for name in ("tp_size", "pp_size", "dp_size", "ep_size")]
    return "tp_size" in arguments and set(sizes) == {"1"} and len(record.ranks) <= 1


def _flatten(record: Environment) -> Iterable[tuple[str, str]]:
    for name in ("base_version", "fork_version", "commit", "python", "cuda", "cuda_driver", "nccl_version", "host",
                 "cpu", "kernel", "container", "topology", "command"):  # fmt: skip
        yield name, str(getattr(record, name))
    yield "cpu_count", str(record.cpu_count)
    yield "uptime_s", "" if record.uptime_s is None else str(record.uptime_s)
    for prefix, mapping in (
        ("topic", record.topics),
        ("package", record.packages),
        ("variable", record.variables),
        ("argument", record.server_arguments),
        ("kernel_command_line", _words(record.kernel_command_line)),
    ):
        for name, value in mapping.items():
            yield f"{prefix}.{name}", str(value)
    if record.gpus:
        yield "gpu.count", str(len(record.gpus))
    for name in ("name", "driver", "mig", "memory_mib", "pcie_generation", "pcie_width", "nvlinks", "power_limit_w",
                 "sm_clock_max_mhz"):  # fmt: skip
        values = sorted({str(getattr(gpu, name)) for gpu in record.gpus} - {"None"})
        # The link of an idle GPU trains down; what counts is the link under load.
        if name in ("pcie_generation", "pcie_width") and getattr(record.load, name):
            continue
        if values:
            yield f"gpu.{name}", ",".join(values)
    yield from _flatten_load(record.load)
    for rank in record.ranks:
        yield "rank.nccl_version", rank.nccl_version
        for name, value in rank.variables.items():
            yield f"rank.{name}", value


def _flatten_load(load: Load) -> Iterable[tuple[str, str]]:
    for name in (
        "sm_clock_mhz",
        "memory_clock_mhz",
        "power_w",
        "temperature_c",
        "pcie_generation",
        "pcie_width",
    ):
        values = getattr(load, name)
        if values:
            yield f"load.{name}", ",".join(f"{value:g}" for value in values)


def _words(command_line: str) -> Mapping[str, str]:
    """Kernel settings by name; the boot image and the root device say nothing about speed."""
    pairs = (word.partition("=") for word in command_line.split())
    return {
        name: value or "on"
        for name, _, value in pairs
        if name not in ("BOOT_IMAGE", "root", "rootflags", "initrd")
    }


def _close(a: str, b: str) -> bool:
    left, right = a.split(","), b.split(",")
    if len(left) != len(right) or "" in left + right:
        return False
    return all(
        abs(float(x) - float(y)) <= SAME * max(abs(float(x)), abs(float(y)), 1e-9)
        for x, y in zip(left, right, strict=True)
    )


def _rebooted(a: str, b: str) -> bool:
    return bool(a and b) and float(b) < float(a)


def _cases(rows: Iterable[Row], loose: bool) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by case. Answers of one server to one prompt are repeats of a case: what spreads between them is noise."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        bench, machine, variant, case = row.key()
        if "prompt" in row.case:
            case = tuple(item for item in case if item[0] not in ("start", "run"))
        group = found.setdefault((bench, machine, case) if loose else (bench, machine, variant, case), [])
        if "prompt" not in row.case:
            # Elsewhere a later row of the same case replaces an earlier one.
            group.clear()
        group.append(row)
    return found


def _figures(rows: Sequence[Row]) -> dict[str, Metric]:
    """Metrics and phases of a case; of repeats the median, with each as a sample."""
    found: dict[str, list[Metric]] = {}
    for row in rows:
        phases = {f"phase {name}": Metric(value, "ms") for name, value in row.phases_ms.items()}
        for name, metric in {**row.metrics, **phases}.items():
            found.setdefault(name, []).append(metric)
    return {
        name: metrics[0]
        if len(metrics) == 1
        else Metric.of([metric.value for metric in metrics], metrics[0].unit)
        for name, metrics in found.items()
    }


def _label(rows: Sequence[Row]) -> str:
    if len(rows) == 1:
        return rows[0].label()
    case = {name: value for name, value in rows[0].case.items() if name not in ("start", "run")}
    return f"{dataclasses.replace(rows[0], case=case).label()} ({len(rows)} answers)"


def _moved(a: Sequence[Row], b: Sequence[Row]) -> Iterable[Moved]:
    figures_a, figures_b = _figures(a), _figures(b)
    for name, one in figures_a.items():
        other = figures_b.get(name)
        if other is None:
            continue
        noise = max(one.spread, other.spread, 1.0 + SAME)
        base = max(abs(one.value), 1e-12)
        ratio = abs(other.value) / base
        if ratio > noise or ratio < 1.0 / noise:
            once = min(len(one.samples), len(other.samples)) < 2
            yield Moved(_label(a), name, one.unit, one.value, other.value, noise, once)


def _phase(metric: str) -> str | None:
    name = metric.removeprefix("phase ")
    for phase in ("draft_extend", "draft", "verify", "sample", "host_gap", "decode"):
        if name == phase or name.startswith(phase + "_"):
            return phase
    return None


def _topics_off(a: Row, b: Row) -> Iterable[Difference]:
    for topic in sorted(set(a.topics_off) ^ set(b.topics_off)):
        rule = rule_for(f"topic.{topic}")
        one, other = ("off", "on") if topic in a.topics_off else ("on", "off")
        yield Difference(f"topic.{topic}", one, other, rule.weight, rule.phases, rule.why)


def render(report: Report) -> str:
    """The report as text; the last line is the verdict."""
    lines = [
        f"{report.compared} cases in both files, {len(report.moved)} figures moved beyond their repeats, "
        f"or by more than {100 * SAME:.0f}% where there are none"
    ]
    for item in report.moved:
        lines.append(
            f"  {item.case}: {item.metric} {item.a:.4g} -> {item.b:.4g} {item.unit} "
            f"(x{item.ratio:.3f}, {'not repeated' if item.once else f'repeats within x{item.noise:.3f}'})"
        )
    for title, labels in (("only in A", report.only_a), ("only in B", report.only_b)):
        lines.extend(f"  {title}: {label}" for label in labels)
    lines.append(f"{len(report.differences)} differences between the environments")
    for difference in report.differences:
        lines.append(
            f"  [{difference.weight}] {difference.name}: {_short(difference.a)} -> {_short(difference.b)} ({difference.why})"
        )
    suspects = report.suspects
    if not report.compared:
        lines.append("verdict: no case is in both files, so nothing was compared")
    elif not report.moved:
        lines.append("verdict: no figure moved")
    elif suspects:
        lines.append("verdict: suspects, strongest first: " + ", ".join(item.name for item in suspects[:5]))
    else:
        lines.append(
            "verdict: figures moved and nothing recorded explains it: repeat both runs before believing either"
        )
    return "\n".join(lines)


def _short(text: str, limit: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."
