"""What goes with a topic's diff, the page made of it, and the look forward as a test of the record."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from checkout import REPOSITORY, Checkout

from patches.engine import page
from patches.engine.errors import EngineError
from patches.engine.project import Project
from patches.engine.review import Review

ENGINE = 'file="sglang/srt/engine.py"'
PAGE = f"# Title\n\n{page.BEGIN}\nstale\n{page.END}\n\nend\n"
REVIEW = """
[threads]
as_of = "2026-09"
[threads.sglang]
7 = ["pull", "open", "what seven says"]
[topics.the-run]
answers = ["sglang#7"]
rows = ["gpu.run"]
next = "propose"
plan = "move the anchor"
[topics.not-yet-here]
next = "written ahead"
"""
HEADLINE = """{
 "gpu.run.1k": {"value": 2.0, "unit": "ms", "upstream": 4.0, "ratio": 2.0, "row": "a.json#1"},
 "gpu.other": {"value": 1.0, "unit": "ms", "upstream": null, "ratio": null, "row": "a.json#2"}
}"""


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    """Two topics, of which one has an entry, a test, rows and a thread."""
    checkout.overlay = {"sglang/hooks/run.py": "def f(original, *args): return original(*args)\n"}
    hook = 'hook="sglang.hooks.run:f"),'
    checkout.topic("the-run", f'Around({ENGINE}, scope="Engine.run", {hook}', 'overlay=("sglang/hooks/",)')
    checkout.topic("the-step", f'Around({ENGINE}, scope="Engine.step", {hook}')
    checkout.topics["the-step"] = checkout.topics["the-step"].replace(
        'upstream="none"', 'upstream="https://github.com/sgl-project/sglang/pull/7"'
    )
    checkout.write()
    files = {
        "docs/upstream.md": PAGE,
        "patches/review.toml": REVIEW,
        "benchmark/results/headline.json": HEADLINE,
        "test/test_one.py": "from sglang.hooks import run\n",
        "test/test_two.py": "DISABLE = 'the-run,the-step'\n",
        "test/test_three.py": "import other\n",
    }
    checkout.put(files)
    return checkout


def test_review(ready: Checkout) -> None:
    project = Project(ready.root)
    review = Review(project)
    run, step = project.topics()
    assert [thread.name for thread in review.threads(run)] == ["sglang#7"]
    # Without an entry, a topic's own file names its thread.
    assert [thread.url for thread in review.threads(step)] == ["https://github.com/sgl-project/sglang/pull/7"]
    assert list(review.rows(run)) == ["gpu.run.1k"] and review.rows(step) == {}
    assert review.tests(run) == ["test/test_one.py", "test/test_two.py"]
    assert review.tests(step) == ["test/test_two.py"]
    assert review.next(step) == "undecided" and review.state(run) == "not tried"
    assert review.strangers({"the-run", "the-step"}) == ["not-yet-here"]


def test_a_thread_that_is_none(ready: Checkout) -> None:
    path = ready.root / "patches" / "review.toml"
    path.write_text(REVIEW.replace("sglang#7", "sglang 7"), encoding="utf-8")
    project = Project(ready.root)
    with pytest.raises(EngineError, match="which is no sglang#N or vllm#N"):
        Review(project).threads(project.topics()[0])


def test_pin_renews_the_page(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    assert ready.engine("pin") == 0
    text = (ready.root / "docs" / "upstream.md").read_text()
    assert text.startswith("# Title\n") and text.endswith("\nend\n") and "stale" not in text
    assert "| `the-run` | 1 | [sglang#7]" in text and "**Plan for `the-run`.** move the anchor" in text
    command = ["--root", str(ready.root), "page", "--check"]
    from patches.engine.cli import main

    assert main(command) == 0
    ready.topic("a-third", f'Around({ENGINE}, scope="Engine.double", hook="sglang.hooks.run:f"),').write()
    (ready.root / "patches" / "review.toml").write_text(REVIEW)
    assert main(command) == 1
    assert "make pin" in capsys.readouterr().err
    assert ready.engine("pin") == 0 and main(command) == 0


def test_conflict_markers_in_the_table_are_healed(ready: Checkout) -> None:
    """Two branches that each add a topic meet here; renewing takes neither side."""
    path = ready.root / "docs" / "upstream.md"
    path.write_text(
        PAGE.replace("stale", f"<<<<<<< a\none\n{page.END}\n=======\n{page.BEGIN}\ntwo\n>>>>>>> b")
    )
    assert ready.engine("pin") == 0
    assert "<<<<" not in path.read_text() and path.read_text().count(page.END) == 1


def test_a_page_without_a_place_for_the_table(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    (ready.root / "docs" / "upstream.md").write_text("# Title\n")
    assert ready.engine("pin") == 1
    assert "put both lines where the table belongs" in capsys.readouterr().err


def test_cover_letters(ready: Checkout) -> None:
    assert ready.engine("export") == 0
    letters = sorted((ready.root / "build" / "review").glob("*.md"))
    assert [path.name for path in letters] == ["0001-the-run.md", "0002-the-step.md"]
    run, step = (path.read_text() for path in letters)
    for text in (
        "Because the test says so.",
        "1 upstream files touched, 1 files added",
        "sglang/srt/engine.py: Engine.run",
        "[sglang#7](https://github.com/sgl-project/sglang/pull/7): what seven says (open, 2026-09)",
        "| gpu.run.1k | 2.0 ms | 4.0 | 2.0 | a.json#1 |",
        "- test/test_one.py",
        "Plan: move the anchor",
    ):
        assert text in run, text
    assert "has not been measured" in step


def test_check_forward_against_the_record(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded, unchanged, then an anchor is lost: the plan is shown and the status is 1."""
    from patches.engine.cli import main

    command = ["--root", str(ready.root), "forward"]
    assert main(command) == 2
    assert "records no version yet" in capsys.readouterr().err
    wheel = ready.wheel(version="1.1")
    assert main([*command, "--wheel", str(wheel), "--record"]) == 0
    record = ready.root / "patches" / "forward.toml"
    assert 'version = "1.1"' in record.read_text() and 'the-run = "applies"' in record.read_text()
    assert Review(Project(ready.root)).state(Project(ready.root).topics()[0]) == "applies"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_FORK_WHEELS", str(ready.wheels))
        assert main(command) == 0
        ready.upstream["sglang/srt/engine.py"] = ready.upstream["sglang/srt/engine.py"].replace(
            "def run(", "def go("
        )
        ready.wheel(version="1.1")
        capsys.readouterr()
        assert main(command) == 1
    shown = capsys.readouterr()
    assert "the-run: lost: Engine.run\n  plan: move the anchor" in shown.out
    assert "the-run: applies -> lost: Engine.run" in shown.err


def test_a_new_topic_that_applies_is_no_failure(ready: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    from patches.engine.cli import main

    wheel = ready.wheel(version="1.1")
    command = ["--root", str(ready.root), "forward"]
    assert main([*command, "--wheel", str(wheel), "--record"]) == 0
    record = ready.root / "patches" / "forward.toml"
    record.write_text(record.read_text().replace('the-step = "applies"\n', ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_FORK_WHEELS", str(ready.wheels))
        assert main(command) == 0
    assert "new, not in patches/forward.toml: the-step: applies" in capsys.readouterr().out


def test_the_page_of_this_repository_is_not_stale() -> None:
    project = Project(REPOSITORY)
    assert page.render(project) == (REPOSITORY / page.PAGE).read_text(encoding="utf-8"), "run make pin"


def test_threads_of_this_repository_are_recorded() -> None:
    """Every thread that a topic answers says what it is about, and every lost topic has a plan."""
    project = Project(REPOSITORY)
    review = Review(project)
    for topic in project.topics():
        for thread in review.threads(topic):
            if thread.name in re.findall(
                r"(?:sglang|vllm)#\d+", str(review._entry(topic).get("answers", ""))
            ):
                assert thread.says and thread.kind in ("issue", "pull"), thread.name
        if review.state(topic).startswith("lost"):
            assert review.plan(topic), f"{topic.name} is lost on {review.forward['version']} and has no plan"


def test_the_weekly_job_is_a_script(tmp_path: Path) -> None:
    path = REPOSITORY / ".ci" / "weekly"
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert "make check-forward" in path.read_text() and "make test-properties" in path.read_text()
