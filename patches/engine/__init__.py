"""The patch engine: edits to upstream's files by name. Topics import what they need from here."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036
    # Before the rest, which does not import on an older Python: one message and not a traceback.
    print(f"error: Python {sys.version.split()[0]}: the fork needs 3.10 to 3.13", file=sys.stderr)
    raise SystemExit(2)

try:
    import libcst
except ImportError:
    print("error: libcst is missing: pip install -r requirements/dev.txt, or run make dev", file=sys.stderr)
    raise SystemExit(2) from None

from patches.engine.edits import (
    AddField,
    AddImport,
    AddKeywords,
    Around,
    GuardBranch,
    InsertAfter,
    InsertAtTop,
    InsertBefore,
    ReplaceArgument,
    WrapCall,
)
from patches.engine.matchers import Assign, Branch, Call, Import, Loop, Raise, Return, With
from patches.engine.model import FileExists, Mentions, NameExists, Topic

del libcst

__all__ = [
    "AddField",
    "AddImport",
    "AddKeywords",
    "Around",
    "Assign",
    "Branch",
    "Call",
    "FileExists",
    "GuardBranch",
    "Import",
    "InsertAfter",
    "InsertAtTop",
    "InsertBefore",
    "Loop",
    "Mentions",
    "NameExists",
    "Raise",
    "ReplaceArgument",
    "Return",
    "Topic",
    "With",
    "WrapCall",
]
