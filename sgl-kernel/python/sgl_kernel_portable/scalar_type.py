"""Descriptions of small number formats, for quantisation modules that name them at import time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ScalarType", "scalar_types"]


@dataclass(frozen=True)
class ScalarType:
    """A number format of at most 64 bits.

    Attributes:
        exponent: exponent bits, 0 for integers.
        mantissa: mantissa bits, or magnitude bits of an integer.
        signed: whether there is a sign bit.
        bias: what is added to a value when it is stored.
        finite_only: float formats without infinities.
    """

    exponent: int
    mantissa: int
    signed: bool
    bias: int = 0
    finite_only: bool = False

    @property
    def size_bits(self) -> int:
        """Width in bits, sign included."""
        return self.exponent + self.mantissa + int(self.signed)

    def is_signed(self) -> bool:
        """Whether values can be negative before the bias."""
        return self.signed

    def is_floating_point(self) -> bool:
        """Whether there is an exponent."""
        return self.exponent > 0

    def is_integer(self) -> bool:
        """Whether there is no exponent."""
        return self.exponent == 0

    def has_bias(self) -> bool:
        """Whether stored values are shifted."""
        return self.bias != 0

    @property
    def id(self) -> int:
        """A number that tells formats apart within this process; it is not the compiled package's."""
        return hash(self) & 0x7FFF_FFFF_FFFF_FFFF


def _integer(bits: int, *, signed: bool, bias: int = 0) -> ScalarType:
    return ScalarType(0, bits - int(signed), signed, bias)


class _ScalarTypes:
    """The formats by their usual names."""

    int4 = _integer(4, signed=True)
    uint4 = _integer(4, signed=False)
    int8 = _integer(8, signed=True)
    uint8 = _integer(8, signed=False)
    uint2b2 = _integer(2, signed=False, bias=2)
    uint3b4 = _integer(3, signed=False, bias=4)
    uint4b8 = _integer(4, signed=False, bias=8)
    uint8b128 = _integer(8, signed=False, bias=128)
    float8_e4m3fn = ScalarType(4, 3, True, finite_only=True)
    float8_e5m2 = ScalarType(5, 2, True)
    float8_e8m0fnu = ScalarType(8, 0, False, finite_only=True)
    float16_e8m7 = ScalarType(8, 7, True)
    float16_e5m10 = ScalarType(5, 10, True)
    float6_e3m2f = ScalarType(3, 2, True, finite_only=True)
    float4_e2m1f = ScalarType(2, 1, True, finite_only=True)
    bfloat16 = float16_e8m7
    float16 = float16_e5m10

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"scalar_types has no format {name!r} in the portable sgl_kernel")


scalar_types = _ScalarTypes()
