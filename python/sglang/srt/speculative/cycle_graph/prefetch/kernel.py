# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A kernel that asks for a range of memory and ends, without waiting for a byte of it.

Source of the method: PTX ISA, ``cp.async.bulk.prefetch.L2``, sm_90 and later. A hint: the cache may drop it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Bytes that one lane asks for, lanes of a program. The instruction takes multiples of UNIT at addresses of that alignment.
CHUNK, LANES, UNIT = 8192, 32, 16
# Whole chunks keep the offsets in 32 bits.
MOST_BYTES = 1 << 30


@triton.jit
def chunk_of(program, lane, total, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """Offset and size in bytes of a lane's chunk; a size of 0 or less: nothing is left for it."""
    start = (program * LANES + lane) * CHUNK
    return start, tl.minimum(total - start, CHUNK)


@triton.jit
def prefetch_kernel(memory, total, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """Asks for ``memory[0:total]`` (bytes); one warp a program, one chunk a lane."""
    start, size = chunk_of(tl.program_id(0), tl.arange(0, LANES), total, CHUNK, LANES)
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.gt.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, $2;
        }""",
        "=r,l,r",
        [memory.to(tl.int64) + start, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def programs(size: int) -> int:
    """Programs that cover ``size`` bytes."""
    return -(-size // (CHUNK * LANES))


def check(memory: torch.Tensor) -> None:
    """Refuse what the instruction does not take.

    Raises:
        ValueError: not dense bytes in whole, aligned units, or too many of them.
    """
    size = memory.numel()
    if memory.dtype != torch.uint8 or not memory.is_contiguous() or not 0 < size <= MOST_BYTES:
        raise ValueError(
            f"{tuple(memory.shape)} {memory.dtype}: at most {MOST_BYTES} dense bytes are asked for"
        )
    if size % UNIT or memory.data_ptr() % UNIT:
        raise ValueError(f"{size} bytes at {memory.data_ptr()}: whole units of {UNIT} bytes only")


def prefetch(memory: torch.Tensor) -> None:
    """Ask for ``memory`` (uint8, dense, on the GPU) on the current stream.

    Raises:
        ValueError: see ``check``.
    """
    check(memory)
    prefetch_kernel[(programs(memory.numel()),)](
        memory, memory.numel(), CHUNK=CHUNK, LANES=LANES, num_warps=1, num_stages=1
    )


def unsupported(device: torch.device) -> str:
    """Why a device does not have the instruction; empty where it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "not an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "the GPU has no bulk prefetch (sm_90 and later)"
    return ""
