"""The service's settings: one TOML file, every key with a default, unknown keys refused.

Each key is declared once, with its rule and what it means; those of ``engine`` are the planner's own
(:mod:`edge_dflash.runner.settings`). ``deploy/config.toml`` is :func:`written` from here.
"""

from __future__ import annotations

import ipaddress
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

from edge_dflash.backends.selftest import Mode
from edge_dflash.common.files import read_text
from edge_dflash.common.nested import Object, as_json
from edge_dflash.common.rules import FLAG, TEXT, FieldError, Rule, number, one_of, such, whole
from edge_dflash.errors import ConfigError
from edge_dflash.runner.settings import OpenSettings, setting

MIB = 1 << 20
_ENDLESS = 2**53  # of numbers: what a float holds exactly
_OF_SERVICE = ("record", "check_hashes", "self_test")  # settings of a planner that stand under ``service``


def same(name: str) -> Any:
    """A key that is the planner's own setting of that name."""
    one = OpenSettings.__dataclass_fields__[name]
    return field(default=one.default, metadata=one.metadata)


def text(default: str, doc: str) -> Any:
    """A key that is a text; none holds a NUL."""
    return setting(default, such(lambda value: "\0" not in TEXT.take(value), "a text without NUL (U+0000)"), doc)


def count(default: int, doc: str, low: int = 0) -> Any:
    """A key that is a whole number."""
    return setting(default, whole(low, _ENDLESS).saying(f"a whole number of at least {low}"), doc)


def seconds(default: float, doc: str, *, zero: bool = False) -> Any:
    """A key that is a time; ``zero``: none at all is one."""
    rule = number(0 if zero else 1e-9, _ENDLESS)
    return setting(default, rule.saying("a number of at least 0" if zero else "seconds above 0"), doc)


@dataclass(frozen=True)
class ServiceConfig:
    """What is served, and where."""

    bundle: str = text("/opt/edge-dflash/current/bundle", "Directory of the bundle that is served.")
    model: str = text("", 'Name of the model in the API. "": the name of the bundle\'s directory.')
    socket: str = text(
        "/run/edge-dflash/edge-dflash.sock", 'Unix socket; whoever may open it may use the service. "": none.'
    )
    socket_mode: str = text(
        "0660", "Who may open it, octal: 0660 is the service's user and group, 0600 its user alone."
    )
    tcp: str = text(
        "",
        'HOST:PORT to listen on beside the socket, such as "127.0.0.1:8080". "": no TCP. Without api_key_file, '
        "loopback only.",
    )
    api_key_file: str = text(
        "",
        'File whose content is the key that TCP callers send as "Authorization: Bearer KEY", or lines of NAME KEY. '
        'Only its owner (and group) may be able to read it. "": no key. Callers of the Unix socket need none.',
    )
    state_dir: str = text(
        "/var/lib/edge-dflash/state",
        "Where sessions are saved, by one server at a time. The service writes nowhere else.",
    )
    record: bool = setting(
        False,
        FLAG,
        "Append prompts and answers to answers.jsonl in state_dir, to train a drafter on: only the service's user can "
        "read it, and who asked is not in it. docs/service.md says more.",
    )
    record_mib: int = count(64, "MiB of that file and the one before it together, at most: the oldest answers go.", 1)
    log: str = setting(
        "requests",
        one_of("requests", "errors", "none"),
        'Lines of the log: one for each of the "requests" (who, what, status, tokens, seconds; never what was said), '
        'for those that are refused or fail ("errors"), or "none". Calls of /health, /ready and /metrics have one when '
        "they are refused.",
    )
    self_test: Mode = same("self_test")
    check_hashes: bool = same("check_hashes")


@dataclass(frozen=True)
class LimitConfig:
    """What a client may ask for. 0: no limit of the service's own."""

    body_bytes: int = count(
        MIB, "Bytes of a request's body. Frames of 800 x 600 as data URLs are about 0.15 MB as JPEG, 1 MB as PNG.", 1024
    )
    header_bytes: int = count(16384, "Bytes of a request's line and headers.", 1024)
    connections: int = count(
        64, "Connections at a time, of the Unix socket and of TCP each; three quarters of one user or address.", 1
    )
    json_depth: int = count(64, "Levels of nesting in a request's JSON.", 4)
    schema_bytes: int = count(65536, "Bytes of a schema, regex or grammar. 0: no limit but that of the body.")
    prompt_chars: int = count(
        0, "Characters of all texts of a request. 0: no limit but that of the body and the model's context."
    )
    new_tokens: int = count(
        0, "Tokens of an answer; also what holds for requests without max_tokens. 0: what the context holds."
    )
    sessions: int = count(
        16, "Sessions of one owner that are open at a time; beyond, the one used longest ago is saved and closed.", 1
    )
    saved_sessions: int = count(64, "Sessions of one owner that may lie in state_dir. 0: none is ever written.")


@dataclass(frozen=True)
class TimeoutConfig:
    """Seconds."""

    header: float = seconds(10.0, "Seconds from the connection to the end of the headers.")
    body: float = seconds(20.0, "Seconds from the headers to the end of the body.")
    idle: float = seconds(30.0, "Seconds between two requests of a connection.")
    write: float = seconds(20.0, "Seconds for a client to take a piece of its answer.")
    deadline: float = seconds(0.0, "Deadline of requests that name none, in seconds. 0: none.", zero=True)
    drain: float = seconds(
        20.0,
        "Seconds that the running request gets to end when the service is stopped; then it ends at its next commit.",
    )
    stall: float = seconds(
        60.0, "Seconds without a step of a running request until /health says that the engine hangs."
    )


@dataclass(frozen=True)
class SessionConfig:
    """Conversations that the service keeps."""

    save: str = setting(
        "shutdown",
        one_of("turn", "shutdown", "never"),
        'When sessions are saved: after every "turn", at "shutdown", or "never" but when a client asks.',
    )


@dataclass(frozen=True)
class DefaultConfig:
    """What holds where a request says nothing."""

    temperature: float = setting(
        0.0,
        number(0, _ENDLESS),
        "Temperature of requests that name none. 0 takes the best token each time; OpenAI's own default is 1.",
    )
    thinking: bool = setting(False, FLAG, "Whether the chat template asks for thinking when a request does not say.")
    draft_confidence: float = setting(
        0.0,
        number(0, 1),
        "Drafts from the first on that a drafter with a confidence head is less sure of are not verified, 0 to 1; 0: "
        "all are.",
    )


@dataclass(frozen=True)
class ServeConfig:
    """All settings. Raises ConfigError for a value outside its range, and for values that contradict each other."""

    service: ServiceConfig = field(default_factory=ServiceConfig)
    engine: OpenSettings = field(default_factory=OpenSettings)
    limits: LimitConfig = field(default_factory=LimitConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    defaults: DefaultConfig = field(default_factory=DefaultConfig)

    def __post_init__(self) -> None:
        """Check each value by its rule, wherever it is from; refuse what does not go together."""
        for section in ("service", "limits", "timeouts", "sessions", "defaults"):  # settings of engine check themselves
            part = getattr(self, section)
            for one in fields(part):
                try:
                    one.metadata["rule"].read(getattr(part, one.name), f"{section}.{one.name}")
                except FieldError as error:
                    raise ConfigError(str(error)) from None
        if not self.service.socket and not self.service.tcp:
            raise ConfigError('service.socket and service.tcp are both ""; give one of them')
        if self.service.tcp and not is_loopback(self.tcp_address[0]) and not self.service.api_key_file:
            raise ConfigError(
                f"service.tcp is {self.service.tcp!r}, which others can reach, and there is no api_key_file; "
                "give one, or a loopback address such as 127.0.0.1:8080"
            )
        _ = self.socket_mode

    @property
    def tcp_address(self) -> tuple[str, int]:
        """Host and port of ``service.tcp``; port 0 takes a free one."""
        host, colon, port = self.service.tcp.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"service.tcp is {self.service.tcp!r}; give HOST:PORT such as 127.0.0.1:8080")
        return host, int(port)

    @property
    def socket_mode(self) -> int:
        """``service.socket_mode`` as a number; others than owner and group are never let in."""
        given = self.service.socket_mode
        try:
            mode = int(given, 8)
        except ValueError:
            mode = -1
        if not 0o600 <= mode <= 0o660 or mode & 0o117:
            raise ConfigError(f"service.socket_mode is {given!r}; give 0600 or 0660")
        return mode

    @property
    def model(self) -> str:
        """The model's name in the API."""
        return self.service.model or Path(self.service.bundle).resolve().name


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# TOML -----------------------------------------------------------------------------------------------------------------


class TomlKey(NamedTuple):
    """A key of the file, and what it sets."""

    name: str
    field: str
    rule: Rule
    default: Any
    doc: str


def keys_of(section: type[Any]) -> Iterator[TomlKey]:
    """The keys of a section: its fields, in the file's names and units."""
    for one in fields(section):
        if section is OpenSettings and one.name in _OF_SERVICE:
            continue
        rule, doc, toml = one.metadata["rule"], one.metadata["doc"], one.metadata["toml"]
        unit, (none, meant) = toml.get("unit", 1), toml.get("none", (None, ""))

        def take(value: Any, rule: Rule = rule, unit: int = unit, none: int | None = none) -> Any:
            if type(value) is not int:
                return rule.take(value)
            return None if value == none else rule.take(value * unit)

        default = none if one.default is None else one.default // unit if unit > 1 else one.default
        wanted = as_json(rule).wanted + ("" if none is None else f", or {none}")
        doc += "" if none is None else f" {none}: {meant}."
        yield TomlKey(toml.get("key", one.name), one.name, Rule(take, wanted), default, doc)


SECTIONS: Mapping[str, type[Any]] = {one.name: cast(type[Any], one.default_factory) for one in fields(ServeConfig)}


def load_config(path: Path | str) -> ServeConfig:
    """Read a configuration file. Raises ConfigError when it is unreadable, has an unknown key or a bad value."""
    try:
        table = tomllib.loads(read_text(Path(path)))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a configuration") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {' '.join(str(error).split())}; correct it") from None
    return from_table(table, str(path))


def from_table(table: dict[str, Any], where: str = "the configuration") -> ServeConfig:
    """The configuration that a parsed file means."""
    made: dict[str, Any] = {}
    for name, given in table.items():
        if name not in SECTIONS or not isinstance(given, dict):
            raise ConfigError(f"{where}: {name!r} is no section; sections are {', '.join(SECTIONS)}")
        keys = {one.name: one for one in keys_of(SECTIONS[name])}
        try:
            found = Object({key: one.rule for key, one in keys.items()}).read(given, name)
        except FieldError as error:
            raise ConfigError(f"{where}: {error}") from None
        made[name] = SECTIONS[name](**{keys[key].field: value for key, value in found.items()})
    return ServeConfig(**made)


def written() -> str:
    """The file that documents every key at its default."""
    lines = [
        "# Settings of `edge-dflash serve`, every key at its default. Unknown keys are refused, and so are bad values.",
        "# A file needs only the keys that differ.",
    ]
    for name, section in SECTIONS.items():
        lines += ["", f"[{name}]"]
        for one in keys_of(section):
            lines += textwrap.wrap(one.doc, 118, initial_indent="# ", subsequent_indent="# ")
            value = str(one.default).lower() if isinstance(one.default, bool) else repr(one.default)
            lines.append(f"{one.name} = {value.replace(chr(39), chr(34))}")
    return "\n".join(lines) + "\n"
