"""A host: which file of deploy/ goes where below its root, and what its running system has to be told of a change.

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

import subprocess
from collections.abc import Sequence
from pathlib import Path

from edge_dflash.errors import EdgeDflashError

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
SERVICE = _UNITS / UNIT
ENABLED = _UNITS / "multi-user.target.wants" / UNIT  # as systemctl enable links it
ACTIVATED = _UNITS / "sockets.target.wants" / SOCKET


class InstallPaths:
    """Paths below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "opt/edge-dflash"  # home of releases; programs may live there too
        self.releases = self.base / "releases"  # a directory for each release
        self.current = self.base / "current"  # link to the release that is served
        self.history = self.base / "history"  # names of the releases, one a line, the newest last
        self.unserved = self.base / "unserved"  # from the begin of a change until the service was started with it
        self.state = root / "var/lib/edge-dflash"  # what the service itself writes
        self.runtime = root / "run/edge-dflash"  # where the socket lies


class Host:
    """Files only: nothing runs below this root."""

    live = False  # whether a system runs there

    def prepare(self) -> None:
        """Make the user and the directories, and read the units again."""

    def reload(self) -> None:
        """Read the units again."""

    def start(self, *, activated: bool, restart: bool) -> bool:
        """Start the service, its socket first when it is ``activated``; whether it became ready."""
        return False

    def stop(self) -> None:
        """Stop service and socket."""


class Systemd(Host):
    """The machine that this runs on."""

    live = True

    def prepare(self) -> None:
        """See Host. Raises EdgeDflashError when a step fails."""
        self._must(("systemd-sysusers", "/etc/sysusers.d/edge-dflash.conf"))
        self._must(("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/edge-dflash.conf"))
        self.reload()

    def reload(self) -> None:
        """See Host."""
        self._must(("systemctl", "daemon-reload"))

    def start(self, *, activated: bool, restart: bool) -> bool:
        """See Host. Waits for READY, which large bundles reach after minutes."""
        _run(("systemctl", "reset-failed", UNIT), quiet=True)
        if activated and not _run(("systemctl", "is-active", SOCKET), quiet=True):
            _run(("systemctl", "stop", UNIT))  # systemd takes no socket for a service that runs already
            if not _run(("systemctl", "start", SOCKET)):
                return False
        elif not activated:
            _run(("systemctl", "stop", SOCKET), quiet=True)
        return _run(("systemctl", "restart" if restart else "start", UNIT))

    def stop(self) -> None:
        """See Host."""
        for unit in (SOCKET, UNIT):
            _run(("systemctl", "stop", unit), quiet=True)
        _run(("systemctl", "reset-failed", UNIT), quiet=True)

    @staticmethod
    def _must(command: Sequence[str]) -> None:
        if not _run(command):
            raise EdgeDflashError(f"{' '.join(command)} failed; see its message above, then give the command again")


def host_of(root: Path) -> Host:
    """Whom to tell about changes below ``root``."""
    return Systemd() if root.resolve() == Path("/") else Host()


def _run(command: Sequence[str], *, quiet: bool = False) -> bool:
    """Whether a command succeeded; ``quiet``: it may well fail, and says nothing."""
    try:
        return subprocess.run(command, capture_output=quiet, check=False).returncode == 0
    except OSError:
        return False
