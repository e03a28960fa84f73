"""What may go wrong in a ``--config`` file before any option of it is parsed.

Upstream reads the file only where ``--config`` and its path are two arguments, keeps the last of two equal keys,
passes an empty value on as the text "None", and ends in a traceback where the file is missing. Each is said in a
sentence here; merging the file with the command line stays upstream's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from sglang.srt.speculative.arguments.faults import ArgumentFault

OPTION = "--config"
ENDINGS = (".yaml", ".yml")


def check(argv: Sequence[str], options: Iterable[str]) -> None:
    """Refuse a configuration file that upstream would ignore, misread or fail on without a sentence.

    Args:
        argv: the command line.
        options: every option of the server, with its dashes.

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
    if not path.is_file():
        raise ArgumentFault(subject, "is no file", _nearest_file(path), code="config-path")
    _check_contents(subject, path, sorted(options))


def _nearest_file(path: Path) -> str:
    folder = path.parent
    names = [item.name for item in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, [name for name in names if name.endswith(ENDINGS)], 1)
    return f"did you mean {folder / near[0]}?" if near else "give the path of a YAML file"


def _check_contents(subject: str, path: Path, options: Sequence[str]) -> None:
    import yaml

    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ArgumentFault(
            subject, f"cannot be read as YAML ({reason})", "correct the file", code="config-yaml"
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
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        line = f"line {key.start_mark.line + 1} of {path}"
        # Upstream puts two dashes before a key as it stands, so that an underscore is no dash.
        if f"--{name}" not in options:
            near = difflib.get_close_matches(f"--{name}", options, 1, 0.8)
            raise ArgumentFault(
                f"{name} in {line}",
                "is no option of the server",
                f"did you mean {near[0].removeprefix('--')}?" if near else "see --help for the options",
                code="config-key",
            )
        if name in seen:
            raise ArgumentFault(
                f"{name} in {line}",
                "stands there twice, and only the last would count",
                "keep one of them",
                code="config-key",
            )
        seen.add(name)
        if value.tag == "tag:yaml.org,2002:null":
            raise ArgumentFault(
                f"{name} in {line}", "has no value", "give one, or remove the line", code="config-value"
            )
