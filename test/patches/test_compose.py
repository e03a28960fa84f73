"""Composing: byte-identical, quick when nothing changed, whole or not at all."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
from pathlib import Path

import pytest
from checkout import Checkout, fingerprint

from patches.engine.compose import MANIFEST, compose
from patches.engine.hashes import tree_hash
from patches.engine.project import Project

ENGINE = 'file="sglang/srt/engine.py"'
AROUND = f'Around({ENGINE}, scope="Engine.run", hook="sglang.hooks:f"),'
HOOKS = {"sglang/hooks.py": "def f(original, *args): return original(*args)\n"}


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    """A composed checkout with one topic."""
    checkout.overlay = dict(HOOKS) | {"sglang/data/table.csv": "a,b\n"}
    checkout.topic("the-topic", AROUND).write()
    assert checkout.engine("compose") == 0
    return checkout


def test_contents(ready: Checkout) -> None:
    names = set(ready.files())
    assert {
        "sglang/hooks.py",
        "sglang/data/table.csv",
        "sglang/srt/table.json",
        "sglang/fork/_composed.py",
    } <= names
    metadata = (ready.composed / "sglang-1.0+verify.9.dist-info" / "METADATA").read_text()
    assert "Version: 1.0+verify.9\n" in metadata and "Requires-Dist: torch==2.11.0\n" in metadata
    code = "import sglang, importlib.metadata as m; print(sglang.__version__, m.version('sglang'))"
    assert ready.python(code).stdout.split() == ["1.0+verify.9", "1.0+verify.9"]


def test_again_is_identical_and_untouched(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    before, stamp = ready.files(), (ready.composed / MANIFEST).stat().st_mtime_ns
    capsys.readouterr()
    assert ready.engine("compose") == 0
    assert capsys.readouterr().out.startswith("up to date: ")
    assert ready.files() == before and (ready.composed / MANIFEST).stat().st_mtime_ns == stamp
    assert ready.engine("compose", "--force") == 0
    assert ready.files() == before
    shutil.rmtree(ready.root / "build")
    assert ready.engine("compose") == 0
    assert fingerprint(ready.files()) == fingerprint(before)


@pytest.mark.parametrize("change", ["topic", "overlay", "series", "version"])
def test_every_input_counts(ready: Checkout, capsys: pytest.CaptureFixture[str], change: str) -> None:
    if change == "topic":
        ready.topic("the-topic", AROUND.replace("Engine.run", "Engine.step"))
    elif change == "overlay":
        ready.overlay["sglang/data/table.csv"] = "c\n"
    elif change == "series":
        ready.topics.clear()
    ready.write()
    if change == "version":
        pins = ready.root / "upstream.toml"
        pins.write_text(pins.read_text().replace("verify.9", "verify.10"))
    before = ready.files()
    capsys.readouterr()
    assert ready.engine("compose") == 0
    assert capsys.readouterr().out.startswith("composed ")
    assert ready.files() != before


def test_tree_hash_is_the_same_for_every_python(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout.topic("the-topic", AROUND).write("cp310", "cp311", "cp312", "cp313")
    trees, fingerprints = set(), set()
    for tag in ("cp310", "cp311", "cp312", "cp313"):
        done = compose(Project(checkout.root), tag=tag, wheel_directory=checkout.wheels)
        assert done.fresh
        trees.add(done.tree)
        fingerprints.add(fingerprint(checkout.files()))
    assert len(trees) == 1 and len(fingerprints) == 4


def test_tree_hash_counts_names_and_contents() -> None:
    one = {"sglang/a.py": "1", "sglang/b.py": "2"}
    assert tree_hash(one) == tree_hash(dict(reversed(one.items())))
    assert tree_hash(one) != tree_hash({"sglang/a.py": "2", "sglang/b.py": "1"})
    assert tree_hash(one) == tree_hash(
        one | {"sglang/_core.cpython-311-x86_64-linux-gnu.so": "3", "x.dist-info/R": "4"}
    )
    assert tree_hash(one) != tree_hash(one | {"sglang/_core.so": "3"})


def test_partial_earlier_build_is_redone(ready: Checkout) -> None:
    """What a killed build can leave: a scratch folder, or a tree without its manifest."""
    before = ready.files()
    left = ready.root / "build" / ".composing-killed" / "tree"
    left.mkdir(parents=True)
    (left / "half.py").write_text("")
    (ready.composed / MANIFEST).unlink()
    (ready.composed / "sglang/srt/engine.py").unlink()
    assert ready.engine("compose") == 0
    assert ready.files() == before and not left.exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"inputs": 1}', "not json"])
def test_damaged_manifest_is_redone(ready: Checkout, text: str) -> None:
    before = ready.files()
    (ready.composed / MANIFEST).write_text(text)
    assert ready.engine("compose") == 0
    assert ready.files() == before


def test_byte_code_of_unchanged_files_is_kept(ready: Checkout) -> None:
    cached: dict[str, Path] = {}
    for name in ("sglang/version.py", "sglang/hooks.py"):
        cached[name] = Path(str(py_compile.compile(str(ready.composed / name))))
    # Same length and, by force of the clock, the same second: byte code must still not survive the change.
    ready.overlay["sglang/hooks.py"] = HOOKS["sglang/hooks.py"].replace("original(", "orIginal(")
    stamp = (ready.composed / "sglang/hooks.py").stat()
    ready.write()
    assert ready.engine("compose") == 0
    os.utime(ready.composed / "sglang/hooks.py", (stamp.st_atime, stamp.st_mtime))
    assert cached["sglang/version.py"].exists() and not cached["sglang/hooks.py"].exists()
    assert ready.python("import sglang.hooks as h; h.f(print)").returncode != 0


def test_byte_code_is_not_a_hand_edit(ready: Checkout) -> None:
    assert ready.python("import sglang.srt.engine").returncode == 0
    assert ready.engine("compose") == 0


def test_pin_records_what_compose_makes(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    assert ready.engine("pin") == 0
    pins = Project(ready.root).pins()
    assert set(pins.files) == {"sglang/srt/engine.py"}
    assert pins.composed == json.loads((ready.composed / MANIFEST).read_text())["tree"]
    assert ready.engine("check") == 0
    again = (ready.root / "upstream.toml").read_bytes()
    assert ready.engine("pin") == 0
    assert (ready.root / "upstream.toml").read_bytes() == again
    ready.overlay["sglang/data/table.csv"] = "other\n"
    (ready.root / "python/sglang/data/table.csv").write_text("other\n")
    capsys.readouterr()
    assert ready.engine("check") == 1
    assert "the composed tree has hash" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["", '||||||| 1234567\n"sglang/old.py" = "00"\n'])
def test_pin_renews_hashes_over_merge_conflicts(
    ready: Checkout, capsys: pytest.CaptureFixture[str], base: str
) -> None:
    """Both sides of a merge renew the same hashes; neither is worth a resolution by hand."""
    assert ready.engine("pin") == 0
    path = ready.root / "upstream.toml"
    good = path.read_text()
    line = next(line for line in good.splitlines(keepends=True) if line.startswith('"sglang/srt/engine.py"'))
    theirs = line.replace('= "', '= "0')
    path.write_text(good.replace(line, f"<<<<<<< HEAD\n{line}{base}=======\n{theirs}>>>>>>> other branch\n"))
    capsys.readouterr()
    assert ready.engine("compose") == 2
    assert "merge conflicts" in capsys.readouterr().err
    assert ready.engine("pin") == 0
    assert path.read_text() == good


def test_pin_takes_wheel_hashes_anew(ready: Checkout) -> None:
    ready.upstream["sglang/extra.py"] = ""
    for tag in ("cp310", "cp313"):
        ready.wheel(tag)
    ready.wheel()
    assert ready.engine("pin", "--wheels", str(ready.wheels)) == 0
    assert {"cp310", "cp313"} <= set(Project(ready.root).pins().wheels)
    assert ready.engine("compose") == 0 and (ready.composed / "sglang/extra.py").exists()


def test_the_real_tree(project: Project, archive: Path, tmp_path: Path) -> None:
    """This repository composes to the tree that it pins, and again to the same bytes, made anew or not."""
    copy = Project(tmp_path)
    for name in ("upstream.toml", "patches", "python", "sgl-kernel"):
        source = project.root / name
        if source.exists():
            (tmp_path / name).symlink_to(source)
    first = compose(copy, wheel_directory=archive.parent)
    assert first.tree == project.pins().composed
    for force in (False, True):
        again = compose(copy, wheel_directory=archive.parent, force=force)
        assert again.tree == first.tree and again.fresh == force
