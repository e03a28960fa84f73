"""The generated part of docs/upstream.md, and a cover letter for each exported topic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from patches.engine.errors import EngineError
from patches.engine.model import Topic
from patches.engine.project import Project
from patches.engine.review import APPLIES, NOT_NEEDED, Review, Thread

PAGE = Path("docs") / "upstream.md"
BEGIN, END = "<!-- topics -->", "<!-- /topics -->"


def table(topics: Sequence[Topic], review: Review) -> str:
    """One row a topic, then the plans of those that no longer apply."""
    version = str(review.forward.get("version", "a newer version"))
    lines = [
        f"| topic | upstream files | threads | on {version} | test files | next step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for topic in topics:
        threads = ", ".join(_link(thread) for thread in review.threads(topic)) or "none found"
        tests = len(review.tests(topic))
        state = review.state(topic)
        if state == APPLIES and review.plan(topic):
            state = "resolves; see its plan"
        lines.append(
            f"| `{topic.name}` | {len(topic.files)} | {threads} | {state} | {tests} | {review.next(topic)} |"
        )
    states = [review.state(topic) for topic in topics]
    lines += [
        "",
        f"{len(topics)} topics; on {version} the anchors of {states.count(APPLIES)} resolve and {states.count(NOT_NEEDED)} "
        f"{'is' if states.count(NOT_NEEDED) == 1 else 'are'} not needed. "
        f"States of threads in the cover letters are those of {review.as_of or 'an unknown day'}.",
    ]
    for topic in topics:
        if review.plan(topic):
            lines += ["", f"**Plan for `{topic.name}`.** {review.plan(topic)}"]
    return "\n".join(lines)


def _link(thread: Thread) -> str:
    return f"[{thread.name}]({thread.url})"


def render(project: Project) -> str | None:
    """The page with its generated part renewed; None where there is no page.

    Raises:
        EngineError: the page has no place for the table.
    """
    path = project.root / PAGE
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    # After a merge the block may hold conflict markers or two tables; only its outermost ends count.
    _, end, after = rest.rpartition(END)
    if not begin or not end:
        raise EngineError(f"{PAGE} has no {BEGIN} ... {END}; put both lines where the table belongs")
    return f"{before}{BEGIN}\n{table(project.topics(), Review(project))}\n{END}{after}"


def write(project: Project) -> bool:
    """Renew the page; whether it changed."""
    text = render(project)
    path = project.root / PAGE
    if text is None or text == path.read_text(encoding="utf-8"):
        return False
    path.write_text(text, encoding="utf-8")
    return True


def cover(topic: Topic, review: Review, base: str, patch: str) -> str:
    """What a maintainer reads before the diff: motivation, threads, figures, tests, and when it can go again.

    Args:
        patch: text of the exported patch, from which sizes are counted.
    """
    files = re.findall(r"(?m)^\+\+\+ b/(\S+)", patch)
    added = len(re.findall(r"(?m)^\+(?!\+\+ )", patch))
    removed = len(re.findall(r"(?m)^-(?!-- )", patch))
    ours = [name for name in files if name not in topic.files]
    lines = [f"# {topic.name}", "", topic.why.strip(), ""]
    lines += [
        f"Against sglang {base}: {len(topic.files)} upstream files touched, {len(ours)} files added, "
        f"+{added} -{removed} lines.",
        "",
    ]
    lines += [f"- {name}: {', '.join(_edits(topic, name))}" for name in topic.files]
    lines += ["", "## Threads", ""]
    threads = review.threads(topic)
    lines += [_thread(thread, review.as_of) for thread in threads] or ["None found."]
    lines += ["", "## Figures", ""]
    rows = review.rows(topic)
    if rows:
        lines += ["| figure | fork | upstream | ratio | row |", "| --- | --- | --- | --- | --- |"]
        lines += [
            f"| {name} | {row['value']} {row['unit']} | {_or(row['upstream'])} | {_or(row['ratio'])} | {row['row']} |"
            for name, row in rows.items()
        ]
    else:
        lines += ["None: the topic changes what is answered, not how fast, or has not been measured."]
    lines += ["", "## Tests", ""]
    tests = review.tests(topic)
    lines += [f"- {name}" for name in tests] or ["None names it."]
    if tests:
        lines += [
            "",
            "The patch that ends in `.tests.patch` adds them and the helper modules that they import.",
        ]
    lines += ["", "## Afterwards", "", f"- Retire when {topic.retire_when}."]
    if topic.detect:
        lines += [f"- Not needed when {topic.detect}."]
    if topic.not_needed is not None:
        lines += [f"- Composing leaves it out once {topic.not_needed.describe()}."]
    version = review.forward.get("version")
    if version:
        lines += [f"- On sglang {version}: {review.state(topic)}."]
    if review.plan(topic):
        lines += [f"- Plan: {review.plan(topic)}"]
    lines += [f"- Next step: {review.next(topic)}.", ""]
    return "\n".join(lines)


def _edits(topic: Topic, file: str) -> list[str]:
    places = [edit.scope or "module level" for edit in topic.edits if edit.file == file]
    return list(dict.fromkeys(places))


def _thread(thread: Thread, as_of: str) -> str:
    says = f": {thread.says}" if thread.says else ""
    state = f" ({thread.state}, {as_of})" if thread.state else ""
    return f"- {_link(thread)}{says}{state}"


def _or(value: object) -> str:
    return "-" if value is None else str(value)
