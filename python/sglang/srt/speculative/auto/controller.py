"""Speculate or decode plainly? A state machine over live times; no clock, no device, no randomness of its own.

A cycle of ``c`` ms that keeps ``k`` tokens beats a decode of ``d`` ms when ``k * d / c > 1``. While one mode runs the
other's time goes stale, so it is probed now and then; a probe waits until what it is expected to lose is a fixed share
of the time since the one before, so that no single probe is dear for the requests that meet it. Modes change at
epochs only, so that all ranks can follow one of them at the same step.

What keeps it from flapping: the margins of leaving and coming back lie apart; a change needs the same verdict in
several epochs running; and each change back widens the margins for a while. What keeps it from switching by a figure
that is borrowed or old: such a verdict asks for a probe, and the probe decides. A probe that brought too few figures
(prefills lay between its steps, or its request ended) runs for one more epoch; one that still has too few, or at whose
end another batch runs than it was asked for, decides nothing. A stretch of slow steps (another process on the host)
looks like a reason to change while only one of the two figures is live; a probe that meets the same stretch says that it
is none, and one that wins costs nothing, since what it runs is the mode to come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang.srt.speculative.auto.cells import ENOUGH, PLAIN, SPECULATE, Cells, Kept, Key, key_of

NEVER = -(1 << 60)


@dataclass(frozen=True)
class Settings:
    """Constants of the machine; times in steps unless said otherwise.

    Attributes:
        epoch: steps between two decisions.
        settle: step times discarded after a change: the pipeline still holds steps of the other mode.
        confirm: epochs in which a verdict must repeat before it may ask for the probe that decides.
        leave: speed-up below which speculation is left.
        come_back: speed-up above which it is taken up again.
        widen: both margins move apart by this for each recent change, at most ``widest``.
        calm: steps after which one recent change is forgotten. Longer than the longest backoff, or the next probe
            that wins by chance would find narrow margins again.
        budget: share of the time since the last probe or switch that a probe may lose.
        credit_ms: probe losses that are free in the first ``longest`` steps. Not later: saved up, they would be spent
            at once on a cycle that costs a hundred decodes.
        refresh: age at which a time is measured again.
        check: steps from the probe that brought speculation back to a probe of plain decode, whose figure is older. By
            then the window of cycles is filled anew, so that both are of the same days.
        close: probe plain decode again only where the speed-up is below this.
        backoff: steps to the next probe of speculation, doubled after each that lost, at most ``longest``. Speculation
            that was left again within ``brief`` steps counts as a probe that lost.
    """

    epoch: int = 8
    settle: int = 2
    confirm: int = 2
    leave: float = 0.98
    come_back: float = 1.04
    widen: float = 0.02
    widest: float = 0.10
    calm: int = 8192
    budget: float = 0.015
    credit_ms: float = 400.0
    refresh: int = 8192
    check: int = 40
    close: float = 1.5
    backoff: int = 128
    longest: int = 4096
    brief: int = 512


@dataclass(frozen=True)
class Verdict:
    """The figures behind a decision.

    Attributes:
        key: batch and context bucket.
        cycle_ms: one cycle.
        decode_ms: one plain decode.
        kept: tokens a cycle keeps.
        speedup: ``kept * decode_ms / cycle_ms``; None while one of them is unknown.
    """

    key: Key
    cycle_ms: float | None
    decode_ms: float | None
    kept: float | None

    @property
    def speedup(self) -> float | None:
        """Tokens a second with speculation over without."""
        if not self.cycle_ms or not self.decode_ms or self.kept is None:
            return None
        return self.kept * self.decode_ms / self.cycle_ms

    def text(self) -> str:
        """One line for logs."""
        if self.speedup is None:
            return f"batch {self.key[0]}, context up to {1 << self.key[1]}: not measured yet"
        return (
            f"batch {self.key[0]}, context up to {1 << self.key[1]}: cycle {self.cycle_ms:.2f} ms keeps "
            f"{self.kept:.2f}, decode {self.decode_ms:.2f} ms: speculation is {self.speedup:.2f}x"
        )


@dataclass(frozen=True)
class Event:
    """Something that the controller did: ``switch`` (it stays), ``probe`` (for an epoch), ``drop`` (of a probe)."""

    kind: str
    mode: str
    verdict: Verdict


class Controller:
    """Chooses the mode of every step. ``choose`` before a step, ``took`` and ``kept`` as figures come in."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.cells = Cells()
        self.kept_tokens = Kept()
        self.mode = SPECULATE
        self.probing: str | None = None
        self.switches = 0
        self.probes = 0
        self.dropped = 0
        self.lost_ms = 0.0
        self.spent_ms = 0.0
        self._step = 0
        self._since = 0
        self._streak = 0
        self._recent = 0.0
        self._recent_at = 0
        self._probed_at = NEVER
        self._dropped_at = NEVER
        self._extended = False
        self._came_back_at = NEVER
        self._lost: dict[str, tuple[Key, int]] = {}
        self._probe_key: Key = (0, 0)
        self._probe_ms: list[float] = []
        self._settled_ms = 0.0
        self._backoff = self.settings.backoff
        self._events: list[Event] = []

    @property
    def running(self) -> str:
        """The mode of the current epoch, probe or not."""
        return self.probing or self.mode

    def at_epoch(self) -> bool:
        """Whether the next step may change the mode."""
        return self._step % self.settings.epoch == 0

    def choose(self, batch: int, context: int) -> str:
        """The mode of the next step."""
        if self.at_epoch():
            self._decide(key_of(batch, context))
        self._step += 1
        self._since += 1
        return self.running

    def follow(self, mode: str) -> None:
        """Take another rank's decision in place of one's own."""
        if mode != self.running:
            self.mode, self.probing = mode, None
            self._since = 0

    def took(self, mode: str, batch: int, context: int, ms: float) -> None:
        """A step of ``mode`` took ``ms``. Steps that do not follow one of the same make are left out by the caller."""
        self.spent_ms += ms
        key = key_of(batch, context)
        self._charge(mode, key, ms)
        if mode == self.running and self._since > self.settings.settle:
            self.cells.add(mode, key, ms, self._step)
            if self.probing is not None and key == self._probe_key:
                self._probe_ms.append(ms)

    def kept(self, kept: float, requests: int) -> None:
        """A cycle kept ``kept`` tokens a request, bonus included."""
        self.kept_tokens.add(kept, requests)

    def verdict(self, batch: int, context: int) -> Verdict:
        """The figures for a batch."""
        return self._verdict(key_of(batch, context))

    def drain(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def _verdict(self, key: Key) -> Verdict:
        return Verdict(key, self.cells.ms(SPECULATE, key), self.cells.ms(PLAIN, key), self.kept_tokens.mean)

    def _margins(self) -> tuple[float, float]:
        rules = self.settings
        while self._recent >= 1.0 and self._step - self._recent_at >= rules.calm:
            self._recent -= 1.0
            self._recent_at += rules.calm
        wider = min(rules.widen * max(self._recent - 1.0, 0.0), rules.widest)
        return rules.leave - wider, rules.come_back + wider

    def _decide(self, key: Key) -> None:
        enough = len(self._probe_ms) >= ENOUGH
        if self.probing is not None and key == self._probe_key and not enough and not self._extended:
            self._extended = True
            return
        probed, self.probing = self.probing, None
        if probed is not None:
            self._since, self._settled_ms = 0, self.spent_ms
            if enough:
                # What lies before the probe may be of other days than the figure that it is compared with.
                self.cells.renew(probed, self._probe_key, self._probe_ms, self._step)
            if not enough or key != self._probe_key:
                self._drop(probed)
                return
        verdict = self._verdict(key)
        leave, come_back = self._margins()
        speedup = verdict.speedup
        if self.mode == PLAIN and speedup is not None and speedup > come_back:
            speedup = self._calm_speedup(verdict)
        if speedup is None:
            self._streak = 0
        elif self.mode == SPECULATE:
            self._streak = self._streak + 1 if speedup < leave else 0
        else:
            self._streak = self._streak + 1 if speedup > come_back else 0
        if probed == SPECULATE:
            # A probe of speculation is confirmation enough: a second one would cost as much again.
            won = speedup is not None and speedup > come_back
            self._streak = self.settings.confirm if won else 0
            self._backoff = self._backoff if won else min(self._backoff * 2, self.settings.longest)
        if probed is not None and self._streak == 0:
            self._lost[probed] = (key, self._step)
        other = PLAIN if self.mode == SPECULATE else SPECULATE
        if self._streak < self.settings.confirm:
            self._maybe_probe(key, verdict)
        elif probed == other:
            self._switch(other, verdict)
        elif self._may_ask(other, key):
            self._probe(other, verdict)

    def _calm_speedup(self, verdict: Verdict) -> float | None:
        """The speed-up over plain decode as it is without disturbances, where that is known.

        Plain steps are short, so what delays the host shows in them alone, and a cycle wins against such a stretch.
        What makes plain decode slower for good (text that is accepted, a longer context) is no such stretch.
        """
        own = self.cells.own(PLAIN, verdict.key)
        calm = own.calm_ms if own is not None else None
        if calm is None or verdict.decode_ms is None or calm >= verdict.decode_ms:
            return verdict.speedup
        return replace(verdict, decode_ms=calm).speedup

    def _may_ask(self, other: str, key: Key) -> bool:
        """Whether a verdict for ``other`` may have its probe; not again where one just said no."""
        # A dropped probe says nothing of any batch, and batches that keep changing would drop the next as well.
        if self._step - self._dropped_at < self.settings.backoff:
            return False
        where, at = self._lost.get(other, (None, NEVER))
        wait = self._backoff if other == SPECULATE else self.settings.backoff
        return where != key or self._step - at >= wait

    def _drop(self, probed: str) -> None:
        self._streak, self._dropped_at = 0, self._step
        self.dropped += 1
        self._events.append(Event("drop", probed, self._verdict(self._probe_key)))

    def _switch(self, mode: str, verdict: Verdict) -> None:
        self.mode, self._streak, self._since = mode, 0, 0
        self.switches += 1
        self._recent += 1.0
        self._recent_at = self._step
        self._settled_ms = self.spent_ms
        rules = self.settings
        if mode == SPECULATE:
            self._came_back_at = self._step
        else:
            self._probed_at = self._step
            brief = self._step - self._came_back_at < rules.brief
            self._backoff = min(self._backoff * 2, rules.longest) if brief else rules.backoff
        self._events.append(Event("switch", mode, verdict))

    def _maybe_probe(self, key: Key, verdict: Verdict) -> None:
        other = PLAIN if self.mode == SPECULATE else SPECULATE
        if self._wants_probe(other, key, verdict) and self._affords(other, verdict):
            self._probe(other, verdict)

    def _probe(self, other: str, verdict: Verdict) -> None:
        self.probing, self._since, self._probed_at = other, 0, self._step
        self._probe_key, self._probe_ms, self._extended = verdict.key, [], False
        self.probes += 1
        if other == SPECULATE:
            self.kept_tokens.forget(0.25)
        self._events.append(Event("probe", other, verdict))

    def _wants_probe(self, other: str, key: Key, verdict: Verdict) -> bool:
        rules = self.settings
        if other == PLAIN:
            # A cycle has to be known first, or there is nothing to compare with.
            if verdict.cycle_ms is None or verdict.kept is None:
                return False
            age = self.cells.age_near(PLAIN, key, self._step)
            # The figure that speculation came back against may be of slower days, and stays as it is while this runs.
            unchecked = age is not None and self._step - age < self._came_back_at
            first = unchecked and self._probed_at < self._came_back_at
            if self._step - self._probed_at < (rules.check if first else rules.backoff):
                return False
            if verdict.decode_ms is None:
                return True
            close = verdict.speedup is not None and verdict.speedup < rules.close
            return close and (age is None or age >= rules.refresh or unchecked)
        return self._step - self._probed_at >= self._backoff

    def _affords(self, other: str, verdict: Verdict) -> bool:
        rules = self.settings
        loss = self._expected_loss(other, verdict)
        if self._step < rules.longest and loss <= rules.credit_ms - self.lost_ms:
            return True
        return loss <= rules.budget * (self.spent_ms - self._settled_ms)

    def _expected_loss(self, other: str, verdict: Verdict) -> float:
        """Milliseconds that a probe of one epoch loses, by what is known; the whole epoch where nothing is."""
        steps = self.settings.epoch
        if other == SPECULATE:
            if verdict.cycle_ms is None:
                return steps * (verdict.decode_ms or 0.0)
            return steps * max(0.0, verdict.cycle_ms - (verdict.kept or 1.0) * (verdict.decode_ms or 0.0))
        if verdict.decode_ms is None:
            return 0.0
        per_token = (verdict.cycle_ms or 0.0) / max(verdict.kept or 1.0, 1.0)
        return steps * max(0.0, verdict.decode_ms - per_token)

    def _charge(self, mode: str, key: Key, ms: float) -> None:
        """Book what a step of a probe lost against the mode that it interrupts."""
        if self.probing is None or mode != self.probing:
            return
        kept = self.kept_tokens.mean or 1.0
        if mode == SPECULATE:
            decode = self.cells.ms(PLAIN, key)
            self.lost_ms += max(0.0, ms - kept * decode) if decode is not None else ms
        else:
            cycle = self.cells.ms(SPECULATE, key)
            self.lost_ms += max(0.0, ms - cycle / kept) if cycle is not None else 0.0


class Scripted:
    """Switches every ``every`` steps, whatever the figures say: for tests of the switch itself."""

    def __init__(self, every: int) -> None:
        self.every, self.mode, self.probing = every, SPECULATE, None
        self.switches = self.probes = self.dropped = 0
        self.lost_ms = self.spent_ms = 0.0
        self.cells, self.kept_tokens = Cells(), Kept()
        self._step = 0
        self._events: list[Event] = []

    @property
    def running(self) -> str:
        """The mode of the last step."""
        return self.mode

    def at_epoch(self) -> bool:
        """Every step may change the mode."""
        return True

    def choose(self, batch: int, context: int) -> str:
        """The mode of the next step."""
        mode = PLAIN if (self._step // self.every) % 2 else SPECULATE
        self._step += 1
        if mode != self.mode:
            self.mode = mode
            self.switches += 1
            self._events.append(Event("switch", mode, self.verdict(batch, context)))
        return mode

    def follow(self, mode: str) -> None:
        """Nothing to follow: every rank counts the same steps."""

    def took(self, mode: str, batch: int, context: int, ms: float) -> None:
        """Kept for the report."""
        self.cells.add(mode, key_of(batch, context), ms, self._step)

    def kept(self, kept: float, requests: int) -> None:
        """Kept for the report."""
        self.kept_tokens.add(kept, requests)

    def verdict(self, batch: int, context: int) -> Verdict:
        """The figures for a batch."""
        key = key_of(batch, context)
        return Verdict(key, self.cells.ms(SPECULATE, key), self.cells.ms(PLAIN, key), self.kept_tokens.mean)

    def drain(self) -> list[Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events


__all__ = ["ENOUGH", "PLAIN", "SPECULATE", "Controller", "Event", "Scripted", "Settings", "Verdict"]
