"""Where the kernels want the bits of NVFP4 codes, and block scales with another exponent. Knows no layout of matrices.

An NVFP4 word holds the eight codes of four pairs; a pair's even code lies in the low half, its odd code in the high
half. Where pair i's sign and magnitude bits (s, e1 e0 m) lie in a half, chosen so that one mask after at most one
shift gives a BF16 pair (sign at 15, magnitude at 8..6)::

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    pair 0   s                    e1 e0  m
    pair 1                     s                    e1 e0  m      (shifted left by 6)
    pair 2           e1 e0  m                    s'               (rotated right by 4; s' is the other half's sign)
    pair 3     e1  s                       e0  m                  (left by 2, and e1 right by 6)

A block scale byte is E4M3 re-encoded with 5 exponent bits (value = 2^(e-10) (1 + m/8), never subnormal); a block of
scale zero keeps no codes: it is zero.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Bit positions (s, e1, e0, m) of pair i in its half; the sign of pair 2 lies in the other half.
_PLACES = ((15, 8, 7, 6), (9, 2, 1, 0), (3, 12, 11, 10), (13, 14, 5, 4))


def word_bits(pair: int, odd: int) -> tuple[int, ...]:
    """Positions in the word of (s, e1, e0, m) of the even or odd code of a pair."""
    sign, *magnitude = _PLACES[pair]
    crossed = odd ^ (pair == 2)
    return (sign + 16 * crossed, *(place + 16 * odd for place in magnitude))


def _table() -> npt.NDArray[np.uint32]:
    """[4 pairs, 256]: bits of a word that a packed byte (even code low) gives as pair i."""
    byte = np.arange(256, dtype=np.uint32)
    table = np.zeros((4, 256), np.uint32)
    for pair in range(4):
        for odd in (0, 1):
            for bit, place in zip((3, 2, 1, 0), word_bits(pair, odd), strict=True):
                table[pair] |= (byte >> (4 * odd + bit) & 1) << np.uint32(place)
    return table


def _scale_codes() -> tuple[Bytes, Bytes]:
    """E4M3 byte 0..0x7E -> 5-bit-exponent byte, and back (0 stands for zero in both)."""
    value = np.arange(1, 0x7F)
    exponent, mantissa = value >> 3, value & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    fraction, power = np.frexp(size)  # size = fraction * 2^power, fraction in [0.5, 1)
    code = ((power + 9) << 3) + np.round((2 * fraction - 1) * 8).astype(np.int64)
    forward, back = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    forward[value], back[code] = code, value
    return forward, back


WORD_BITS = _table()
SCALE_CODE, E4M3_CODE = _scale_codes()
