"""Who gets the name `sgl_kernel`: the compiled package if it works, the portable one otherwise, never both."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from leaf import run_python

PROBE = """
import sys
from sglang.srt.cpu_engine import portable
if {install}:
    portable.install()
    portable.install()
import sgl_kernel
from sglang.fork import fallbacks
print(sgl_kernel.__name__, fallbacks.snapshot())
{after}
"""


def run(folder: Path, *, install: bool = True, after: str = "") -> subprocess.CompletedProcess[str]:
    """Import `sgl_kernel` in a fresh interpreter that sees `folder` before the portable package."""
    return run_python("-c", PROBE.format(install=install, after=after), first=folder)


def package(folder: Path, text: str, **modules: str) -> None:
    """Write a stand-in for the compiled package."""
    (folder / "sgl_kernel").mkdir()
    (folder / "sgl_kernel" / "__init__.py").write_text(text)
    for name, content in modules.items():
        (folder / "sgl_kernel" / f"{name}.py").write_text(content)


def test_absent(tmp_path: Path) -> None:
    result = run(
        tmp_path, after="from sgl_kernel.scalar_type import scalar_types; print(scalar_types.uint4b8.bias)"
    )
    assert result.stdout.splitlines() == [
        "sgl_kernel_portable {'compiled sgl_kernel': {'it is not installed': 1}}",
        "8",
    ]
    assert result.stderr.count("compiled sgl_kernel") == 1


def test_a_working_package_with_cpu_ops_is_left_alone(tmp_path: Path) -> None:
    package(tmp_path, "def verify_tree_greedy_cpu(): pass\n", scalar_type="mine = 1\n")
    result = run(tmp_path, after="import sgl_kernel.scalar_type; print(sgl_kernel.scalar_type.mine)")
    assert result.stdout.splitlines() == ["sgl_kernel {}", "1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "raise ImportError('libcuda.so.1: cannot open shared object file')",
            "it does not load (ImportError)",
        ),
        ("raise OSError('libnvrtc')", "it does not load (OSError)"),
        ("from sgl_kernel import half; raise RuntimeError('no driver')", "it does not load (RuntimeError)"),
        ("def rmsnorm(): pass", "it has no CPU ops"),
    ],
)
def test_a_package_that_does_not_serve_is_replaced(tmp_path: Path, text: str, reason: str) -> None:
    package(tmp_path, text, half="", scalar_type="raise AssertionError('not the portable module')")
    result = run(tmp_path, after="import sgl_kernel.scalar_type; print('sgl_kernel.half' in sys.modules)")
    assert result.stdout.splitlines() == [
        f"sgl_kernel_portable {{'compiled sgl_kernel': {{{reason!r}: 1}}}}",
        "False",
    ]


def test_without_the_finder_a_broken_package_stays_an_error(tmp_path: Path) -> None:
    package(tmp_path, "raise ImportError('libcuda.so.1')")
    result = run(tmp_path, install=False)
    assert result.returncode != 0
    assert "libcuda.so.1" in result.stderr


def test_a_missing_module_is_an_import_error_with_a_remedy(tmp_path: Path) -> None:
    after = """
try:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache
except ImportError as error:
    print(error)
"""
    result = run(tmp_path, after=after)
    assert "sgl_kernel.flash_attn is part of the compiled sgl_kernel package only" in result.stdout


def test_an_unknown_op_can_be_imported_and_names_itself_when_called() -> None:
    import sgl_kernel_portable

    op = sgl_kernel_portable.cutlass_mla_decode
    with pytest.raises(NotImplementedError, match=r"sgl_kernel.cutlass_mla_decode has no portable CPU.*GPU"):
        op(1, page=2)
    assert not hasattr(sgl_kernel_portable, "__wrapped__")


def test_nothing_tells_upstream_that_amx_kernels_exist() -> None:
    import sgl_kernel_portable  # noqa: F401
    import torch

    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
