"""Which file of deploy/ goes where, and where bundles and programs lie; everything below one root directory.

/opt/edge-dflash/releases/ID/bundle     a link to the copied bundle beside it, which keeps its name
/opt/edge-dflash/releases/ID/run        a link to the program that serves it
/opt/edge-dflash/releases/ID/no-plans   nothing has to be built here before it is served
/opt/edge-dflash/current                a link to the release that is served; /opt/edge-dflash/history: their order
/opt/edge-dflash/unserved               the running service does not have the last change yet
/etc/edge-dflash/config.toml            written once, then the administrator's
/etc/systemd/system, /etc/sysusers.d, /etc/tmpfiles.d
/var/lib/edge-dflash                    saved sessions
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNIT = "edge-dflash.service"
SOCKET = "edge-dflash.socket"
_UNITS = Path("etc/systemd/system")

FILES = {  # of deploy/, by where they go; replaced by every install
    _UNITS / UNIT: UNIT,
    _UNITS / SOCKET: SOCKET,
    _UNITS / "edge-dflash-finish.service": "edge-dflash-finish.service",
    Path("etc/sysusers.d/edge-dflash.conf"): "sysusers.conf",
    Path("etc/tmpfiles.d/edge-dflash.conf"): "tmpfiles.conf",
}
CONFIG = Path("etc/edge-dflash/config.toml")
TCP = _UNITS / f"{UNIT}.d" / "tcp.conf"
ENABLED = _UNITS / "multi-user.target.wants" / UNIT  # as systemctl enable links it
ACTIVATED = _UNITS / "sockets.target.wants" / SOCKET


@dataclass(frozen=True)
class Layout:
    """Paths below ``root``."""

    root: Path

    @property
    def base(self) -> Path:
        """Home of releases; programs may live there too."""
        return self.root / "opt/edge-dflash"

    @property
    def releases(self) -> Path:
        """A directory for each release."""
        return self.base / "releases"

    @property
    def current(self) -> Path:
        """Link to the release that is served."""
        return self.base / "current"

    @property
    def history(self) -> Path:
        """Names of the releases, one a line, the newest last."""
        return self.base / "history"

    @property
    def unserved(self) -> Path:
        """There from the begin of a change until the service was started with it."""
        return self.base / "unserved"

    @property
    def state(self) -> Path:
        """What the service itself writes."""
        return self.root / "var/lib/edge-dflash"

    @property
    def runtime(self) -> Path:
        """Where the socket lies."""
        return self.root / "run/edge-dflash"
