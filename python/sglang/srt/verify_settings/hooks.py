"""Entry points of the topic ``nccl-settings``: where upstream sets its environment and resolves its arguments."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.verify_settings import catalogue, library, profiles, reach
from sglang.srt.verify_settings.declare import SettingError, refuse
from sglang.srt.verify_settings.native import shown

logger = logging.getLogger("sglang.fork.settings")

# What the user had set before the argument resolution changed it: name -> (before or None, after or None).
_resolved: dict[str, tuple[str | None, str | None]] = {}


def prepare(original: Callable[[list[str]], Any], argv: list[str]) -> Any:
    """Around ``prepare_server_args``: a bad value of one of our variables is one line and status 2."""
    try:
        check_own(os.environ)
        server_args = original(argv)
        wanted(server_args, os.environ)
    except SettingError as error:
        print(f"sglang: error: {error}.", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return server_args


def check_own(environment: Mapping[str, str]) -> None:
    """Every variable of ours that is set must be of its kind.

    Raises:
        SettingError: one is not.
    """
    for name in catalogue.declared():
        if name.startswith(catalogue.OWN_PREFIXES):
            catalogue.read_text(name, environment)


def resolution(original: Callable[[Any], None], server_args: Any) -> None:
    """Around the part of the argument resolution that sets NCCL_ALGO: remember what the user had."""
    before = reach.carried(os.environ)
    original(server_args)
    after = reach.carried(os.environ)
    for name in before.keys() | after.keys():
        value = before.get(name)
        if value == after.get(name):
            continue
        # A second resolution in one process finds what the first one set.
        if name in _resolved and _resolved[name][1] == value:
            value = _resolved[name][0]
        _resolved[name] = (value, after.get(name))


def wanted(server_args: Any, environment: Mapping[str, str]) -> str:
    """The profile that was asked for: by the flag, else by the variable, else ``off``.

    Raises:
        SettingError: there is none of that name.
    """
    name = getattr(server_args, "nccl_profile", None) or environment.get(profiles.VARIABLE, "").strip()
    if name and name not in (profiles.OFF, profiles.AUTO):
        profiles.named(name)
    return name or profiles.OFF


def launch(original: Callable[[Any], None], server_args: Any) -> None:
    """Around ``_set_envs_and_config``, the last change to the environment before the ranks are started.

    Fills in the profile, keeps what upstream would overwrite without a reason, and says what became of each
    variable. The outcome travels to the ranks, which compare it with what they see.
    """
    check_own(os.environ)
    before = dict(os.environ)
    for name, (value, after) in _resolved.items():
        if before.get(name) == after:
            before.pop(name, None)
            if value is not None:
                before[name] = value
    added = _fill_in(server_args)
    original(server_args)
    for name in reach.KEPT:
        if name in before:
            os.environ[name] = before[name]
    record = reach.record(before, os.environ, added)
    os.environ[reach.CARRIER] = record.dump()
    say(record, os.environ)


def _fill_in(server_args: Any) -> dict[str, reach.Origin]:
    """Set what the profile recommends and the user did not set."""
    name = wanted(server_args, os.environ)
    if name == profiles.OFF:
        return {}
    if name == profiles.AUTO:
        profile, why = profiles.choose(profiles.links(_look()))
    else:
        profile, why = profiles.named(name), "asked for by name"
    if profile is None:
        logger.info("no NCCL profile: %s", why)
        return {}
    logger.info("NCCL profile %s: %s", profile.name, why)
    added = {}
    for variable, entry in profile.values.items():
        if os.environ.get(variable):
            continue
        os.environ[variable] = entry.value
        added[variable] = reach.Origin(entry.value, f"profile {profile.name}", entry.reason)
    return added


def _look() -> dict[str, Any]:
    """The facts that the automatic choice depends on; a probe that fails leaves its part out."""
    from sglang.verify_doctor.facts import host, nvidia, pci

    return {"nvidia": nvidia.gather(), "pci": pci.gather(), "host": host.gather()}


def say(record: reach.Launch, environment: Mapping[str, str]) -> None:
    """What the ranks will find and why, once, in the launcher's log."""
    values = shown(record.expected())
    parts = [f"{name}={values[name]} ({origin.source})" for name, origin in record.origins.items()]
    if parts:
        logger.info("environment for the ranks: %s", ", ".join(parts))
    for change in record.changes:
        logger.warning("%s", change.text())
    for text in complaints(environment):
        logger.warning("%s", text)


def complaints(environment: Mapping[str, str]) -> list[str]:
    """Variables that nobody reads, and values that cannot be meant, one sentence each."""
    found = []
    mine = {name for name in environment if name.startswith(("NCCL_", *catalogue.OWN_PREFIXES))}
    if mine:
        known = library.read()
        for name, near in catalogue.slips(environment, known.names).items():
            reader = f"NCCL {known.version}".strip() if name.startswith("NCCL_") else "this fork"
            hint = f"; did you mean {near}?" if near else ""
            found.append(f"{name} is set, but {reader} does not read it{hint}")
    for name, known_setting in catalogue.declared().items():
        value = environment.get(name, "")
        problem = known_setting.problem(value) if value else None
        if problem is not None:
            found.append(str(refuse(known_setting, value, problem)))
    return found
