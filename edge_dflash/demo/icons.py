"""Small bitmaps of pictured scenes: letters of 3 x 5 pixels, and an outline of 12 x 12 pixels for each noun."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

LETTER_STEP = 4  # pixels from one letter to the next

# Each letter as five rows from the top, a row as an octal digit: 4 is its left pixel, 1 its right one.
_LETTERS = dict(
    zip(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        (
            *("25755", "65656", "34443", "65556", "74647", "74644", "34553", "55755", "72227", "11152", "55655"),
            *("44447", "57755", "65555", "25552", "65644", "25563", "65655", "34216", "72222", "55557", "55552"),
            *("55775", "55255", "55222", "71247"),
        ),
        strict=True,
    )
)

# Each noun as twelve rows from the top, a row as three hexadecimal digits: 800 is its left pixel, 001 its right one.
_NOUNS = {
    "mug": "000 000 7f8 7fc 7fa 7f9 7f9 7fa 7fc 7f8 7f8 3f0",
    "plate": "0f0 3fc 7fe 70e ee7 df7 df7 ee7 70e 7fe 3fc 0f0",
    "bottle": "060 060 060 060 0f0 1f8 3fc 3fc 3fc 3fc 3fc 3fc",
    "can": "000 1f8 3fc 204 3fc 3fc 3fc 3fc 3fc 204 3fc 1f8",
    "book": "000 000 79e ffb bfd bfd bfd bfd bfd ffb 79e 000",
    "hammer": "000 ff8 ffe ff8 060 060 060 060 060 060 060 060",
    "wrench": "c30 c30 e70 7e0 3c0 1c0 0e0 070 038 01c 00e 006",
    "lamp": "0f0 1f8 1f8 3fc 3fc 7fe 060 060 060 060 1f8 3fc",
    "clock": "0f0 3fc 71e 6f6 ef7 ef7 e17 fff 7fe 7fe 3fc 0f0",
    "phone": "1f8 108 108 108 108 108 108 108 1f8 198 198 1f8",
    "ball": "000 0f0 3fc 3fc 7fe 7fe 7fe 7fe 3fc 3fc 0f0 000",
    "vase": "3fc 1f8 0f0 0f0 1f8 3fc 7fe 7fe 7fe 3fc 1f8 1f8",
    "kettle": "0f0 108 204 0f0 1f9 3fb 7fe 7fe 7fc 7fc 7fc 3f8",
    "helmet": "000 0f0 3fc 7fe 7fe fff fff f01 e00 e00 000 000",
    "radio": "001 002 004 008 fff fff 8e5 8e7 8e5 fff fff 000",
    "flask": "1f8 090 090 090 090 108 108 204 3fc 7fe 7fe 3fc",
}

NOUNS = tuple(_NOUNS)  # that can be drawn
ICON = 12  # pixels a side


@cache
def icon(noun: str) -> Mask:
    """The pixels of a noun [12, 12]. KeyError for one that cannot be drawn."""
    rows = [int(row, 16) for row in _NOUNS[noun].split()]
    return np.array([[bool(row >> (ICON - 1 - x) & 1) for x in range(ICON)] for row in rows])


@cache
def word(text: str) -> Mask:
    """The pixels of a word of Latin letters, [5, 4 a letter]. KeyError for another character."""
    mask = np.zeros((5, LETTER_STEP * len(text)), dtype=np.bool_)
    for index, letter in enumerate(text.upper()):
        for y, digit in enumerate(_LETTERS[letter]):
            for x in range(3):
                mask[y, index * LETTER_STEP + x] = bool(int(digit) >> (2 - x) & 1)
    return mask
