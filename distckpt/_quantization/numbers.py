"""Number formats of codes: from bytes to values and back.

Values of 8 and 4 bits are widened through bits of 16-bit floats, which torch converts many times faster than its own
8-bit floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from distckpt._base.memory import bounce_buffer


class Number(NamedTuple):
    """A number format.

    Attributes:
        per_byte: codes in a byte; the first of two is in the lower half.
        largest: the largest value; scales are chosen so that the largest value of a block becomes this one.
        factor: what unpacked values must be multiplied with.
        unpack: bytes of shape (..., n) to float32 of shape (..., n * per_byte), in scratch memory of this thread.
        pack: float32 values, within the range, to bytes.
    """

    per_byte: int
    largest: float
    factor: float
    unpack: Callable[[torch.Tensor], torch.Tensor]
    pack: Callable[[torch.Tensor], torch.Tensor]


def scratch(purpose: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in scratch memory of this thread: new memory costs more than the arithmetic."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(bounce_buffer(purpose, num_bytes)).view(dtype).view(shape)


def _widened(bits: torch.Tensor) -> torch.Tensor:
    return scratch("values", bits.shape, torch.float32).copy_(bits)


def _unpack_e4m3(codes: torch.Tensor) -> torch.Tensor:
    # The sign and the other 7 bits, as the high bits of a float16's exponent and fraction: 2^8 times too small.
    bits = scratch("bits", codes.shape, torch.int16).copy_(codes.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(-0x4080)
    values = _widened(bits.view(torch.float16))
    magnitudes = torch.bitwise_and(codes, 0x7F, out=scratch("bits", codes.shape, torch.uint8))
    if codes.numel() and magnitudes.max() == 0x7F:
        values[magnitudes == 0x7F] = torch.nan
    return values


def _unpack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    # Both halves of a byte become a float16 each, 2^14 times too small: two shifts at a time, as one multiplication.
    signs = scratch("words", codes.shape, torch.int32).copy_(codes)
    bits = torch.mul(signs, (1 << 9) + (1 << 21), out=scratch("bits", codes.shape, torch.int32))
    bits.bitwise_and_(0x0E000E00)
    bits.bitwise_or_(signs.mul_((1 << 12) + (1 << 24)).bitwise_and_(-0x7FFF8000))
    return _widened(bits.view(torch.float16))


def _unpack_int4(codes: torch.Tensor) -> torch.Tensor:
    bits = scratch("bits", codes.shape, torch.int32).copy_(codes)
    bits.mul_((1 << 12) + 1).bitwise_and_(0x000F000F)
    return _widened(bits.view(torch.int16).sub_(8))


def _unpack_int8(codes: torch.Tensor) -> torch.Tensor:
    return _widened(codes.view(torch.int8))


def _pack_halves(nibbles: torch.Tensor) -> torch.Tensor:
    codes = nibbles.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    # The middle between neighbours goes to the even code: the one below for every second, just above it for others.
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(3))
    return _pack_halves(torch.bucketize(values.abs(), middles) + 8 * values.signbit())


NUMBERS: dict[str, Number] = {
    "e4m3": Number(1, 448.0, 256.0, _unpack_e4m3, lambda values: values.to(torch.float8_e4m3fn).view(torch.uint8)),
    "int8": Number(1, 127.0, 1.0, _unpack_int8, lambda values: values.round().to(torch.int8).view(torch.uint8)),
    "e2m1": Number(2, 6.0, 16384.0, _unpack_e2m1, _pack_e2m1),
    "int4": Number(2, 7.0, 1.0, _unpack_int4, lambda values: _pack_halves(values.round() + 8)),
}


def unpack_exponents(codes: torch.Tensor) -> torch.Tensor:
    """Convert bytes of E8M0, powers of two from 2^-127 on, to float32."""
    bits = codes.view(torch.uint8).to(torch.int32) << 23
    # The smallest one is no normal number of float32; all bits set means NaN.
    return torch.where(bits == 0, 1 << 22, torch.where(bits == 255 << 23, 0x7FC00000, bits)).view(torch.float32)


def pack_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Convert exponents of two to bytes of E8M0."""
    return (exponents + 127).clamp_(0, 254).to(torch.uint8)
