"""Whether a target's model class can hand hidden states to an EAGLE-3 draft, read from the model files.

The class is asked for ``set_eagle3_layers_to_capture`` only after its weights are loaded. Importing all model
files to ask earlier takes longer than many a load, so their text is read: which class has the method, itself
or through its bases.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.speculative.arguments.faults import ArgumentFault

METHOD = "set_eagle3_layers_to_capture"
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_ROOTS = frozenset({"Module", "object", "ABC"})


@dataclass(frozen=True)
class _Class:
    file: Path
    bases: tuple[str, ...]
    names: frozenset[str]


def can_capture(models: Path, architecture: str) -> bool | None:
    """Whether the class has the method; None where the text does not settle it.

    Args:
        models: directory of the model files.
        architecture: name of the target's class.
    """
    places: dict[str, list[Path]] = {}
    for file in sorted(models.glob("*.py")):
        for name in _CLASS.findall(file.read_text(encoding="utf-8")):
            places.setdefault(name, []).append(file)
    return _search(architecture, None, places, {})


def _search(
    name: str, near: Path | None, places: dict[str, list[Path]], parsed: dict[Path, dict[str, _Class]]
) -> bool | None:
    files = places.get(name, [])
    file = near if near in files else files[0] if len(files) == 1 else None
    if file is None:
        return None
    if file not in parsed:
        parsed[file] = _classes(file)
    found = parsed[file].get(name)
    if found is None or "__getattr__" in found.names:
        return None
    if METHOD in found.names:
        return True
    # A class that is derived from another of its own name has imported that one under the name.
    answers = [
        None if base == name else _search(base, file, places, parsed)
        for base in found.bases
        if base not in _ROOTS
    ]
    if True in answers:
        return True
    return None if None in answers else False


def _classes(file: Path) -> dict[str, _Class]:
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
            names = {
                item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
            for item in node.body:
                if isinstance(item, ast.Assign):
                    names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
            found[node.name] = _Class(file, bases, frozenset(names))
    return found


def require_capture(models: Path, architecture: str, *, path: str) -> None:
    """Refuse a target whose class is known to lack the method.

    Raises:
        ArgumentFault: with the remedy of another algorithm.
    """
    if can_capture(models, architecture) is False:
        raise ArgumentFault(
            f"--speculative-algorithm EAGLE3 with {path} ({architecture})",
            "cannot work, because this model class does not hand out the hidden states that an EAGLE-3 draft reads",
            "give --speculative-algorithm NGRAM or STANDALONE, or leave it out",
            code="target-capture",
        )
