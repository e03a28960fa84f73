"""The runtime half: topic states and switches, the report, hooks, fallbacks and counters."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from types import ModuleType

import pytest
from checkout import REPOSITORY, Checkout

ENGINE = 'file="sglang/srt/engine.py"'
REPORT = """
InsertAtTop(file="sglang/__init__.py", hook="sglang.fork.early:run_diagnostics"),
InsertAfter(file="sglang/srt/engine.py", scope="Engine.run", match=Call("step"), hook="sglang.fork.startup:log_report"),
"""


def load(name: str) -> ModuleType:
    """A module of the runtime by its file: its parent package would import torch."""
    path = REPOSITORY / "python" / "sglang" / "fork" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_runtime_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    """A composed checkout: the report's own topic, one that works, and one that upstream made needless."""
    checkout.overlay = {"sglang/hooks.py": "def f(original, *args): return original(*args)\n"}
    checkout.topic("fork-report", REPORT)
    checkout.topic("the-topic", f'Around({ENGINE}, scope="Engine.run", hook="sglang.hooks:f"),')
    needless = 'not_needed=FileExists("sglang/version.py")'
    checkout.topic("needless", f'Around({ENGINE}, scope="Engine.step", hook="sglang.hooks:f"),', needless)
    checkout.write()
    assert checkout.engine("compose") == 0
    return checkout


def test_report_as_json(ready: Checkout) -> None:
    done = ready.python("sglang.fork", disable="the-topic", flags=("-m",))
    assert done.returncode == 0 and done.stdout.startswith(
        "base     sglang 1.0\nfork     sglang 1.0+verify.9\n"
    )
    code = "import sys; sys.argv[1:] = ['--json']; from sglang.fork.__main__ import main; raise SystemExit(main())"
    report = json.loads(ready.python(code, disable="the-topic").stdout)
    assert (report["base"], report["version"], report["composed"]) == ("1.0", "1.0+verify.9", True)
    states = {topic["name"]: (topic["state"], topic["reason"]) for topic in report["topics"]}
    assert states == {
        "fork-report": ("applied", "2 edits"),
        "the-topic": ("off", "named in SGLANG_FORK_DISABLE"),
        "needless": ("not needed", "upstream has sglang/version.py"),
    }
    assert report["topics"][1]["files"] == ["sglang/srt/engine.py"] and report["topics"][1]["why"]


def test_report_where_the_package_does_not_import(checkout: Checkout) -> None:
    """The reason for the early hook: upstream's package fails to import, the report still comes."""
    checkout.upstream["sglang/__init__.py"] = "import a_module_that_nobody_has\n"
    checkout.topic("fork-report", REPORT).write()
    assert checkout.engine("compose") == 0
    done = checkout.python("sglang.fork", flags=("-m",))
    assert done.returncode == 0 and "fork-report  applied" in done.stdout and not done.stderr
    assert checkout.python("import sglang").returncode == 1
    assert checkout.python("sglang.fork", disable="fork-report", flags=("-m",)).returncode == 1


@pytest.mark.parametrize(
    ("argv", "original", "tool"),
    [
        (["-m", "--json"], ["python", "-X", "dev", "-m", "sglang.fork", "--json"], "sglang.fork"),
        (["-m"], ["python", "-m", "sglang.verify_doctor"], "sglang.verify_doctor"),
        (["-m"], ["python", "-m", "sglang.launch_server", "-m", "sglang.fork"], None),
        (["script.py"], ["python", "script.py", "-m", "sglang.fork"], None),
        (["-c"], ["python", "-c", "import sglang"], None),
        ([], [], None),
    ],
)
def test_early_tools(argv: list[str], original: list[str], tool: str | None) -> None:
    assert load("early").requested(argv, original) == tool


def test_start_up_line(ready: Checkout) -> None:
    code = (
        "import logging; logging.basicConfig(level='INFO'); import sglang.srt.engine as e; e.Engine().run(1)"
    )
    line = "INFO:sglang.fork:sglang fork 1.0+verify.9 (base 1.0); applied: fork-report"
    assert ready.python(code).stderr.strip() == f"{line}, the-topic; not needed: needless"
    assert (
        ready.python(code, disable="the-topic").stderr.strip()
        == f"{line}; off: the-topic; not needed: needless"
    )
    assert ready.python(code, disable="fork-report").stderr == ""


@pytest.mark.parametrize(
    ("disable", "expected"),
    [("", "True False"), ("the-topic", "False False"), (" the-topic , needless,", "False False")],
)
def test_enabled(ready: Checkout, disable: str, expected: str) -> None:
    code = "from sglang.fork import enabled; print(enabled('the-topic'), enabled('needless'))"
    assert ready.python(code, disable=disable).stdout.strip() == expected


def test_unknown_topic_in_code(ready: Checkout) -> None:
    code = "from sglang.fork import enabled; enabled('the-topik')"
    assert (
        "UnknownTopicError: sglang.fork.enabled: unknown topic 'the-topik'. Did you mean"
        in ready.python(code).stderr
    )


def test_tree_that_was_not_composed(ready: Checkout) -> None:
    """As after the exported patches: no baked list, every topic in force unless named in the switch."""
    (ready.composed / "sglang/fork/_composed.py").unlink()
    code = "from sglang.fork import enabled, report; print(enabled('x'), enabled('y'), report().composed)"
    assert ready.python(code, disable="y").stdout.strip() == "True False False"
    done = ready.python("sglang.fork", flags=("-m",))
    assert done.returncode == 1 and "not composed" in done.stdout


def test_only_the_standard_library(ready: Checkout) -> None:
    """No installed package is on the path of this process (-S), and the runtime asks for none."""
    code = """
import sys, sglang.fork, sglang.fork.startup, sglang.fork.early, sglang.fork.__main__
print({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - {'sglang', '__main__'})
"""
    done = ready.python(code)
    assert done.stdout.strip() in {"set()", "{'sitecustomize'}"}, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("sglang.hooks", "ValueError: hook 'sglang.hooks' is not of the form"),
        ("sglang.hooks:gone", "ImportError: hook 'sglang.hooks:gone': sglang.hooks has no 'gone'"),
        ("sglang.nowhere:f", "ModuleNotFoundError: No module named 'sglang.nowhere'"),
    ],
)
def test_hook_that_cannot_be_resolved(ready: Checkout, target: str, error: str) -> None:
    done = ready.python(f"from sglang.fork import call; call('the-topic', {target!r})")
    assert error in done.stderr


def test_hooks_are_imported_at_first_use(ready: Checkout) -> None:
    code = """
import sys, sglang.srt.engine as e
before = 'sglang.hooks' in sys.modules
e.Engine().run(1)
print(before, 'sglang.hooks' in sys.modules, e.Engine.run.__name__, e.Engine.run.__wrapped__.__name__)
"""
    assert ready.python(code).stdout.strip() == "False True run run"


def test_disabled_around_is_the_function_itself(ready: Checkout) -> None:
    code = "import sglang.srt.engine as e; print(hasattr(e.Engine.run, '__wrapped__'))"
    assert ready.python(code, disable="the-topic").stdout.strip() == "False"
    assert ready.python(code).stdout.strip() == "True"


def test_fallbacks_log_once_and_count(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = load("fallbacks")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fallbacks.record("verify-attention", "head dim", detail="96; limit 576; use the stock backend")
        fallbacks.record("verify-attention", "mask")
    assert [record.message for record in caplog.records] == [
        "verify-attention: falling back to the stock path: head dim (96; limit 576; use the stock backend)",
        "verify-attention: falling back to the stock path: mask",
    ]
    snapshot = fallbacks.snapshot()
    assert snapshot == {"verify-attention": {"head dim": 3, "mask": 1}}
    snapshot["verify-attention"]["mask"] = 99
    assert fallbacks.snapshot()["verify-attention"]["mask"] == 1
    fallbacks.reset()
    assert fallbacks.snapshot() == {}


def test_fallback_reasons_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = load("fallbacks")
    limit = fallbacks.MAX_REASONS_PER_PATH
    for number in range(limit + 10):
        fallbacks.record("path", f"reason {number}", detail="varies")
    reasons = fallbacks.snapshot()["path"]
    assert len(reasons) == limit + 1 and reasons[fallbacks.OTHER] == 10
    assert len(caplog.records) == limit + 1


def test_counters() -> None:
    counters = load("counters")
    counters.add("replays")
    counters.add("replays", 2)
    counters.add("replays", batch=4, kind="verify")
    counters.add("replays", kind="verify", batch=4)
    assert counters.snapshot() == {"replays": 3, 'replays{batch="4",kind="verify"}': 2}
    once_more = counters.bound("replays", kind="verify", batch=4)
    assert counters.snapshot()['replays{batch="4",kind="verify"}'] == 2, "made, not counted"
    once_more()
    assert counters.snapshot()['replays{batch="4",kind="verify"}'] == 3
    counters.reset()
    assert counters.snapshot() == {}
    once_more()
    assert counters.snapshot() == {'replays{batch="4",kind="verify"}': 1}
    counters.reset()


@pytest.mark.parametrize("name", ["fallbacks", "counters"])
def test_counts_from_many_threads(name: str) -> None:
    module = load(name)
    start = threading.Barrier(8, timeout=120)

    def work() -> None:
        start.wait()
        for _ in range(500):
            if name == "fallbacks":
                module.record("path", "reason")
            else:
                module.add("count")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert module.snapshot() == ({"path": {"reason": 4000}} if name == "fallbacks" else {"count": 4000})
