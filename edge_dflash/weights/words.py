"""Where an NVFP4 word of 32 bits holds its eight codes, four pairs along K, for the kernels of an architecture.

``shared`` is for masks and shifts: each pair comes out as two BF16 values times 2^-126, sign at 15 and magnitude at
8..6 of its half, by :func:`bf16_pairs`. Some bits of a word serve two pairs, so that four masks, one rotation and
three shifts suffice; a word follows from its codes by exclusive or. ``bytes`` is for architectures that convert a byte
of two codes in one instruction: byte i holds pair i, the even code in its low bits. ``halves`` is in older bundles.

Pure: arrays in, arrays out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from edge_dflash.board.archs import supports

Words = Literal["shared", "bytes", "halves"]
Array32 = npt.NDArray[np.uint32]

_MASK = np.uint32(0x81C081C0)  # a pair's signs and magnitudes


def words_of(sm: int) -> Words:
    """How the kernels for compute capability ``sm`` read NVFP4 words (kernels/decode.cuh)."""
    return "bytes" if supports(sm, "e2m1") else "shared"


def bf16_pairs(words: Array32, order: Words = "shared") -> tuple[Array32, ...]:
    """The four BF16 pairs of each word, as kernels/decode.cuh makes them; the even code in the low half."""
    two, six = np.uint32(2), np.uint32(6)
    if order == "halves":
        last = words << two & np.uint32(0x80C080C0) | words >> six & np.uint32(0x01000100)
        return words & _MASK, words << six & _MASK, _rotated(words, 4) & _MASK, last
    rotated = _rotated(words, 6)
    return (words ^ words << two) & _MASK, words << six & _MASK, (words ^ rotated << two) & _MASK, rotated & _MASK


def _rotated(words: Array32, count: int) -> Array32:
    return words >> np.uint32(count) | words << np.uint32(32 - count)


def to_words(packed: Array32, order: Words) -> Array32:
    """Words of four bytes of packed codes each."""
    if order == "bytes":
        return packed
    return _looked_up(packed, *_tables(order)[0])


def to_packed(words: Array32, order: Words) -> Array32:
    """Undo :func:`to_words`."""
    if order == "bytes":
        return words
    return _looked_up(words, *_tables(order)[1])


def _looked_up(values: Array32, low: Array32, high: Array32) -> Array32:
    found: Array32 = low[values & 0xFFFF]
    found ^= high[values >> 16]
    return found


@cache
def _tables(order: Words) -> tuple[tuple[Array32, Array32], ...]:
    """Words of the lower and of the upper two bytes of packed codes; packed codes of a word's two halves."""
    images = []
    for bit in range(32):
        pairs = bf16_pairs(np.array([1 << bit], np.uint32), order)
        codes = [pair >> 6 & 7 | pair >> 12 & 8 | pair >> 18 & 0x70 | pair >> 24 & 0x80 for pair in pairs]
        images.append(sum(int(code[0]) << 8 * i for i, code in enumerate(codes)))
    return tuple((_sums(bits[:16]), _sums(bits[16:])) for bits in (_inverse(images), images))


def _sums(bits: Sequence[int]) -> Array32:
    """For each number the exclusive or of what its bits stand for."""
    table = np.zeros(1, np.uint32)
    for value in bits:
        table = np.concatenate((table, table ^ np.uint32(value)))
    return table


def _inverse(images: Sequence[int]) -> list[int]:
    """``images``: what each bit gives. For each bit that is wanted, the word that gives this one alone."""
    rows = [(image, 1 << bit) for bit, image in enumerate(images)]
    for bit in range(len(rows)):
        at = next(i for i in range(bit, len(rows)) if rows[i][0] >> bit & 1)
        rows[bit], rows[at] = rows[at], rows[bit]
        image, word = rows[bit]
        rows = [(a ^ image, b ^ word) if i != bit and a >> bit & 1 else (a, b) for i, (a, b) in enumerate(rows)]
    return [word for _, word in rows]
