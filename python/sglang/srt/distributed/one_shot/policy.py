"""Is the one-shot all-reduce *faster* here? A table answers, never a product name.

A measured table is made on the machine itself (``python -m sglang.bench_all_reduce``). Without one, a shipped
default serves small messages over PCIe only, and says that it was not measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Who reduces. ``STOCK`` is what upstream would have used: NCCL, or its own custom all-reduce where it is on.
ONE_SHOT = "one-shot"
TWO_STAGE = "two-stage"
STOCK = "stock"
OURS = (ONE_SHOT, TWO_STAGE)

#: What is reduced: a sum alone, or sum + residual + RMSNorm.
PLAIN = "plain"
FUSED = "fused"

#: A path of ours has to be this much faster than stock before it is taken: what repeats of one case differ by.
MARGIN = 0.05


@dataclass(frozen=True)
class Point:
    """Measured microseconds of one message.

    Attributes:
        kind: ``PLAIN`` or ``FUSED``.
        rows: tokens.
        bytes: rows x hidden x element size.
        us: method -> microseconds in graph replay. ``STOCK`` has to be there.
    """

    kind: str
    rows: int
    bytes: int
    us: Mapping[str, float]


@dataclass(frozen=True)
class Key:
    """The machine a table holds for. A table of another key is not used."""

    gpu: str
    link: str
    ranks: int
    driver: str


@dataclass(frozen=True)
class Choice:
    """Who reduces, and why in words. ``measured`` tells a table's figure from a shipped default."""

    method: str
    reason: str
    measured: bool = False


@dataclass(frozen=True)
class Table:
    """Points of one machine, or a limit in bytes where nothing was measured.

    Attributes:
        key: the machine.
        points: measured messages, any order.
        limits: kind -> largest message in bytes that ``ONE_SHOT`` serves; used only without points.
        origin: where this came from, in words.
    """

    key: Key
    points: tuple[Point, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    origin: str = ""

    def choose(self, kind: str, size: int) -> Choice:
        """Who reduces a message of ``size`` bytes.

        The nearest measured message that is not smaller decides: every method costs at most as much for a smaller
        one, and the crossover to stock comes from above. Beyond the largest measured message stock reduces.
        """
        if not self.points:
            limit = self.limits.get(kind, 0)
            if size <= limit:
                return Choice(ONE_SHOT, f"{self.origin}: at most {limit} bytes")
            return Choice(STOCK, f"{self.origin}: above {limit} bytes" if limit else self.origin)
        above = [point for point in self.points if point.kind == kind and point.bytes >= size]
        if not above:
            return Choice(STOCK, f"{self.origin}: larger than any measured message", measured=True)
        point = min(above, key=lambda entry: entry.bytes)
        ours = {method: us for method, us in point.us.items() if method in OURS}
        best = min(ours, key=lambda method: ours[method], default=STOCK)
        stock = point.us[STOCK]
        if best != STOCK and ours[best] <= stock * (1 - MARGIN):
            return Choice(
                best, f"{self.origin}: {ours[best]:.1f} us against {stock:.1f} at {point.bytes} bytes", True
            )
        return Choice(STOCK, f"{self.origin}: stock takes {stock:.1f} us at {point.bytes} bytes", True)

    def crossover(self, kind: str) -> int:
        """The largest known message in bytes that ours serves; 0 if none."""
        if not self.points:
            return self.limits.get(kind, 0)
        served = [
            p.bytes for p in self.points if p.kind == kind and self.choose(kind, p.bytes).method in OURS
        ]
        return max(served, default=0)

    def describe(self) -> list[tuple[str, str]]:
        """Lines for a person."""
        lines = [
            ("table", self.origin),
            (
                "for",
                f"{self.key.gpu}, {self.key.link}, {self.key.ranks} ranks, driver {self.key.driver or 'not known'}",
            ),
        ]
        for kind in (PLAIN, FUSED):
            limit = self.crossover(kind)
            lines.append((kind, f"ours up to {limit} bytes, stock above" if limit else "stock"))
        return lines


# Nobody has measured these kernels on PCIe yet. The limits follow public figures of other one-shot push kernels,
# and stay below their crossovers: 8 ranks behind switches take 16.5 us at 32 KB where NCCL takes 24 and more; on
# a 4-rank tree 128 KB is still ahead and 384 KB behind. The farther the path, the earlier NCCL's ring wins, since
# push sends every byte ranks - 1 times over the link that it shares.
_NEAR = {4: 65_536, 8: 49_152}
_HOST = {4: 49_152, 8: 16_384}
_SOCKETS = {4: 16_384, 8: 16_384}
_BY_LINK: Mapping[str, Mapping[int, int]] = {
    "PIX": _NEAR,
    "PXB": _NEAR,
    "PHB": _HOST,
    "NODE": _HOST,
    "SYS": _SOCKETS,
}


def shipped(key: Key) -> Table:
    """The default for a machine nobody has measured: conservative, and its reason says so."""
    by_ranks = _BY_LINK.get(key.link)
    if by_ranks is None:
        why = {
            "NV": "upstream has kernels for NVLink; measure this machine to let ours take over",
            "same": "several ranks on one GPU are no serving set-up",
            "cpu": "a processor has no such kernel",
        }.get(key.link, "the path between the GPUs is not known")
        return Table(key, origin=f"shipped default ({why})")
    limit = next((size for most, size in by_ranks.items() if key.ranks <= most), 0)
    return Table(
        key,
        limits={PLAIN: limit, FUSED: limit},
        origin=f"shipped default for {key.link} with {key.ranks} ranks, not measured here",
    )


def forced(key: Key, method: str = ONE_SHOT) -> Table:
    """Every message that the gate admits (``SGLANG_FORK_ALL_REDUCE=force``)."""
    if method not in OURS:
        raise ValueError(f"method {method!r} is not one of {', '.join(OURS)}")
    everything = 1 << 62
    if method == ONE_SHOT:
        return Table(key, limits={PLAIN: everything, FUSED: everything}, origin="forced by the setting")
    points = tuple(Point(kind, 0, everything, {method: 0.0, STOCK: 1.0}) for kind in (PLAIN, FUSED))
    return Table(key, points=points, origin="forced by the setting")


def from_measurements(key: Key, points: Sequence[Point], origin: str) -> Table:
    """A table of measured points.

    Raises:
        ValueError: no points, or a point without a figure of stock, with a figure that is not positive, or of an
            unknown kind.
    """
    if not points:
        raise ValueError("a measured table needs at least one point")
    for point in points:
        if point.kind not in (PLAIN, FUSED):
            raise ValueError(f"kind {point.kind!r} is not {PLAIN} or {FUSED}")
        if STOCK not in point.us:
            raise ValueError(f"{point.kind} at {point.bytes} bytes has no figure of {STOCK}")
        if point.bytes <= 0 or any(not us > 0 for us in point.us.values()):
            raise ValueError(f"{point.kind} at {point.bytes} bytes: sizes and times have to be positive")
    return Table(key, points=tuple(points), origin=origin)
