"""The name that an unknown one is a slip of, or that another API has for it.

A name is called a slip only of one that it can be a slip of. Another key of another framework is no slip, however
alike the two are spelled: who follows such advice gets another model, or another answer. So one letter may be wrong,
missing or too many, or two may have changed places, in one word of four letters or more; never its first letter, and
never a digit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_LEAST = 4  # letters of a word in which a slip is one: top_k, top_p and min_p are three settings


def slip_of(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is a slip of; None: none, or several."""
    found = [one for one in known if _is_slip(name, one)]
    return found[0] if len(found) == 1 else None


def _is_slip(name: str, known: str) -> bool:
    ours, theirs = _words(name), _words(known)
    if "".join(ours) == "".join(theirs):  # capitals, underscores
        return len(known) >= _LEAST
    differ = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
    if len(ours) != len(theirs) or len(differ) != 1:
        return False
    return len(differ[0][1]) >= _LEAST and _one_letter(*differ[0])


def _words(name: str) -> list[str]:
    """Words between underscores and hyphens, and from capital to capital."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower().split("_")


def _one_letter(first: str, second: str) -> bool:
    """Whether two words differ by one letter behind the first, or by two neighbours that changed places."""
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    ours, theirs = first[at:], second[at:]
    if any(letter.isdigit() for letter in ours[:2] + theirs[:2]):
        return False
    swapped = ours[:2] == theirs[1::-1] and ours[2:] == theirs[2:]
    return swapped or (at > 0 and theirs[1:] in (ours, ours[1:])) or (at > 0 and theirs == ours[1:])


SAME: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "top_logprobs": "logprobs",
    "enable_thinking": "thinking",
    "guided_json": "schema",
    "guided_regex": "regex",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "num_speculative_tokens": "drafts",
}
"""Names of other APIs for settings of ours that mean the same."""
