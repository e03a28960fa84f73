"""Several engines resident at once, measured in turn."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from sglang.bench_verify.slice.host import MARK
from sglang.bench_verify.slice.shapes import Shape, write_models

HOST = Path(__file__).resolve().parent / "host.py"
INJECT = HOST.parent / "inject"
# Topics that describe, measure, refuse bad arguments or make a CPU run possible. Every other topic changes
# what upstream does.
NEUTRAL = ("fork-report", "cpu-eagle", "verify-stats", "spec-arguments")


class EngineError(RuntimeError):
    """An engine that did not start or did not answer in time; the message holds its last output."""


@dataclass(frozen=True)
class EngineSpec:
    """One variant.

    Attributes:
        name: unique in a fleet.
        steps: draft steps; 0 = no speculation. The verify width is ``steps + 1``.
        variant: ``fork`` or ``upstream``, for the rows.
        topics_off: topics of the fork switched off; for upstream's behaviour see ``stock_topics``.
        accept_length: simulated accept length, bonus included; None leaves acceptance real.
        package: folder to import ``sglang`` from in place of this one (a clean upstream tree).
        arguments: further engine arguments.
        environment: further variables.
    """

    name: str
    steps: int = 2
    variant: str = "fork"
    topics_off: tuple[str, ...] = ()
    accept_length: float | None = 2.0
    package: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def draft_tokens(self) -> int:
        """Tokens of a verify; 0 without speculation."""
        return self.steps + 1 if self.steps else 0


@dataclass(frozen=True)
class SliceOptions:
    """What all engines of a fleet share. ``arguments`` are further ones of ``sglang.Engine``."""

    device: str = "cuda"
    backend: str = "triton"
    dtype: str = "bfloat16"
    pool_tokens: int = 132096
    max_batch: int = 4
    random_router: bool = True
    start_limit_s: float = 300.0
    answer_limit_s: float = 300.0
    ranks: int = 1
    arguments: tuple[tuple[str, Any], ...] = ()


def stock_topics() -> tuple[str, ...]:
    """Topics to switch off for upstream's behaviour: all but the neutral ones.

    Empty in a tree that was not composed.
    """
    from sglang.fork import topics

    return tuple(topic.name for topic in topics() if topic.state == "applied" and topic.name not in NEUTRAL)


class Engine:
    """One engine process."""

    def __init__(self, shape: Shape, spec: EngineSpec, options: SliceOptions, folder: Path) -> None:
        self.spec = spec
        self.startup_s = self.import_s = 0.0
        self._options = options
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=60)
        home = folder / spec.name
        target, draft = write_models(shape, home, options.dtype)
        self.union_file = home / "union.txt"
        self.union_file.unlink(missing_ok=True)
        settings = engine_arguments(spec, options, str(target), str(draft))
        settings["vocabulary"] = shape.vocabulary
        self._process = subprocess.Popen(
            # By path, so that it also drives a clean upstream package, which has no such module.
            [sys.executable, str(HOST), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=engine_environment(spec, options, self.union_file),
        )
        threading.Thread(target=self._read, name=f"engine-{spec.name}", daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until the engine serves; ``import_s`` of ``startup_s`` were its imports. Raises EngineError with its last output."""
        ready = self._receive(self._options.start_limit_s)
        self.startup_s, self.import_s = float(ready["startup_s"]), float(ready["import_s"])

    def measure(
        self, context: int, batch: int = 1, tokens: int = 128, seed: int = 0, watch: bool = False
    ) -> dict[str, Any]:
        """See ``host.measure``."""
        request = {"op": "measure", "context": context, "batch": batch, "tokens": tokens, "seed": seed}
        return self._ask({**request, "watch": True} if watch else request)

    def generate(self, context: int, batch: int, tokens: int, seed: int = 0) -> list[int]:
        """Run one batch, untimed; the tokens that each request got."""
        request = {"op": "generate", "context": context, "batch": batch, "tokens": tokens, "seed": seed}
        found: list[int] = self._ask(request)["completion_tokens"]
        return found

    def profile(self, context: int, tokens: int, folder: str | Path, seed: int = 0) -> Path:
        """Profile one request; the trace file (see ``trace.summarize``)."""
        request = {"op": "profile", "context": context, "tokens": tokens, "folder": str(folder), "seed": seed}
        return Path(self._ask(request)["trace"])

    def state(self) -> dict[str, Any]:
        """The scheduler's statistics."""
        return self._ask({"op": "state"})

    def experts_per_layer(self, tokens: int) -> float | None:
        """Mean distinct experts counted in eager passes of ``tokens`` tokens; None when none ran."""
        if not self.union_file.exists():
            return None
        pairs = [line.split() for line in self.union_file.read_text(encoding="utf-8").splitlines()]
        counts = [int(pair[1]) for pair in pairs if len(pair) == 2 and int(pair[0]) == tokens]
        return sum(counts) / len(counts) if counts else None

    def stop(self) -> None:
        """Ask the engine to end, and end it."""
        stream = self._process.stdin
        if stream is not None and self._process.poll() is None:
            try:
                self._send(stream, {"op": "stop"})
                stream.close()
            except OSError:
                pass
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stream = self._process.stdin
        if stream is None:
            raise EngineError(f"engine {self.spec.name} has no input")
        self._send(stream, request)
        answer = self._receive(self._options.answer_limit_s)
        if not answer.get("ok"):
            raise EngineError(f"engine {self.spec.name}: {answer.get('error')}\n{self._last_output()}")
        result: dict[str, Any] = answer["result"]
        return result

    @staticmethod
    def _send(stream: IO[str], message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    def _read(self) -> None:
        stream = self._process.stdout
        if stream is not None:
            for line in stream:
                if line.startswith(MARK):
                    self._lines.put(line[len(MARK) :])
                else:
                    self._tail.append(line.rstrip())
        self._lines.put(None)

    def _receive(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise EngineError(
                f"engine {self.spec.name} gave no answer within {limit_s:.0f} s\n{self._last_output()}"
            ) from None
        if line is None:
            raise EngineError(f"engine {self.spec.name} ended\n{self._last_output()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_output(self) -> str:
        return "\n".join(self._tail)


class Fleet:
    """Engines of one shape, started side by side and measured one at a time."""

    def __init__(
        self,
        shape: Shape,
        specs: Sequence[EngineSpec],
        folder: str | Path,
        options: SliceOptions | None = None,
    ) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ValueError(f"engine names repeat: {', '.join(names)}")
        self.shape = shape
        self.options = options or SliceOptions()
        self.specs = list(specs)
        self.engines: dict[str, Engine] = {}
        self.failures: dict[str, str] = {}
        self._folder = Path(folder)

    def __enter__(self) -> Fleet:
        started = {spec.name: Engine(self.shape, spec, self.options, self._folder) for spec in self.specs}
        try:
            for name, engine in started.items():
                try:
                    engine.wait_ready()
                    self.engines[name] = engine
                except EngineError as error:
                    # One variant that cannot start must not cost the others their measurement.
                    self.failures[name] = str(error)
                    engine.stop()
        except BaseException:  # an interrupt: without this block's end nobody else would stop them
            for engine in started.values():
                engine.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self.engines.values():
            engine.stop()

    def measure(
        self, name: str, context: int, batch: int = 1, tokens: int = 128, watch: bool = False
    ) -> dict[str, Any]:
        """Measure one engine while the others are idle; ``watch``: with its state around the timed tokens."""
        return self.engines[name].measure(context, batch, tokens, watch=watch)

    def in_turn(
        self,
        context: int,
        batch: int = 1,
        tokens: int = 128,
        rounds: int = 2,
        deadline: float | None = None,
        watch: bool = False,
    ) -> dict[str, list[dict[str, Any]]]:
        """Measure every engine ``rounds`` times, forth and back, so that a drifting clock hits all alike.

        ``deadline`` (``time.monotonic()``) ends early, at the end of a measurement. ``watch`` as in ``measure``.
        """
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.engines}
        for round_index in range(rounds):
            order = list(self.engines)
            for name in order if round_index % 2 == 0 else reversed(order):
                if deadline is not None and time.monotonic() > deadline:
                    return found
                try:
                    found[name].append(self.measure(name, context, batch, tokens, watch))
                except EngineError as error:
                    self.failures[f"{name} at {context}"] = str(error)
        return found


def engine_arguments(spec: EngineSpec, options: SliceOptions, target: str, draft: str) -> dict[str, Any]:
    """Arguments of ``sglang.Engine`` for one variant."""
    arguments: dict[str, Any] = {
        "model_path": target,
        "load_format": "dummy",
        "dtype": options.dtype,
        "device": options.device,
        "skip_tokenizer_init": True,
        "attention_backend": options.backend,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "max_total_tokens": options.pool_tokens,
        "max_running_requests": options.max_batch,
        "chunked_prefill_size": 8192,
        "mem_fraction_static": 0.8,
        "log_level": "warning",
        "decode_log_interval": 1000,
    }
    if options.device != "cpu":
        arguments["cuda_graph_max_bs_decode"] = options.max_batch
    if spec.steps:
        arguments |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft,
            "speculative_num_steps": spec.steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": spec.steps + 1,
        }
    if options.ranks > 1:
        arguments["tp_size"] = options.ranks
    arguments |= dict(options.arguments)
    arguments |= dict(spec.arguments)
    return arguments


def engine_environment(spec: EngineSpec, options: SliceOptions, union_file: Path) -> dict[str, str]:
    """Variables of one engine's process."""
    environment = dict(os.environ)
    path = [str(INJECT)] if options.random_router else []
    if spec.package:
        path.append(spec.package)
    path.extend(part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part)
    environment["PYTHONPATH"] = os.pathsep.join(path)
    if options.random_router:
        environment |= {"BENCH_VERIFY_ROUTER": "random", "BENCH_VERIFY_UNION": str(union_file)}
    if spec.topics_off:
        environment["SGLANG_FORK_DISABLE"] = ",".join(spec.topics_off)
    environment.pop("SGLANG_SIMULATE_ACC_LEN", None)
    if spec.steps and spec.accept_length is not None:
        environment["SGLANG_SIMULATE_ACC_LEN"] = str(min(spec.accept_length, spec.steps + 1.0))
    environment |= dict(spec.environment)
    return environment
