"""Each kind of edit on a running tree: what it does, and that switching the topic off undoes it."""

from __future__ import annotations

import pytest
from checkout import Checkout

FILE = 'file="sglang/srt/engine.py"'
HOOKS = """
SEEN = []
def around(original, *args, **kwargs): return ("around", original(*args, **kwargs))
def plus(value, *rest): return value + 100
def note(*args): SEEN.append(args)
def wrapper(f, *args, **kwargs): return f(*args, **kwargs) + 1000
def keywords(*args): return {"factor": 5}
def never(value, *args): return False
def always(value, *args): return True
def invert(value, *args): return not value
def later(original, value):
    async def run(): return ("later", await original(value))
    return run()
"""
RUN = "import sglang.srt.engine as e; print(e.Engine().run(2))"

CASES = {
    # name: (edit, code, printed with the topic on, printed with it off)
    "around": (
        f'Around({FILE}, scope="Engine.step", hook="sglang.hooks:around")',
        "import sglang.srt.engine as e; print(e.Engine().step(2, 3))",
        "('around', 6)",
        "6",
    ),
    "around-static": (
        f'Around({FILE}, scope="Engine.double", hook="sglang.hooks:around")',
        "import sglang.srt.engine as e; print(e.Engine.double(4))",
        "('around', 8)",
        "8",
    ),
    "around-nested": (
        f'Around({FILE}, scope="outer.inner", hook="sglang.hooks:around")',
        "import sglang.srt.engine as e; print(e.outer(7))",
        "('around', 7)",
        "7",
    ),
    "around-async": (
        f'Around({FILE}, scope="slow", hook="sglang.hooks:later")',
        "import asyncio, inspect, sglang.srt.engine as e; print(inspect.iscoroutinefunction(e.slow), asyncio.run(e.slow(3)))",
        "True ('later', 3)",
        "True 3",
    ),
    "insert-after-assign": (
        f'InsertAfter({FILE}, scope="Engine.run", match=Assign("total"), hook="sglang.hooks:plus", args=("total", "self"), assign="total")',
        RUN,
        "big",
        "6",
    ),
    "insert-before": (
        f'InsertBefore({FILE}, scope="Engine.run", match=Branch(mentions=("total",)), hook="sglang.hooks:plus", args=("total",), assign="total")',
        RUN,
        "big",
        "6",
    ),
    "insert-plain": (
        f'InsertBefore({FILE}, scope="Engine.run", match=Call("step"), hook="sglang.hooks:note", args=("value", "self.scale"))',
        f"{RUN}; from sglang import hooks; print(hooks.SEEN)",
        "6\n[(2, 2)]",
        "6\n[]",
    ),
    "wrap-call": (
        f'WrapCall({FILE}, scope="Engine.run", match=Call("self.step"), hook="sglang.hooks:wrapper")',
        RUN,
        "big",
        "6",
    ),
    "replace-keyword": (
        f'ReplaceArgument({FILE}, scope="Engine.run", match=Call("step"), argument="factor", hook="sglang.hooks:plus", args=("self",))',
        RUN,
        "big",
        "6",
    ),
    "replace-position": (
        f'ReplaceArgument({FILE}, scope="Engine.run", match=Call("step"), argument=0, hook="sglang.hooks:plus")',
        RUN,
        "big",
        "6",
    ),
    "add-keywords": (
        f'AddKeywords({FILE}, scope="outer", match=Call("inner"), hook="sglang.hooks:keywords", args=("flag",))',
        "import sglang.srt.engine as e\ntry: print(e.outer(1))\nexcept TypeError as x: print('factor' in str(x))",
        "True",
        "1",
    ),
    "guard-and": (
        f'GuardBranch({FILE}, scope="outer", match=Branch(mentions=("flag",)), hook="sglang.hooks:never", args=("flag",))',
        "import sglang.srt.engine as e; print(e.outer(7))",
        "None",
        "7",
    ),
    "guard-or": (
        f'GuardBranch({FILE}, scope="Engine.run", match=Branch(mentions=("total",)), hook="sglang.hooks:always", how="or")',
        RUN,
        "big",
        "6",
    ),
    "guard-value": (
        f'GuardBranch({FILE}, scope="Engine.run", match=Branch(mentions=("total",)), hook="sglang.hooks:invert", how="value")',
        RUN,
        "big",
        "6",
    ),
    "import-end": (
        f'AddImport({FILE}, module="sglang.registers")',
        "import sglang.srt.engine as e; print(e.LIMITS)",
        "['low', 'ours']",
        "['low']",
    ),
    "at-top": (
        f'InsertAtTop({FILE}, hook="sglang.hooks:note")',
        "import sglang.srt.engine; from sglang import hooks; print(hooks.SEEN)",
        "[()]",
        "[]",
    ),
    "add-field": (
        f'AddField({FILE}, scope="Engine", name="extra", annotation="int", default="9")',
        "import sglang.srt.engine as e; print(e.Engine.extra)",
        "9",
        "9",
    ),
}

OVERLAY = {
    "sglang/hooks.py": HOOKS,
    "sglang/registers.py": 'from sglang.srt import engine\nengine.LIMITS.append("ours")\n',
}


@pytest.mark.parametrize("name", CASES)
def test_edit_works_and_can_be_switched_off(checkout: Checkout, name: str) -> None:
    edit, code, on, off = CASES[name]
    checkout.overlay = OVERLAY
    checkout.topic("the-topic", f"{edit},").write()
    assert checkout.engine("compose") == 0
    text = (checkout.composed / "sglang/srt/engine.py").read_text()
    stock = checkout.upstream["sglang/srt/engine.py"].splitlines()
    changed = [line for line in text.splitlines() if line not in stock]
    assert changed and all(line.endswith("# fork: the-topic") for line in changed)
    with_topic, without = checkout.python(code), checkout.python(code, disable="the-topic")
    assert (with_topic.stdout.strip(), with_topic.stderr) == (on, "")
    assert (without.stdout.strip(), without.stderr) == (off, "")


def test_layout_and_comments_of_upstream_stay(checkout: Checkout) -> None:
    checkout.overlay = OVERLAY
    checkout.topic("one", CASES["wrap-call"][0] + ",").topic("two", CASES["guard-or"][0] + ",").write()
    assert checkout.engine("compose") == 0
    text = (checkout.composed / "sglang/srt/engine.py").read_text()
    assert "factor=3)  # keep me  # fork: one\n" in text
    assert "        # upstream's own remark\n" in text
    stock = checkout.upstream["sglang/srt/engine.py"].splitlines()
    kept = [line for line in text.splitlines() if line in stock]
    assert len(stock) - len(kept) == 2


def test_a_call_over_several_lines_keeps_its_layout(checkout: Checkout) -> None:
    checkout.upstream["sglang/srt/engine.py"] = (
        "def f(**k): return k\n\nvalue = f(\n    a=1,\n    b=2,\n)\nother = f()\n"
    )
    checkout.overlay = OVERLAY
    edit = f'AddKeywords({FILE}, match=Call("f", mentions=("a",)), hook="sglang.hooks:keywords"),'
    edit += f'AddKeywords({FILE}, match=Call("f", nth=1, because="it has no arguments"), hook="sglang.hooks:keywords"),'
    checkout.topic("the-topic", edit).write()
    assert checkout.engine("compose") == 0
    text = (checkout.composed / "sglang/srt/engine.py").read_text()
    assert "\n    a=1,\n    b=2, **_fork.extra(" in text
    code = "import sglang.srt.engine as e; print(e.value, e.other)"
    assert checkout.python(code).stdout.strip() == "{'a': 1, 'b': 2, 'factor': 5} {'factor': 5}"


def test_around_hooks_nest_in_series_order(checkout: Checkout) -> None:
    checkout.overlay = {
        "sglang/hooks.py": "def a(f, *x): return ('a', f(*x))\ndef b(f, *x): return ('b', f(*x))\n"
    }
    checkout.topic("first", f'Around({FILE}, scope="Engine.double", hook="sglang.hooks:a"),')
    checkout.topic(
        "second", f'Around({FILE}, scope="Engine.double", hook="sglang.hooks:b"),', 'stacks_on=("first",)'
    )
    checkout.write()
    assert checkout.engine("compose") == 0
    code = "import sglang.srt.engine as e; print(e.Engine.double(1))"
    assert checkout.python(code).stdout.strip() == "('b', ('a', 2))"
    assert checkout.python(code, disable="first").stdout.strip() == "('b', 2)"
    assert checkout.python(code, disable="second").stdout.strip() == "('a', 2)"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ('Around(file="f", scope="g", hook="no-colon")', "form"),
        ('InsertBefore(file="f", match=Call("g"), hook="m:h", args=("a + b",))', "logic belongs in the hook"),
        ('InsertBefore(file="f", match=Call("g"), hook="m:h", args=("a, b",))', "not one argument"),
        ('InsertBefore(file="f", match=Call("g"), hook="m:h", args=("b",), assign="a")', "first argument"),
        ('WrapCall(file="f", match=Call("g", nth=0), hook="m:h")', "because"),
    ],
)
def test_malformed_edits_are_refused(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], edit: str, words: str
) -> None:
    checkout.topic("the-topic", f"{edit},").write()
    assert checkout.engine("compose") == 2
    error = capsys.readouterr().err
    assert words in error and "the_topic.py" in error
    assert not checkout.composed.exists()
