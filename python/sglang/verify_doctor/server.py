"""A running server: what its ranks counted, which paths they took, and which settings they see."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sglang.verify_doctor import registry
from sglang.verify_doctor.findings import Finding, fault, note, ok, warning

LIMIT_S = 20.0
MOST_BYTES = 64 << 20
# Parts of the internal state that stand beside the statistics.
BESIDE = ("verify_graph", "speculative_auto", "cycle_graph", "one_shot_all_reduce")
# An operator's key, where the server asks for one.
KEY_VARIABLE = "SGLANG_API_KEY"


def fetch(url: str) -> dict[str, Any]:
    """``{"states": [...]}``: the fork's part of every scheduler's internal state.

    Raises:
        OSError: no server answers there, or not with what a server says about itself.
    """
    if "://" not in url:
        url = f"http://{url}"
    key = os.environ.get(KEY_VARIABLE)
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise OSError("is no address of a server; give HOST:PORT or http://HOST:PORT")
        request = urllib.request.Request(f"{url.rstrip('/')}/server_info")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        # A proxy of the environment does not stand between a machine and itself.
        local = parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127.")
        proxies = [urllib.request.ProxyHandler({})] if local else []
        with urllib.request.build_opener(*proxies).open(request, timeout=LIMIT_S) as answer:
            text = _bounded(answer)
        content = json.loads(text)
    except urllib.error.HTTPError as error:
        hint = f"; set {KEY_VARIABLE}" if error.code in (401, 403) else ""
        raise OSError(f"the server answers {error.code}{hint}") from error
    except (urllib.error.URLError, TimeoutError) as error:
        raise OSError(f"no answer ({getattr(error, 'reason', error)})") from error
    except http.client.InvalidURL as error:
        raise OSError(f"is no address of a server ({error}); give HOST:PORT or http://HOST:PORT") from error
    except http.client.HTTPException as error:
        raise OSError(f"what answers there speaks no HTTP ({type(error).__name__}: {error})") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OSError("the answer is no JSON, so this is no server of this fork") from error
    except ValueError as error:
        raise OSError(f"is no address of a server ({error}); give HOST:PORT or http://HOST:PORT") from error
    states = content.get("internal_states") if isinstance(content, dict) else None
    if not isinstance(states, list):
        raise OSError("the answer holds no internal_states, so this is no server of this fork")
    return {"states": [_ours(state) for state in states if isinstance(state, dict)]}


def _bounded(answer: Any) -> bytes:
    """The body, within the limits of time and size: something that only trickles must not hold the doctor."""
    begin, parts, size = time.monotonic(), [], 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise OSError(
                f"the answer is longer than {MOST_BYTES >> 20} MiB, so this is no server of this fork"
            )
        if time.monotonic() - begin > LIMIT_S:
            raise OSError(f"the answer had no end within {LIMIT_S:.0f} s")
    return b"".join(parts)


def _ours(state: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics, with what other parts report beside them under their own names."""
    found = state.get("spec_stats")
    found = dict(found) if isinstance(found, Mapping) else {}
    return found | {name: state[name] for name in BESIDE if name in state}


def judge(content: Mapping[str, Any]) -> list[Finding]:
    """Findings about every scheduler (one for each data-parallel replica)."""
    states = list(content.get("states") or [])
    findings: list[Finding] = []
    for number, state in enumerate(states):
        group = "server" if len(states) == 1 else f"server, replica {number}"
        findings += [replace(finding, group=group) for finding in _asked(_one, state)]
        for other in registry.contributions()[0]:
            if other.server is not None:
                findings += [
                    replace(finding, group=f"{group}, {other.name}")
                    for finding in _asked(other.server, state)
                ]
    return findings or [note("server", "no scheduler reported anything")]


def _asked(look: Callable[[Mapping[str, Any]], Iterable[Finding]], state: Mapping[str, Any]) -> list[Finding]:
    """What one look at a state finds; a server of another version may report in another form."""
    try:
        return list(look(state))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [
            warning(
                "server",
                f"reports something that this doctor cannot read ({type(error).__name__}: {error})",
                "use the doctor of the server's own version",
            )
        ]


def _one(state: Mapping[str, Any]) -> list[Finding]:
    if not state:
        return [
            warning(
                "server",
                "the scheduler reports nothing of the fork",
                "start it without verify-stats in SGLANG_FORK_DISABLE",
            )
        ]
    return [
        *_fork(dict(state.get("fork") or {})),
        *_speculation(state),
        *_fallbacks(state),
        *_graphs(state),
        *_paths(state),
        *_ranks(list(state.get("ranks") or [])),
    ]


def _fork(found: Mapping[str, Any]) -> list[Finding]:
    topics = dict(found.get("topics") or {})
    off = [name for name, state in topics.items() if state == "off"]
    findings = [
        ok(
            "fork",
            f"{found.get('version')} on sglang {found.get('base')}, {len(topics) - len(off)} topics in force",
        )
    ]
    if off:
        findings.append(
            warning(
                "fork",
                f"switched off: {', '.join(off)}",
                "unset SGLANG_FORK_DISABLE unless this is a comparison",
            )
        )
    return findings


def _speculation(state: Mapping[str, Any]) -> list[Finding]:
    cycles = int(state.get("cycles") or 0)
    if not cycles:
        return [note("speculation", "no cycle yet")]
    phases = dict(state.get("phase_ms") or {})
    parts = ", ".join(f"{name} {value:.2f}" for name, value in phases.items())
    text = f"{cycles:,} cycles of {float(state.get('cycle_ms') or 0):.2f} ms, {float(state.get('kept_length') or 0):.2f} tokens kept each"
    findings = [ok("speculation", f"{text} ({parts} ms, {state.get('clock')} clock)" if parts else text)]
    if state.get("alarm"):
        findings.append(
            fault(
                "acceptance",
                "the draft accepts almost nothing: the alarm is on",
                "compare the draft with the target (docs/arguments.md), and restart if it worked before",
            )
        )
    return findings


def _fallbacks(state: Mapping[str, Any]) -> list[Finding]:
    found = [
        note("fallbacks", f"{path}: {count:,} times, {reason}")
        for path, reasons in dict(state.get("fallbacks") or {}).items()
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1])
    ]
    return found or [ok("fallbacks", "none")]


def _graphs(state: Mapping[str, Any]) -> list[Finding]:
    replays, eager = dict(state.get("graph_replays") or {}), dict(state.get("eager_passes") or {})
    findings = []
    if replays:
        findings.append(ok("graphs", "replayed: " + _counts(replays)))
    if eager:
        findings.append(note("graphs", "run eagerly: " + _counts(eager)))
    seconds = dict(state.get("graph_capture_s") or {})
    if seconds:
        findings.append(
            ok("graphs", "capturing took " + ", ".join(f"{n} {v:g} s" for n, v in seconds.items()))
        )
    counted = dict(state.get("counters") or {})
    if counted:
        findings.append(ok("counters", _counts(counted)))
    return findings


def _counts(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {int(value):,}" for name, value in sorted(found.items()))


def _paths(state: Mapping[str, Any]) -> list[Finding]:
    findings = []
    reduce = state.get("all_reduce")
    if reduce:
        findings.append(ok("all-reduce", _words(reduce)))
    plans = state.get("kv_plans")
    if plans:
        findings.append(ok("attention", _words(plans)))
    return findings


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_words(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(_words(inner) for inner in value)
    return str(value)


def _ranks(ranks: list[Mapping[str, Any]]) -> list[Finding]:
    if not ranks:
        return []
    first = dict(ranks[0].get("variables") or {})
    text = " ".join(f"{name}={value}" for name, value in sorted(first.items())) or "nothing set"
    findings = [ok("settings", f"{len(ranks)} rank(s) see: {text}")]
    for rank in ranks:
        differs = rank.get("differs")
        if differs:
            findings.append(
                warning(
                    "settings",
                    f"rank {rank.get('rank')}: {'; '.join(differs)}",
                    "set the variable where the ranks are started (docs/settings.md, what can get lost)",
                )
            )
        log = rank.get("nccl_log")
        if log and rank.get("rank") == 0:
            over = ", ".join(f"{name} {count}" for name, count in dict(log.get("transports") or {}).items())
            read = ", ".join(f"{name}={value}" for name, value in dict(log.get("settings") or {}).items())
            findings.append(
                ok(
                    "nccl",
                    f"by its own log: {log.get('version')}; read {read or 'nothing'}; connections {over or 'none'}",
                )
            )
            findings += [warning("nccl", text, "look at NCCL's log") for text in log.get("warnings") or []]
    return findings
