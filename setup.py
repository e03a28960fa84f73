"""Builds the wheel ``sglang BASE+verify.N``: composes upstream, patches and overlay, and packs the result.

Dependencies, extras and entry points are upstream's, taken from its wheel. Upstream's extension modules are
in the tree, so the wheel carries upstream's interpreter and platform tags.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    # Before anything else: neither the engine nor a setuptools of that Python's age can be counted on.
    print(
        f"error: Python {sys.version.split()[0]}: upstream has wheels for 3.10 to 3.13 only", file=sys.stderr
    )
    raise SystemExit(2)

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from setuptools import Distribution, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402

from patches.engine.compose import MANIFEST, compose  # noqa: E402
from patches.engine.errors import EngineError  # noqa: E402
from patches.engine.fetch import pick  # noqa: E402
from patches.engine.hashes import list_files  # noqa: E402
from patches.engine.project import Project  # noqa: E402

PROJECT = Project(ROOT)


def prebuild(package: Path) -> None:
    """Compile the all-reduce kernels into the wheel where a CUDA compiler is; ``SGLANG_FORK_PREBUILD=0`` does not."""
    if os.environ.get("SGLANG_FORK_PREBUILD", "").strip() == "0":
        return
    spec = importlib.util.spec_from_file_location("one_shot_nvcc", package / "nvcc.py")
    assert spec is not None and spec.loader is not None
    nvcc: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nvcc)
    try:
        nvcc.build_into(package / "prebuilt", package / "csrc")
    except nvcc.CompileError as error:
        print(f"note: the wheel has no compiled all-reduce kernels, they are compiled on first use: {error}")


class ComposedTree(build_py):  # type: ignore[misc]
    """Copies the composed tree in place of a list of packages; an editable install uses it where it lies."""

    def run(self) -> None:
        if self.editable_mode:
            return
        target = Path(self.build_lib)
        # What an earlier build left there would end up in the wheel.
        shutil.rmtree(target, ignore_errors=True)
        for name in list_files(PROJECT.composed):
            if name == MANIFEST or name.split("/")[0].endswith(".dist-info"):
                continue
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT.composed / name, place)
        prebuild(target / "sglang" / "srt" / "distributed" / "one_shot")

    def get_source_files(self) -> list[str]:
        """None: a source distribution holds what MANIFEST.in names, not the composed tree."""
        return []


class UpstreamTags(bdist_wheel):  # type: ignore[misc]
    """A wheel with upstream's tags and metadata."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = pick(PROJECT.pins()).file.removesuffix(".whl").rsplit("-", 3)[1:]
        return python, abi, platform

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        pins = PROJECT.pins()
        composed = PROJECT.composed / f"{pins.name}-{pins.version}.dist-info"
        for name in ("METADATA", "entry_points.txt", "top_level.txt"):
            shutil.copyfile(composed / name, os.path.join(distinfo_path, name))


class BinaryDistribution(Distribution):  # type: ignore[misc]
    """Holds extension modules, though none is built here."""

    def has_ext_modules(self) -> bool:
        return True

    def has_pure_modules(self) -> bool:
        """True, or setuptools would skip ``build_py`` for want of packages."""
        return True


def main() -> None:
    """Compose, then hand over to setuptools."""
    pins = PROJECT.pins()
    options: dict[str, Any] = {
        # Neither the composed tree nor the checkout's root is the place for build leftovers.
        "build": {"build_base": "build/setuptools"},
        "egg_info": {"egg_base": "build"},
    }
    if "sdist" not in sys.argv:
        compose(PROJECT)
    (ROOT / "build").mkdir(exist_ok=True)
    setup(
        name=pins.name,
        version=pins.version,
        description="SGLang with fast verification of speculative decoding",
        license="Apache-2.0",
        license_files=["LICENSE", "NOTICE"],
        python_requires=">=3.10,<3.14",
        packages=[],
        py_modules=[],
        package_dir={"": "build/composed"},
        include_package_data=False,
        distclass=BinaryDistribution,
        cmdclass={"build_py": ComposedTree, "bdist_wheel": UpstreamTags},
        options=options,
    )


try:
    main()
except EngineError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.status) from None
except OSError as error:
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1) from None
