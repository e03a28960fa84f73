"""What may go wrong in a ``--config`` file before any option of it is parsed.

Upstream reads the file only where ``--config`` and its path are two arguments, keeps the last of two equal keys,
passes an empty value on as the text "None", and ends in a traceback where the file is missing. A value of another kind
than its option's is refused by the parser without the place. Each is said in a sentence here; merging the file with
the command line stays upstream's.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.speculative.arguments.faults import ArgumentFault, one_line

OPTION = "--config"
ENDINGS = (".yaml", ".yml")
_WORD = "tag:yaml.org,2002:str"
Options = Mapping[str, argparse.Action]


def check(argv: Sequence[str], options: Options) -> None:
    """Refuse a configuration file that upstream would ignore, misread or fail on without a sentence.

    Args:
        argv: the command line.
        options: every option of the server by its name with the dashes.

    Raises:
        ArgumentFault: ``config-form``, ``config-path``, ``config-yaml``, ``config-key`` or ``config-value``.
    """
    for word in argv:
        if word.startswith(f"{OPTION}="):
            raise ArgumentFault(
                word,
                "would be ignored, since the server looks for the option and its path as two words",
                f"write {OPTION} {word.partition('=')[2]}",
                code="config-form",
            )
    if OPTION not in argv:
        return
    place = argv.index(OPTION) + 1
    if place == len(argv) or OPTION in argv[place:]:
        raise ArgumentFault(OPTION, "takes one file, once", f"write {OPTION} FILE.yaml", code="config-form")
    path = Path(argv[place])
    subject = f"{OPTION} {path}"
    if path.suffix.lower() not in ENDINGS:
        raise ArgumentFault(
            subject, "must end in .yaml or .yml", "rename the file if it is YAML", code="config-path"
        )
    try:
        there = path.is_file()
    except OSError as error:
        shown = f"{OPTION} {one_line(path)}"
        raise ArgumentFault(
            shown, f"cannot be looked at ({error.strerror})", "give a path to read", code="config-path"
        ) from None
    if not there:
        raise ArgumentFault(subject, "is no file", _nearest_file(path), code="config-path")
    _check_contents(subject, path, options)


def _nearest_file(path: Path) -> str:
    folder = path.parent
    try:
        names = [item.name for item in folder.iterdir() if item.is_file()]
    except OSError:
        names = []
    near = difflib.get_close_matches(path.name, [name for name in names if name.endswith(ENDINGS)], 1)
    return f"did you mean {folder / near[0]}?" if near else "give the path of a YAML file"


def _check_contents(subject: str, path: Path, options: Options) -> None:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ArgumentFault(
            subject, f"cannot be read as YAML ({one_line(error)})", "correct the file", code="config-yaml"
        ) from None
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise ArgumentFault(
            subject,
            "holds no mapping of options to values",
            "write one 'option: value' a line",
            code="config-yaml",
        )
    seen: dict[str, tuple[str, Any]] = {}
    for key, value in node.value:
        line = f"line {key.start_mark.line + 1} of {path}"
        name = _name(key, line, options)
        if name in seen:
            raise ArgumentFault(
                f"{name} in {line}",
                "stands there twice, and only the last would count",
                "keep one of them",
                code="config-key",
            )
        seen[name] = line, value
    # Read once more as values: upstream passes on what YAML makes of a word (0x10 is 16, no is false).
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a tag that nobody knows, the 14th month
        raise ArgumentFault(
            subject, f"cannot be read as YAML ({one_line(error)})", "correct the file", code="config-yaml"
        ) from None
    for name, (line, value) in seen.items():
        problem = _problem(options[f"--{name}"], value, values[name])
        if problem is not None:
            limit, remedy = problem
            raise ArgumentFault(f"{name} in {line}", limit, remedy, code="config-value")


def _name(key: Any, line: str, options: Options) -> str:
    """The option that a key names. Upstream puts two dashes before it as it stands: an underscore is no dash."""
    import yaml

    if not isinstance(key, yaml.ScalarNode):
        raise ArgumentFault(
            f"the key in {line}", "is no word", "write one 'option: value' a line", code="config-key"
        )
    name = str(key.value)
    if f"--{name}" == OPTION:
        raise ArgumentFault(
            f"{name} in {line}",
            "would be ignored, since a file cannot name another",
            "write its lines here",
            code="config-key",
        )
    if f"--{name}" not in options or key.tag != _WORD:
        near = difflib.get_close_matches(f"--{name}", sorted(options), 1, 0.8)
        raise ArgumentFault(
            f"{one_line(name)} in {line}",
            "is no option of the server",
            f"did you mean {near[0].removeprefix('--')}?" if near else "see --help for the options",
            code="config-key",
        )
    return name


def _problem(action: argparse.Action, node: Any, value: Any) -> tuple[str, str] | None:
    """What is wrong with a value for its option, and the remedy; None where nothing is, or where upstream tells."""
    if value is None:
        return "has no value", "give one, or remove the line"
    if action.nargs == 0:
        shown = one_line(node.value) if isinstance(node.value, str) else "a list or a mapping"
        wrong = not isinstance(value, bool)
        return (
            (f"is {shown}, and the option is a switch", "write true, or remove the line") if wrong else None
        )
    if isinstance(value, dict):
        # Passed on as JSON, which some options take.
        wrong = action.type in (int, float)
        return ("is a mapping, and the option takes a number", "give one") if wrong else None
    if isinstance(value, list) and action.nargs is None and len(value) > 1:
        return "is a list, and the option takes one value", "give one value"
    for part in value if isinstance(value, list) else [value]:
        problem = _no_value_of(action, str(part).lower() if isinstance(part, bool) else str(part))
        if problem is not None:
            return problem
    return None


def _no_value_of(action: argparse.Action, text: str) -> tuple[str, str] | None:
    """Whether the parser would refuse one value, with its own conversion and choices."""
    shown = one_line(text)
    converted: Any = text
    if callable(action.type):
        try:
            converted = action.type(text)
        except argparse.ArgumentTypeError as error:
            return f"is {shown}: {one_line(error)}", "correct the value"
        except (TypeError, ValueError):
            kind = {"int": "a whole number", "float": "a number", "loads": "JSON"}.get(
                getattr(action.type, "__name__", ""), "a value of its kind"
            )
            return f"is {shown}, where {kind} belongs", "correct the value"
    if action.choices is not None and converted not in action.choices:
        names = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(text, names, 1)
        return (
            f"is {shown}, which is none of its choices",
            f"did you mean {near[0]}?" if near else f"give one of {', '.join(names)}",
        )
    return None
