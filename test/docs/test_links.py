"""Every relative link and anchor of the pages, and what they say of commands, messages, options and files."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "models").glob("*.md")])
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
LINK = re.compile(r"(?<!\\)\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"(?ms)^```.*?^```")


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    kept = [c for c in text if c in " -_" or unicodedata.category(c)[0] in "LN"]
    return "".join(kept).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """All anchors of a page; a heading that stands there twice gets a number."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"(?m)^#{1,6} (.+)$", prose(path)):
        name = anchor(heading)
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.add(f"{name}-{count}" if count else name)
    return found


def broken(path: Path, text: str) -> list[str]:
    """Relative links of a text that lead nowhere, as seen from ``path``."""
    found = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        missing = not place.exists()
        outside = not place.is_relative_to(ROOT)
        if missing or outside or (fragment and fragment not in anchors(place)):
            found.append(target)
    return found


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_relative_links(path: Path) -> None:
    assert broken(path, prose(path)) == []


def test_a_broken_link_is_found() -> None:
    """Negative control: file, anchor, and a way out of the repository."""
    text = (
        "[a](no.md) [b](README.md#no-such) [c](../../etc/passwd) [d](README.md) [e](README.md#two-commands)"
    )
    assert broken(ROOT / "README.md", text) == ["no.md", "README.md#no-such", "../../etc/passwd"]


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_pages_are_reached(path: Path) -> None:
    """From the README, along links."""
    reached, wave = set(), {ROOT / "README.md"}
    while wave:
        page = wave.pop()
        reached.add(page)
        for target in LINK.findall(prose(page)):
            place = (page.parent / target.partition("#")[0]).resolve()
            if place.suffix == ".md" and place.exists() and place not in reached:
                wave.add(place)
    assert path in reached


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_commands_exist(path: Path) -> None:
    """Targets of make, and modules that are run."""
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    text = path.read_text(encoding="utf-8")
    # What a command of the page writes need not be there yet.
    text = re.sub(r"--(?:out|save-facts) \S+", "", path.read_text(encoding="utf-8"))
    for name in re.findall(r"(?:^|`|\n)make ([a-z][a-z-]+)", text):
        assert name in targets, f"make {name}"
    for module in re.findall(r"python -m (sglang\.\w+|patches\.engine|benchmark\.\w+)", text):
        parts = module.split(".")
        ours = [ROOT.joinpath(*parts), ROOT.joinpath("python", *parts)]
        upstreams = {"sglang.launch_server"}
        assert module in upstreams or any(
            place.is_dir() or place.with_suffix(".py").is_file() for place in ours
        ), module


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_recipes_and_files_that_are_named_exist(path: Path) -> None:
    # What a command of the page writes need not be there yet.
    text = re.sub(r"--(?:out|save-facts) \S+", "", path.read_text(encoding="utf-8"))
    for name in re.findall(r"\b((?:recipes|docker|models|test|benchmark)/[\w./-]*\w)", text):
        if "*" in name or "NNNN" in name or name.endswith((".FILE", "FILE")):
            continue
        assert (ROOT / name).exists() or (ROOT / "python" / name).exists() or name.startswith("test/tmp"), (
            name
        )


def test_messages_of_the_troubleshooting_page_are_printed_by_the_code() -> None:
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "docker").iterdir()]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    # Adjacent literals of one message are one text.
    code = re.sub(r"\"\s*\n\s*f?\"", "", code)
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    messages = [text for row in rows if len(row) > 3 for text in re.findall(r"`([^`]+)`", row[2])]
    commands = ("bench_verify ", "python -m ")
    wanted = [text for text in messages if not text.startswith(commands)]
    assert len(wanted) > 20
    assert [
        text for text in wanted if text not in code and f"{text.removesuffix('_total')}" not in code
    ] == []


def test_readme_is_one_page_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    block = re.search(r"## Two commands\n\n```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert [line.split("#")[0].split() for line in block[1].splitlines()] == [
        ["make", "demo"],
        ["make", "test"],
    ]
