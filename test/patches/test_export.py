"""Exported patches: proven by git on clean upstream, one commit message for each topic."""

from __future__ import annotations

import ast
import subprocess
import zipfile
from pathlib import Path

import pytest
from checkout import Checkout

from patches.engine import export as exporting
from patches.engine.errors import EngineError
from patches.engine.model import Sources
from patches.engine.project import Project

pytestmark = pytest.mark.long

ENGINE = 'file="sglang/srt/engine.py"'
HOOKS = {"sglang/hooks.py": "def f(original, *args): return original(*args)\n", "sglang/tool.py": "x = 1\n"}


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    """Two topics in one file, the first owning the hooks."""
    checkout.overlay = dict(HOOKS)
    checkout.topic(
        "first",
        f'Around({ENGINE}, scope="Engine.run", hook="sglang.hooks:f"),',
        'overlay=("sglang/hooks.py",)',
    )
    more = 'not_needed=NameExists("sglang/srt/engine.py", "Engine.faster")'
    checkout.topic("second", f'Around({ENGINE}, scope="Engine.step", hook="sglang.hooks:f"),', more)
    return checkout.write()


def apply_by_hand(checkout: Checkout, target: Path) -> None:
    """What a reader would do: unpack clean upstream, then git-apply every patch in order."""
    target.mkdir()
    with zipfile.ZipFile(next(checkout.wheels.iterdir())) as wheel:
        wheel.extractall(target)
    subprocess.run(["git", "init", "--quiet", str(target)], check=True)
    for item in sorted((checkout.root / "build" / "export").iterdir()):
        for flags in (["--check"], []):
            subprocess.run(["git", "-C", str(target), "apply", *flags, str(item)], check=True)


def test_patches_apply_in_order_and_give_the_composed_files(ready: Checkout, tmp_path: Path) -> None:
    assert ready.engine("compose") == 0 and ready.engine("export") == 0
    names = [path.name for path in sorted((ready.root / "build" / "export").iterdir())]
    assert names == ["0001-first.patch", "0002-second.patch", "0003-overlay.patch"]
    clean = tmp_path / "clean"
    apply_by_hand(ready, clean)
    for name in ("sglang/srt/engine.py", "sglang/hooks.py", "sglang/tool.py", "sglang/fork/hooks.py"):
        assert (clean / name).read_bytes() == (ready.composed / name).read_bytes()


def test_message_and_contents(ready: Checkout) -> None:
    assert ready.engine("export") == 0
    first, second, rest = [path.read_text() for path in sorted((ready.root / "build" / "export").iterdir())]
    assert "Subject: [PATCH 1/3] first: Because the test says so\n" in first
    assert "Upstream: none\nRetire when: the test ends\nBase: sglang 1.0\nNot needed when: never\n" in first
    assert "Left out once: sglang/srt/engine.py defines Engine.faster" in second
    assert (
        "+++ b/sglang/hooks.py" in first
        and "sglang/hooks.py" not in second
        and "+++ b/sglang/tool.py" in rest
    )
    assert first.count("# fork: first") == 2 and "# fork: second" not in first


def test_export_is_reproducible(ready: Checkout) -> None:
    assert ready.engine("export") == 0
    folder = ready.root / "build" / "export"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "0009-stale.patch").write_text("")
    assert ready.engine("export") == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_unneeded_topic_is_left_out(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    ready.upstream["sglang/srt/engine.py"] = ready.upstream["sglang/srt/engine.py"].replace(
        "    def step(", "    def faster(self): pass\n\n    def step("
    )
    ready.write()
    assert ready.engine("compose") == 0
    assert "second: not needed (upstream defines Engine.faster" in capsys.readouterr().out
    done = ready.python("from sglang.fork import topics; print([(t.name, t.state) for t in topics()])")
    assert done.stdout.strip() == "[('first', 'applied'), ('second', 'not needed')]"
    assert "# fork: second" not in (ready.composed / "sglang/srt/engine.py").read_text()
    assert ready.engine("export") == 0
    assert not list((ready.root / "build" / "export").glob("*second*"))


def test_a_patch_that_does_not_apply_is_an_error(ready: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is real: a damaged patch is not handed out."""
    real = exporting._git

    def damaged(tree: Path, *arguments: str, stdin: str | None = None) -> bytes:
        out = real(tree, *arguments, stdin=stdin)
        return out.replace(b" class Engine", b" class Motor") if arguments[0] == "format-patch" else out

    monkeypatch.setattr(exporting, "_git", damaged)
    ready.upstream["sglang/srt/engine.py"] = (
        "class Engine:\n    def run(self): pass\n    def step(self): pass\n"
    )
    ready.write()
    with pytest.raises(EngineError, match="git apply failed"):
        exporting.export(Project(ready.root), wheel_directory=ready.wheels)
    assert not (ready.root / "build" / "export").exists()


def test_the_real_series(project: Project, archive: Path) -> None:
    """This repository's own patches apply to the clean pinned wheel."""
    paths = exporting.export(project, wheel_directory=archive.parent)
    topics = [topic.name for topic in project.topics()]
    assert [path.stem.partition("-")[2] for path in paths][: len(topics)] == topics


def test_each_patch_brings_what_its_topic_calls(project: Project, sources: Sources) -> None:
    """The first patches of the series stand alone: no hook, nor what it imports, comes with a later one."""
    topics = project.topics()
    overlay = project.overlay()
    owned = exporting._ownership(topics, overlay)
    have: set[str] = set()
    for topic in topics:
        have |= set(owned[topic.name])
        wanted = [str(hook).partition(":")[0] for edit in topic.edits if (hook := getattr(edit, "hook", ""))]
        seen: set[str] = set()
        while wanted:
            module = wanted.pop()
            stem = module.replace(".", "/")
            file = next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in overlay), None)
            if file is None or file in seen:
                continue
            seen.add(file)
            for node in ast.walk(ast.parse(overlay[file].read_bytes())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    wanted += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        assert seen <= have, (topic.name, sorted(seen - have))
        assert owned[topic.name] or topic.stacks_on, f"{topic.name} owns no file"


def test_tests_go_along(ready: Checkout, tmp_path: Path) -> None:
    """What names the topic or imports what it brings, with helpers found nearest, by import and by file name."""
    files = {
        "test/conftest.py": "",
        "test/one/test_first.py": "from sglang.hooks import f\nimport rig\n",
        "test/one/rig.py": "import deeper\nSCRIPT = 'run_alone.py'\n",
        "test/two/rig.py": "",
        "test/two/deeper.py": "",
        "test/two/run_alone.py": "",
        "test/two/test_other.py": "import torch.rig\n",
    }
    ready.put(files)
    assert ready.engine("export") == 0
    review = ready.root / "build" / "review"
    assert sorted(path.name for path in review.iterdir()) == [
        "0001-first.md",
        "0001-first.tests.patch",
        "0002-second.md",
    ]
    clean = tmp_path / "clean"
    subprocess.run(["git", "init", "--quiet", str(clean)], check=True)
    subprocess.run(["git", "-C", str(clean), "apply", str(review / "0001-first.tests.patch")], check=True)
    found = sorted(path.relative_to(clean).as_posix() for path in clean.rglob("*.py"))
    # `sglang.hooks` is called by edits of both topics; only the first brings it.
    assert found == sorted(set(files) - {"test/two/rig.py", "test/two/test_other.py"})
    assert "tests.patch" in (review / "0001-first.md").read_text(encoding="utf-8")
    assert "None names it." in (review / "0002-second.md").read_text(encoding="utf-8")
