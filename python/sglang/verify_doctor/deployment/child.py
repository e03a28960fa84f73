"""The part that runs where torch is: resolve, describe, plan the memory."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from sglang.srt.speculative.arguments.faults import one_line
from sglang.verify_doctor import registry
from sglang.verify_doctor.deployment.machine import Machine

# Of an error that upstream's resolution ends with: transformers' texts go on about remedies that are not ours.
ERROR_LENGTH = 300
FOUND_LENGTH = 600


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """``rows``, ``memory``, ``notes`` (what the resolution logged) and ``fault``; JSON-ready.

    ``undescribed`` says why there are no rows of arguments that the server resolved; ``error`` alone, that the
    server's resolution ends in a traceback.
    """
    stand_in = request["machine"]
    seen = Machine.from_dict(stand_in).seen() if stand_in is not None else contextlib.nullcontext()
    # Resolving sets variables for a server that is not going to be started.
    with _environment(), seen, _log() as lines:
        try:
            args, fault = _resolve(list(request["argv"]))
        except Exception as error:
            return {"error": one_line(f"{type(error).__name__}: {error}", ERROR_LENGTH)}
        if args is None:
            return {"fault": fault, "rows": [], "memory": None, "notes": lines}
        from sglang.verify_doctor.deployment import describe

        described = {
            "fault": fault,
            "notes": lines,
            "paths": {"target": str(args.model_path), "draft": args.speculative_draft_model_path},
            "arguments": describe.arguments(args),
        }
        try:
            return described | _describe(args, request)
        except Exception as error:
            # The server resolves it, so it would start: that we cannot describe it is no fault of the deployment.
            text = f"{type(error).__name__}: {error}"
            return described | {"rows": [], "memory": None, "undescribed": text}


def _describe(args: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Rows and memory plan of resolved arguments."""
    from sglang.verify_doctor.deployment import describe, memory, subject

    gpu = Machine.from_dict(request["gpu"]) if request["gpu"] is not None else None
    deployment = subject.Deployment.of(args, gpu, request["facts"])
    rows = {row[0]: row for row in describe.rows(deployment)}
    for other in registry.contributions()[0]:
        if other.deployment:
            rows |= {row[0]: row for row in _contributed(other, deployment)}
    return {
        "rows": [{"about": about, "what": what, "why": why} for about, what, why in rows.values()],
        "memory": memory.plan(deployment),
    }


def _contributed(other: registry.Contribution, deployment: Any) -> list[tuple[str, str, str]]:
    from sglang.fork.hooks import resolve

    try:
        return [
            (str(about), str(what), str(why)) for about, what, why in resolve(other.deployment)(deployment)
        ]
    except Exception as error:
        return [(other.name, "not known", f"its description failed ({type(error).__name__}: {error})")]


def _resolve(argv: list[str]) -> tuple[Any, dict[str, str] | None]:
    """The arguments as a server would resolve them, or what it would refuse them with.

    Upstream's function is taken without our wrappers, whose checks are called one by one: they also ask whether the
    port is free, which has nothing to do with a plan.
    """
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.speculative.arguments import hooks
    from sglang.srt.verify_settings.declare import SettingError
    from sglang.srt.verify_settings.hooks import wanted

    said = io.StringIO()
    args = None
    try:
        with contextlib.redirect_stderr(said):
            hooks.check_file(argv)
            args = inspect.unwrap(prepare_server_args)(argv)
            wanted(args, {})
            hooks.check_resolved(args)
    except SystemExit:
        lines = said.getvalue().strip().splitlines()
        text = lines[-1] if lines else "the arguments were refused"
        return None, {
            "found": text.partition("error: ")[2] or text,
            "cure": "correct the flag; --help lists them",
        }
    except SettingError as error:
        found, _, cure = str(error).partition("; ")
        return args, {"found": found, "cure": cure or "correct it"}
    except Exception as error:
        if not hooks.is_refusal(error):
            raise
        return args, _fault(error)
    return args, None


def _fault(error: Exception) -> dict[str, str]:
    remedy = getattr(error, "remedy", "")
    found = f"{getattr(error, 'value', '')} {getattr(error, 'limit', '')}".strip() or str(error)
    return {"found": one_line(found, FOUND_LENGTH), "cure": remedy or "change the flag that it names"}


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    kept = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(kept):
            del os.environ[name]
        os.environ.update(kept)


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
    """What our own modules log while arguments are resolved: choices made, each with its reason."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keep, logger = Keep(), logging.getLogger("sglang.fork")
    level = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)
