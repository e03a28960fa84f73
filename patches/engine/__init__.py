"""The patch engine: edits to upstream's files by name. Topics import what they need from here."""

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
