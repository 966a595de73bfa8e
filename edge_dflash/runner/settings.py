"""What a planner is opened with, each setting checked by a rule: how much it takes on, and how it loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from edge_dflash.backends import selftest
from edge_dflash.common import rules
from edge_dflash.common.rules import Rule
from edge_dflash.decode.backend import MOST_LANES
from edge_dflash.pictures.decode import DEFAULT_LIMITS
from edge_dflash.runner.looking import MOST_IMAGES
from edge_dflash.runner.recording import LEAST, Recording

S = TypeVar("S", bound="EngineSettings")


class EngineOptions(TypedDict, total=False):
    """Keywords of a planner around a loaded backend; :class:`EngineSettings` says what they mean."""

    queue: int
    prefix_bytes: int
    fallback: bool
    drafts: int | None
    prompt_share: float
    images: int
    image_pixels: int
    record: Recording | Path | str | None


class OpenOptions(EngineOptions, total=False):
    """Keywords of ``Planner.open``; :class:`OpenSettings` says what they mean."""

    lanes: int | None
    drafter: bool
    check_hashes: bool
    self_test: selftest.Mode


def _recording(value: Any) -> Recording | None:
    if value is None:
        return None
    given = value if isinstance(value, Recording) else Recording(Path(rules.path(value)))
    path = Path(rules.path(given.path))
    if not path.name or path.is_dir() or not path.parent.is_dir():
        raise ValueError
    return Recording(path.absolute(), rules.whole(LEAST)(given.limit))


_FLAG = Rule(rules.flag, "True or False")
_RULES = {
    "queue": Rule(rules.whole(1), "a whole number of requests, at least 1"),
    "prefix_bytes": Rule(rules.whole(0), "a whole number of bytes, at least 0"),
    "drafts": Rule(rules.optional(rules.whole(0)), "a whole number of drafts, at least 0, or None"),
    "images": Rule(rules.whole(0), "a whole number of images, at least 0"),
    "image_pixels": Rule(rules.whole(1), "a whole number of pixels, at least 1"),
    "prompt_share": Rule(rules.number(0.01, 1.0), "a share of the time, 0.01 to 1"),
    "lanes": Rule(
        rules.optional(rules.whole(1, MOST_LANES)), f"a whole number of sequences, 1 to {MOST_LANES}, or None"
    ),
    "self_test": Rule(rules.one_of(*selftest.MODES), f"one of {', '.join(selftest.MODES)}"),
    "record": Rule(_recording, "the path of a file in a directory that is there, a Recording of one, or None"),
    **dict.fromkeys(("fallback", "drafter", "check_hashes"), _FLAG),
}


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a planner around a loaded backend. Raises RequestError for values of another type or range."""

    queue: int = 16  # requests that may wait, half of them of one caller
    prefix_bytes: int = 512 << 20  # of the states of system prompts that are kept for the next request
    fallback: bool = True  # False: cycles verify all drafts (or ``drafts``), whether they are seen to pay or not
    drafts: int | None = None  # most of a cycle, 0: plain decoding; None: as many as give most tokens a second
    prompt_share: float = 0.5  # of the time, for the prompts of some requests while others decode
    images: int = MOST_IMAGES  # of a request
    image_pixels: int = DEFAULT_LIMITS.pixels  # of the images of a request together, before they are resized
    record: Recording | Path | str | None = None  # a file to which finished answers are appended; None: nothing is

    def __post_init__(self) -> None:
        """Take each value by its rule."""
        for name, value in rules.checked(_RULES, {one.name: getattr(self, one.name) for one in fields(self)}).items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls: type[S], given: Mapping[str, Any]) -> S:
        """Settings by name. Raises RequestError also for a name that is unknown."""
        rules.refuse_unknown({one.name: _RULES[one.name] for one in fields(cls)}, given)
        return cls(**given)


@dataclass(frozen=True)
class OpenSettings(EngineSettings):
    """Settings of ``Planner.open``."""

    lanes: int | None = None  # requests that run at a time, each with the tokens that it has alone; None: the bundle's
    drafter: bool = True  # False: the target alone is loaded
    check_hashes: bool = True  # False skips the SHA-256 of the bundle's files
    self_test: selftest.Mode = "refuse"  # or "warn" (RuntimeWarning): a pair that does not repeat the build; or "off"

    @property
    def engine(self) -> EngineOptions:
        """Those of the planner around the loaded backend."""
        given: Any = {one.name: getattr(self, one.name) for one in fields(EngineSettings)}
        kept: EngineOptions = given
        return kept
