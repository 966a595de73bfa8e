"""The service's settings: one TOML file, every key with a default, unknown keys refused.

``deploy/config.toml`` documents each key at its default; a test compares the two.
"""

from __future__ import annotations

import ipaddress
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from edge_dflash.backends.selftest import MODES
from edge_dflash.common.files import read_text
from edge_dflash.decode.backend import MOST_LANES
from edge_dflash.errors import ConfigError, short

SAVES = ("turn", "shutdown", "never")
LOGS = ("requests", "errors", "none")
MIB = 1 << 20
_ENDLESS = 2**53
_RANGES: Mapping[str, tuple[float, int]] = {  # of numbers; others are at least 0
    "service.record_mib": (1, _ENDLESS),
    "engine.lanes": (0, MOST_LANES),
    "engine.prompt_share": (0.01, 1),
    "engine.queue": (1, _ENDLESS),
    "engine.drafts": (-1, _ENDLESS),
    "engine.image_pixels": (1, _ENDLESS),
    "limits.body_bytes": (1024, _ENDLESS),
    "limits.header_bytes": (1024, _ENDLESS),
    "limits.connections": (1, _ENDLESS),
    "limits.json_depth": (4, _ENDLESS),
    "limits.sessions": (1, _ENDLESS),
    "defaults.draft_confidence": (0, 1),
}


@dataclass(frozen=True)
class ServiceConfig:
    """What is served, and where."""

    bundle: str = "/opt/edge-dflash/current/bundle"  # directory that a build made
    model: str = ""  # name in the API; "": the name of the bundle's directory
    socket: str = "/run/edge-dflash/edge-dflash.sock"  # Unix socket; "": none
    socket_mode: str = "0660"  # octal
    tcp: str = ""  # HOST:PORT; "": no TCP. Without api_key_file only a loopback address
    api_key_file: str = ""  # file with the keys of which TCP callers must send one; "": no key
    state_dir: str = "/var/lib/edge-dflash/state"  # of sessions and recorded answers; nothing is written elsewhere
    record: bool = False  # finished answers, with their prompts, are appended to a file in state_dir
    record_mib: int = 64  # of it, at most; the oldest answers go
    log: str = "requests"  # a line for each request; errors: for those that are refused or fail; none
    self_test: str = "refuse"  # refuse, warn or off
    check_hashes: bool = True


@dataclass(frozen=True)
class EngineConfig:
    """The planner's own settings."""

    lanes: int = 0  # requests that run at a time; 0: as many as the bundle was built for
    prompt_share: float = 0.5  # of the time, for the prompts of some requests while others decode
    queue: int = 16  # requests that may wait
    prefix_mib: int = 512  # states of system prompts that are kept
    fallback: bool = True  # as many drafts as were measured to pay, none included; False: all
    drafts: int = -1  # that a cycle verifies, whatever was measured; -1: not said
    drafter: bool = True  # False: the target alone is loaded
    images: int = 16  # of a request; 0: none are taken
    image_pixels: int = 20_000_000  # of the images of a request together, before they are resized


@dataclass(frozen=True)
class LimitConfig:
    """What a client may ask for. 0: no limit of the service's own."""

    body_bytes: int = 1 * MIB
    header_bytes: int = 16384
    connections: int = 64  # of the Unix socket and of TCP each; three quarters of one user or address
    json_depth: int = 64
    schema_bytes: int = 65536  # of a schema, regex or grammar
    prompt_chars: int = 0  # all texts of a request together
    new_tokens: int = 0  # tokens of an answer; also what holds without max_tokens
    sessions: int = 16  # of one owner, open at a time; those used longest ago are saved and closed
    saved_sessions: int = 64  # of one owner, files in the state directory


@dataclass(frozen=True)
class TimeoutConfig:
    """Seconds. 0: no bound, where the comment says so."""

    header: float = 10.0  # from the connection to the last header
    body: float = 20.0  # from the last header to the end of the body
    idle: float = 30.0  # between two requests of a connection
    write: float = 20.0  # a client that takes nothing of its answer
    deadline: float = 0.0  # of requests that name none; 0: none
    drain: float = 20.0  # what the running request gets when the service stops
    stall: float = 60.0  # /health says hung when a running request did not get on for so long


@dataclass(frozen=True)
class SessionConfig:
    """Conversations that the service keeps."""

    save: str = "shutdown"  # turn: after every turn; shutdown: when the service stops; never: only when asked


@dataclass(frozen=True)
class DefaultConfig:
    """What holds where a request says nothing."""

    temperature: float = 0.0  # 0: greedy. OpenAI's own default is 1
    thinking: bool = False
    draft_confidence: float = 0.0  # drafts from the first on that the drafter is less sure of are not verified, 0 to 1


@dataclass(frozen=True)
class ServeConfig:
    """All settings."""

    service: ServiceConfig = field(default_factory=ServiceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    defaults: DefaultConfig = field(default_factory=DefaultConfig)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value outside its range."""
        service = self.service
        texts = [("service.log", service.log, LOGS), ("service.self_test", service.self_test, MODES)]
        texts.append(("sessions.save", self.sessions.save, SAVES))
        for name, text, accepted in texts:
            if text not in accepted:
                raise ConfigError(f"{name} is {text!r}; accepted are {', '.join(accepted)}")
        if not self.service.socket and not self.service.tcp:
            raise ConfigError('service.socket and service.tcp are both ""; give one of them')
        if self.service.tcp:
            host, _ = self.tcp_address
            if not self.service.api_key_file and not is_loopback(host):
                raise ConfigError(
                    f"service.tcp is {self.service.tcp!r}, which others can reach, and there is no api_key_file; "
                    "give one, or a loopback address such as 127.0.0.1:8080"
                )
        _ = self.socket_mode
        for section in fields(self):
            for key in fields(part := getattr(self, section.name)):
                value, name = getattr(part, key.name), f"{section.name}.{key.name}"
                if isinstance(value, str) and "\0" in value:
                    raise ConfigError(f"{name} is {short(value)}; give a text without NUL (U+0000)")
                if isinstance(value, bool | str):
                    continue
                low, high = _RANGES.get(name, (0, _ENDLESS))
                if section.name == "timeouts" and key.name != "deadline" and value <= 0:
                    raise ConfigError(f"{name} is {value}; give seconds above 0")
                if not low <= value <= high or not math.isfinite(value):
                    wanted = f"at least {low}" if high == _ENDLESS else f"{low:g} to {high}"
                    raise ConfigError(f"{name} is {value}; give {wanted}")

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
        text = self.service.socket_mode
        try:
            mode = int(text, 8)
        except ValueError:
            mode = -1
        if not 0o600 <= mode <= 0o660 or mode & 0o117:
            raise ConfigError(f"service.socket_mode is {text!r}; give 0600 or 0660")
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
    sections: dict[str, Any] = {f.name: f.default_factory for f in fields(ServeConfig)}
    made: dict[str, Any] = {}
    for name, value in table.items():
        if name not in sections or not isinstance(value, dict):
            raise ConfigError(f"{where}: {name!r} is no section; sections are {', '.join(sections)}")
        made[name] = _section(sections[name], name, value, where)
    return ServeConfig(**made)


def _section(kind: Any, section: str, table: dict[str, Any], where: str) -> Any:
    known = {f.name: type(f.default) for f in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}: {section}.{key} is unknown; keys of {section} are {', '.join(known)}")
        wanted = known[key]
        if wanted is float and type(value) is int:
            value = float(value) if abs(value) < 2**53 else math.inf
        if type(value) is not wanted:
            names = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
            raise ConfigError(f"{where}: {section}.{key} is {str(value)[:60]!r}; give {names[wanted]}")
        values[key] = value
    return kind(**values)
