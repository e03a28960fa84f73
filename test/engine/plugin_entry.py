"""Make a module known to upstream's plugin loader, as an installed package's metadata would."""

from __future__ import annotations

from pathlib import Path


def declare(folder: Path, module: str, function: str = "activate") -> None:
    """Write the metadata of a package whose plugin is ``module:function``; ``folder`` belongs on PYTHONPATH.

    So does the module's own folder, and its name in ``SGLANG_PLUGINS`` where that is set.
    """
    information = folder / f"{module}-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (information / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module} = {module}:{function}\n")
