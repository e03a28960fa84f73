"""Serves the name `sgl_kernel` with portable CPU ops where the compiled package cannot be used.

A finder on `sys.meta_path` sees the first import of `sgl_kernel`. It lets the compiled package load if there is one;
the portable package takes the name only if there is none, if loading it fails, or if it has no CPU ops. The finder is
installed only where no accelerator was found: elsewhere a broken compiled package stays the error it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from sglang.fork import fallbacks

__all__ = ["PortableKernelFinder", "install"]

NAME = "sgl_kernel"
PORTABLE = "sgl_kernel_portable"
#: The op whose presence marks a compiled package built for CPUs.
CPU_OP = "verify_tree_greedy_cpu"


def _portable(reason: str, detail: str) -> ModuleType:
    fallbacks.record("compiled sgl_kernel", reason, detail=f"{detail}portable CPU ops are used")
    return importlib.import_module(PORTABLE)


class _PortableLoader(importlib.abc.Loader):
    """Puts the portable package, or a module of it, under the compiled package's name."""

    def __init__(self, target: str, reason: str = "") -> None:
        self.target = target
        self.reason = reason

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        # The import system hands out what it finds under the name afterwards, so the module that is being
        # made here can be replaced by one that exists.
        if self.reason:
            sys.modules[name] = _portable(self.reason, "")
        else:
            sys.modules[name] = importlib.import_module(self.target)


def _first_line(error: Exception) -> str:
    """The first line that says something; upstream's message begins with an empty one."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


class _CompiledLoader(importlib.abc.Loader):
    """Loads the compiled package and puts the portable one in its place if that does not work."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What a half-loaded package left behind would be found again by its submodules' importers.
        before = set(sys.modules)
        try:
            self.loader.exec_module(module)
        except Exception as error:
            # Not only ImportError: a missing libcuda surfaces as OSError, RuntimeError or AttributeError.
            for name in set(sys.modules) - before:
                if name.startswith(f"{NAME}."):
                    del sys.modules[name]
            sys.modules[NAME] = _portable(
                f"it does not load ({type(error).__name__})", f"{_first_line(error)}; "
            )
            return
        if not hasattr(module, CPU_OP):
            sys.modules[NAME] = _portable("it has no CPU ops", f"{CPU_OP} is missing; ")


class PortableKernelFinder(importlib.abc.MetaPathFinder):
    """Finds `sgl_kernel` and, once the portable package has that name, its modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the names this finder owns, else None."""
        if fullname == NAME:
            spec = importlib.machinery.PathFinder.find_spec(fullname, None)
            if spec is None or spec.loader is None:
                loader = _PortableLoader(PORTABLE, "it is not installed")
                return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
            spec.loader = _CompiledLoader(spec.loader)
            return spec
        if fullname.startswith(f"{NAME}.") and getattr(sys.modules.get(NAME), "__name__", "") == PORTABLE:
            twin = f"{PORTABLE}{fullname[len(NAME) :]}"
            if importlib.util.find_spec(twin) is None:
                raise ModuleNotFoundError(
                    f"{fullname} is part of the compiled sgl_kernel package only; the portable CPU ops that "
                    "stand in for it have no such module. Serve this configuration on a GPU",
                    name=fullname,
                )
            return importlib.machinery.ModuleSpec(fullname, _PortableLoader(twin))
        return None


def install() -> None:
    """Put the finder first on `sys.meta_path`; a second call does nothing."""
    if not any(isinstance(finder, PortableKernelFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PortableKernelFinder())
