"""Compiles a plan's kernels for an architecture that is not there, and reads what the assembler says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from sglang.srt.layers.attention.verify.launch import CallForm, Launch, merge_launch, split_launch
from sglang.srt.layers.attention.verify.plan import SplitPlan
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs. ``spill_bytes`` is the stack frame: spills and local arrays."""

    shared: int
    registers: int
    spill_bytes: int
    sass: str

    def count(self, mnemonic: str) -> int:
        """Static occurrences of a machine instruction."""
        return len(re.findall(rf"\b{mnemonic}\b", self.sass))


def signature(plan: SplitPlan) -> dict[str, str]:
    """Types of every runtime argument that any of the kernels names."""
    r = plan.request
    kv, q = POINTERS[r.kv_dtype], POINTERS[r.q_dtype]
    return {
        "q": q, "k_pool": kv, "v_pool": kv, "latent": kv, "out": q, "lse": "*fp32",
        "partial": POINTERS[plan.partial_dtype], "partial_lse": "*fp32", "seq_lens": "*i64", "req_pool_indices": "*i64",
        "table": "*i32", "indptr": "*i32", "mask": "*u8", "mask_indptr": "*i64",
        "score_scale": "fp32", "value_scale": "fp32", "logit_cap": "fp32", "batch": "i32", "target": "i32", "trace": "*i64",
    }  # fmt: skip


def compile_launch(launch: Launch, types: dict[str, str], arch: int) -> Resources:
    """Compile for sm_``arch`` as a call would: pointers and strides divisible by 16."""
    kernel = launch.kernel
    names = kernel.arg_names
    full: dict[str, str] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, name in enumerate(names):
        if name in launch.constants:
            full[name] = "constexpr"
            continue
        full[name] = types.get(name, "i32")
        if full[name].startswith("*") or name.startswith("stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    options = {k: v for k, v in launch.options.items() if k != "launch_pdl"}
    compiled = triton.compile(
        source(kernel, full, launch.constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    return resources(compiled.asm["cubin"], compiled.metadata.shared)


def resources(code: bytes, shared: int, entry: str = "") -> Resources:
    """What the machine code asks of a multiprocessor; ``shared`` is dynamic, so it is not in there.

    ``entry``: which of its kernels, if it has several.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage = _tool("-res-usage", file.name)
        sass = _tool("-sass", file.name)
    if entry:
        usage, sass = (re.split(rf"Function\s*:?\s*{entry}\b", text)[1] for text in (usage, sass))
        sass = sass.split("Function :")[0]
    registers = re.search(r"REG:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    assert registers and stack, usage
    return Resources(shared, int(registers[1]), int(stack[1]), sass)


def _tool(flag: str, path: str) -> str:
    return subprocess.run(
        [TOOLS / "cuobjdump", flag, path], capture_output=True, text=True, check=True
    ).stdout


def compile_plan(plan: SplitPlan, arch: int, form: CallForm | None = None) -> tuple[Resources, Resources]:
    """(split, merge) of ``plan`` for sm_``arch``."""
    form = form or CallForm(lens_include_new=False, has_table=True, has_lse=False)
    types = signature(plan)
    return (
        compile_launch(split_launch(plan, form), types, arch),
        compile_launch(merge_launch(plan, form), types, arch),
    )
