"""Number formats of codes: from bytes to values and back.

Values of 8 and 4 bits are widened through bits of 16-bit floats, which torch converts many times
faster than its own 8-bit floats. The bits are computed by numpy, whose arithmetic of integers takes
half of torch's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distckpt._base.lazy import torch
from distckpt._base.memory import Bytes, bounce_buffer

Bits = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Number:
    """A number format.

    Attributes:
        per_byte: codes in a byte; the first of two is in the lower half.
        largest: the largest value; scales are chosen so that the largest value of a block becomes
            this one.
        factor: factor of unpacked values.
        dtype: safetensors name of the dtype of unpacked values.
        unpack: function that fills bits of shape (..., n * per_byte) with values from bytes of
            shape (..., n), which it may overwrite.
    """

    per_byte: int
    largest: float
    factor: float
    dtype: str
    unpack: Callable[[Bytes, Bits], None]


def scratch(purpose: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in scratch memory of this thread.

    New memory costs more than the arithmetic.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(bounce_buffer(purpose, num_bytes)).view(dtype).view(shape)


def _unpack_e4m3(codes: Bytes, bits: Bits) -> None:
    # The sign and the other 7 bits, as the high bits of a float16's exponent and fraction: 2^8
    # times too small.
    np.copyto(bits, codes.view(np.int8))
    np.multiply(bits, 1 << 7, out=bits)
    np.bitwise_and(bits, -0x4080, out=bits)
    if codes.size and (codes.max() == 0xFF or codes.view(np.int8).max() == 0x7F):
        bits[codes & 0x7F == 0x7F] = 0x7E00


def _unpack_e2m1(codes: Bytes, bits: Bits) -> None:
    # Each half of a byte as a float16, 2^14 times too small: as the high bits, of which all but the
    # sign move on.
    words = _spread(codes, bits)
    np.right_shift(bits, 3, out=bits)
    np.bitwise_and(words, -0x71FF7200, out=words)


def _unpack_int4(codes: Bytes, bits: Bits) -> None:
    # Each half as the high bits of an integer, 2^12 times too large: the highest, inverted, is the
    # sign.
    words = _spread(np.bitwise_xor(codes, 0x88, out=codes), bits)
    np.bitwise_and(words, -0x0FFF1000, out=words)


def _spread(codes: Bytes, bits: Bits) -> npt.NDArray[np.int32]:
    """Put both halves of each byte at the top of 16 bits.

    Other bits come behind them.
    """
    words = bits.view(np.int32)
    np.copyto(words, codes)
    np.multiply(words, (1 << 12) + (1 << 24), out=words)
    return words


def _unpack_int8(codes: Bytes, bits: Bits) -> None:
    np.copyto(bits, codes.view(np.int8))


NUMBERS: dict[str, Number] = {
    "e4m3": Number(1, 448.0, 256.0, "F16", _unpack_e4m3),
    "int8": Number(1, 127.0, 1.0, "I16", _unpack_int8),
    "e2m1": Number(2, 6.0, 16384.0, "F16", _unpack_e2m1),
    "int4": Number(2, 7.0, 2.0**-12, "I16", _unpack_int4),
}


_POWERS = np.array([*(2.0**exponent for exponent in range(-127, 128)), math.nan], np.float32)


def unpack_exponents(codes: torch.Tensor) -> torch.Tensor:
    """Convert bytes of E8M0 to float32.

    They are powers of two from 2^-127 on; all bits set means NaN.
    """
    powers = torch.from_numpy(_POWERS)
    return powers.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)
