"""What a planner is opened with, each setting declared once: how much it takes on, and how it loads.

Keys of the section ``engine`` of the service's TOML are made of the table; :class:`EngineOptions` and
:class:`OpenOptions` name the keywords for type checkers, which cannot derive them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

from edge_dflash.backends import selftest
from edge_dflash.common import rules
from edge_dflash.common.rules import FLAG, Rule
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.pictures.decode import DEFAULT_LIMITS
from edge_dflash.runner.recording import LEAST, Recording
from edge_dflash.text.images import MOST_IMAGES

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


def _recording(value: Any) -> Recording:
    given = value if isinstance(value, Recording) else Recording(Path(rules.PATH.take(value)))
    path = Path(rules.PATH.take(given.path))
    if not path.name or path.is_dir() or not path.parent.is_dir():
        raise ValueError
    return Recording(path.absolute(), rules.whole(LEAST).take(given.limit))


def setting(default: Any, rule: Rule, doc: str, **toml: Any) -> Any:
    """A setting. ``toml``: its ``key`` and ``unit`` there, if others; how ``none`` is said, and what it means."""
    return field(default=default, metadata={"rule": rule, "doc": doc, "toml": toml})


_RECORD = "give the path of a file in a directory that is there, a Recording of one"


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a planner around a loaded backend. Raises RequestError for values of another type or range."""

    prompt_share: float = setting(
        0.5,
        rules.number(0.01, 1),
        "Of the time, 0.01 to 1: what the prompts of some requests have while others decode.",
    )
    queue: int = setting(
        16,
        rules.whole(1),
        "Requests that may wait, half of them of one caller; more are answered with 429 and Retry-After.",
    )
    prefix_bytes: int = setting(
        512 << 20, rules.whole(0), "Most memory for states of system prompts that are kept for the next request.",
        key="prefix_mib", unit=1 << 20,
    )  # fmt: skip
    fallback: bool = setting(
        True, FLAG, "Verify as many drafts a cycle as were measured to give most tokens a second, none where drafting "
        "costs more than it gives; the output is the same. Without it, all.",
    )  # fmt: skip
    drafts: int | None = setting(
        None,
        rules.whole(0).or_none(),
        "Drafts that a cycle verifies, whatever was measured; 0 decodes plainly.",
        none=(-1, "as many as were measured to give most tokens a second"),
    )
    images: int = setting(MOST_IMAGES, rules.whole(0), "Images of a request that sees. 0: none are taken.")
    image_pixels: int = setting(
        DEFAULT_LIMITS.pixels, rules.whole(1),
        "Pixels of the images of a request together, before they are resized to what the model reads.",
    )  # fmt: skip
    record: Recording | Path | str | None = setting(
        None,
        Rule(_recording, _RECORD).or_none(),
        "File to which finished answers are appended; none: nothing is written.",
    )

    def __post_init__(self) -> None:
        """Take each value by its rule."""
        known = {one.name: one.metadata["rule"] for one in fields(self)}
        for name, value in rules.checked(known, {name: getattr(self, name) for name in known}).items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls: type[S], given: Mapping[str, Any]) -> S:
        """Settings by name. Raises RequestError also for a name that is unknown."""
        rules.refuse_unknown({one.name: one.metadata["rule"] for one in fields(cls)}, given)
        return cls(**given)


@dataclass(frozen=True)
class OpenSettings(EngineSettings):
    """Settings of ``Planner.open``."""

    lanes: int | None = setting(
        None,
        rules.whole(1, MOST_LANES).or_none(),
        f"Requests that run at a time, 1 to {MOST_LANES}, each with the tokens that it has alone.",
        none=(0, "as many as the bundle was built for"),
    )
    drafter: bool = setting(
        True, FLAG, "False loads the target alone, without the bundle's drafter: plain decoding in less memory."
    )
    check_hashes: bool = setting(
        True, FLAG, "Compare all files of the bundle with their hashes before they are loaded."
    )
    self_test: selftest.Mode = setting(
        "refuse", rules.one_of(*selftest.MODES),
        'What follows when the loaded pair does not repeat what its build recorded: "refuse" to start, "warn", or '
        '"off" to skip the test.',
    )  # fmt: skip

    @property
    def options(self) -> OpenOptions:
        """The keywords that give them."""
        return cast(OpenOptions, {**vars(self)})

    @property
    def engine(self) -> EngineOptions:
        """Those of the planner around the loaded backend."""
        return cast(EngineOptions, {one.name: getattr(self, one.name) for one in fields(EngineSettings)})
