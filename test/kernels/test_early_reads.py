"""Who could write what a split reads before the kernel in front of it has ended? (The contract of ``KVContext``.)

A split reads lengths, slots and older cache rows as soon as it starts. A kernel that is launched the ordinary way starts
when everything before it is over, so a write can only be missed if its kernel lets others start (triggers) before it has
written, and only kernels that are launched early lie between. So: among the kernels that write cache rows, the request
table, lengths or positions, those that trigger are listed here with the reason why they are harmless. A new one fails.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sglang

ROOT = Path(sglang.__file__).parent
# Where such kernels live: upstream's cache and speculation kernels and the Python around them, and ours.
PLACES = (
    "kernels/ops/kvcache",
    "kernels/ops/memory",
    "kernels/ops/speculative",
    "kernels/jit/csrc/kvcache",
    "kernels/jit/csrc/memory",
    "kernels/jit/csrc/elementwise",
    "srt/mem_cache",
    "srt/speculative",
    "srt/model_executor",
)
TRIGGER = re.compile(
    r"gdc_launch_dependents|griddepcontrol\.launch_dependents|PDLTriggerSecondary|TriggerProgrammaticLaunchCompletion"
)
NEW_ROWS = "writes cache rows of the call's own tokens, which a split reads after the wait"
ACTIVATIONS = "writes activations only"
_JIT = "kernels/jit/csrc/elementwise"
HARMLESS = {
    "kernels/ops/kvcache/mla_buffer.py": NEW_ROWS,
    **{
        f"{_JIT}/{name}.cuh": NEW_ROWS
        for name in ("kvcache", "rope", "set_mla_kv_buffer", "set_mla_kv_concat_q")
    },
    **{
        f"{_JIT}/{name}.cuh": ACTIVATIONS
        for name in ("activation", "add3", "concat_mla", "fused_eh_norm", "qknorm", "rmsnorm", "rmsnorm_hf")
    },
}


def triggering(root: Path) -> set[str]:
    """Files of PLACES below ``root`` in which a kernel lets others start early."""
    found = set()
    for place in PLACES:
        for path in (root / place).rglob("*"):
            if path.suffix in (".py", ".cu", ".cuh", ".h") and TRIGGER.search(
                path.read_text(errors="replace")
            ):
                found.add(path.relative_to(root).as_posix())
    return found


def test_no_other_writer_lets_a_split_start_early() -> None:
    assert triggering(ROOT) <= set(HARMLESS), "read how it writes, then add it here or make the split wait"


def test_the_write_of_new_rows_triggers_behind_its_stores() -> None:
    text = (ROOT / "kernels/ops/kvcache/mla_buffer.py").read_text()
    kernels = [k for k in text.split("@triton.jit")[1:] if TRIGGER.search(k)]
    assert kernels
    for kernel in kernels:
        wait, trigger = kernel.index("gdc_wait"), kernel.index("gdc_launch_dependents")
        assert wait < kernel.index("tl.load") and kernel.rindex("tl.store") < trigger


def test_control_a_new_early_writer_is_seen(tmp_path: Path) -> None:
    place = tmp_path / PLACES[0]
    place.mkdir(parents=True)
    (place / "move.py").write_text("tl.extra.cuda.gdc_launch_dependents()\n")
    assert triggering(tmp_path) == {"kernels/ops/kvcache/move.py"}


@pytest.mark.parametrize("place", ["kernels/ops/kvcache", "srt/mem_cache", "srt/speculative"])
def test_the_places_are_still_there(place: str) -> None:
    assert (ROOT / place).is_dir()
