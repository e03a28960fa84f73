"""Is the one-shot all-reduce *faster* here? A table answers, never a product name.

A measured table is made on the machine itself (``python -m sglang.bench_all_reduce``). Without one, a shipped
default serves small messages over PCIe only, and says that it was not measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

#: Who reduces. ``STOCK`` is what upstream would have used: NCCL, or its own custom all-reduce where it is on.
ONE_SHOT = "one-shot"
TWO_STAGE = "two-stage"
PACKETS = "packets"
STOCK = "stock"
OURS = (ONE_SHOT, PACKETS, TWO_STAGE)
#: Which protocol one hop uses: as the table says, flags always, or packets wherever a message fits.
AUTO, FLAGS = "auto", "flags"

#: What is reduced: a sum alone, or sum + residual + RMSNorm.
PLAIN = "plain"
FUSED = "fused"

#: A path of ours has to be this much faster than stock before it is taken: what repeats of one case differ by.
MARGIN = 0.05
#: A limit in bytes that no message reaches.
EVERYTHING = 1 << 62


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
        limits: kind -> (method, largest message in bytes that it serves), ascending; used only without points.
        origin: where this came from, in words.
    """

    key: Key
    points: tuple[Point, ...] = ()
    limits: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    origin: str = ""

    def choose(self, kind: str, size: int) -> Choice:
        """Who reduces a message of ``size`` bytes.

        The nearest measured message that is not smaller decides: every method costs at most as much for a smaller
        one, and the crossover to stock comes from above. Beyond the largest measured message stock reduces.
        """
        if not self.points:
            for method, limit in self.limits.get(kind, ()):
                if size <= limit:
                    return Choice(method, f"{self.origin}: at most {limit} bytes")
            last = self.crossover(kind)
            return Choice(STOCK, f"{self.origin}: above {last} bytes" if last else self.origin)
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
            return max((limit for _, limit in self.limits.get(kind, ())), default=0)
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
            spans = self._spans(kind)
            words = [f"{method} up to {limit} bytes" for method, limit in spans if limit < EVERYTHING]
            rest = next((method for method, limit in spans if limit >= EVERYTHING), STOCK)
            lines.append((kind, ", ".join([*words, f"{rest} above"] if words else [rest])))
        return lines

    def _spans(self, kind: str) -> list[tuple[str, int]]:
        """(method, last known size) of each run of sizes that one method serves, up to the crossover."""
        known = sorted(p.bytes for p in self.points if p.kind == kind)
        if not self.points:
            known = [limit for _, limit in self.limits.get(kind, ())]
        spans: list[tuple[str, int]] = []
        for size in known:
            method = self.choose(kind, size).method
            if spans and spans[-1][0] == method:
                spans.pop()
            spans.append((method, size))
        while spans and spans[-1][0] == STOCK:
            spans.pop()
        return spans


# Nobody has measured these kernels on PCIe yet. The limits follow public figures of other one-shot push kernels,
# and stay below their crossovers: 8 ranks behind switches take 16.5 us at 32 KB where NCCL takes 24 and more; on
# a 4-rank tree 128 KB is still ahead and 384 KB behind. The farther the path, the earlier NCCL's ring wins, since
# push sends every byte ranks - 1 times over the link that it shares. These are one-shot's limits; two-stage sends
# 2 / ranks of its bytes in two hops, so it goes on where one-shot ends: to the size at which it would send as much,
# less a quarter for the second hop.
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
            # Packets beat upstream's custom all-reduce on two H200; its multicast and FlashInfer's fused form were not there.
            "NV": "upstream has kernels for NVLink; measure this machine to let ours take over",
            "same": "several ranks on one GPU are no serving set-up",
            "cpu": "a processor has no such kernel",
        }.get(key.link, "the path between the GPUs is not known")
        return Table(key, origin=f"shipped default ({why})")
    limits = _limits(next((size for most, size in by_ranks.items() if key.ranks <= most), 0), key.ranks)
    return Table(
        key,
        limits={PLAIN: limits, FUSED: limits},
        origin=f"shipped default for {key.link} with {key.ranks} ranks, not measured here",
    )


def _limits(one_shot: int, ranks: int) -> tuple[tuple[str, int], ...]:
    """One-shot up to its limit in bytes, then two-stage where it saves enough of the link."""
    two_stage = one_shot * ranks // 2 * 3 // 4
    if not one_shot:
        return ()
    return ((ONE_SHOT, one_shot), *([(TWO_STAGE, two_stage)] if two_stage > one_shot else []))


def forced(key: Key, method: str = ONE_SHOT) -> Table:
    """Every message that the gate admits (``SGLANG_FORK_ALL_REDUCE=force``)."""
    if method not in OURS:
        raise ValueError(f"method {method!r} is not one of {', '.join(OURS)}")
    everything = ((method, EVERYTHING),)
    return Table(key, limits={PLAIN: everything, FUSED: everything}, origin="forced by the setting")


def with_protocol(table: Table, protocol: str) -> Table:
    """A table whose messages of one hop use flags only, or packets (``SGLANG_FORK_ALL_REDUCE_PROTOCOL``).

    With ``PACKETS`` a point without a figure for them has that of flags: a forced protocol is for comparing, and
    messages too large for packets are sent with flags by the communicator.

    Raises:
        ValueError: an unknown protocol.
    """
    if protocol == AUTO:
        return table
    if protocol not in (FLAGS, PACKETS):
        raise ValueError(f"protocol {protocol!r} is not one of {AUTO}, {FLAGS}, {PACKETS}")
    kept, dropped = (ONE_SHOT, PACKETS) if protocol == FLAGS else (PACKETS, ONE_SHOT)

    def times(us: Mapping[str, float]) -> dict[str, float]:
        rest = {method: figure for method, figure in us.items() if method != dropped}
        return rest if kept in rest or dropped not in us else {**rest, kept: us[dropped]}

    return replace(
        table,
        points=tuple(replace(point, us=times(point.us)) for point in table.points),
        limits={
            kind: tuple((kept if method == dropped else method, size) for method, size in spans)
            for kind, spans in table.limits.items()
        },
        origin=f"{table.origin}, {protocol} by the setting",
    )


def from_measurements(key: Key, points: Sequence[Point], origin: str) -> Table:
    """A table of measured points.

    Raises:
        ValueError: no points, or a point without a figure of stock, with a figure that is not positive, of an
            unknown kind, or of a kind and size that there is already.
    """
    if not points:
        raise ValueError("a measured table needs at least one point")
    for point in points:
        if point.kind not in (PLAIN, FUSED):
            raise ValueError(f"kind {point.kind!r} is not {PLAIN} or {FUSED}")
        if STOCK not in point.us:
            raise ValueError(f"{point.kind} at {point.bytes} bytes has no figure of {STOCK}")
        if point.bytes <= 0 or any(not 0 < us < float("inf") for us in point.us.values()):
            raise ValueError(f"{point.kind} at {point.bytes} bytes: sizes and times have to be positive")
    if len({(point.kind, point.bytes) for point in points}) < len(points):
        raise ValueError("two points of one kind and size")
    return Table(key, points=tuple(points), origin=origin)
