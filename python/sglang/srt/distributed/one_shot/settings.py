"""The variables of this part, read in one place; they are declared in ``verify_settings/declared/all_reduce.py``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sglang.srt.verify_settings.catalogue import read_flag, read_float, read_text

NAME = "SGLANG_FORK_ALL_REDUCE"


def mode(environment: Mapping[str, str] = os.environ) -> str:
    """``auto`` (the table decides), ``force`` (every message that the kernels admit), ``off`` or ``simulate``.

    Raises:
        SettingError: any other word.
    """
    return read_text(NAME, environment) or "auto"


def table(environment: Mapping[str, str] = os.environ) -> str:
    """A table file that is used in place of the one in the cache; "" for none."""
    return read_text(f"{NAME}_TABLE", environment) or ""


def protocol(environment: Mapping[str, str] = os.environ) -> str:
    """``auto`` (the table decides), ``flags`` or ``packets``: how a message of one hop is sent.

    Raises:
        SettingError: any other word.
    """
    return read_text(f"{NAME}_PROTOCOL", environment) or "auto"


def preflight_s(environment: Mapping[str, str] = os.environ) -> float:
    """Longest preflight in seconds. Raises SettingError outside the declared limits."""
    return read_float(f"{NAME}_PREFLIGHT_S", 10.0, environment)


def wait_s(environment: Mapping[str, str] = os.environ) -> float:
    """Longest wait of an eager launch for a peer in seconds. Raises SettingError outside the declared limits."""
    return read_float(f"{NAME}_WAIT_S", 300.0, environment)


def dependent_launch(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether kernels are launched with programmatic dependence on what runs before them."""
    return read_flag(f"{NAME}_PDL", environment)


def kernel_cache(environment: Mapping[str, str] = os.environ) -> str:
    """Folder for kernels compiled on first use; "" for the user's cache directory."""
    return read_text("SGLANG_FORK_CACHE", environment) or ""
