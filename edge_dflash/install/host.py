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
    """A machine, told through systemd; one that is not ``live`` is a directory tree, below which nothing runs."""

    def __init__(self, *, live: bool) -> None:
        self.live = live

    def prepare(self) -> None:
        """Make the user and the directories, and read the units again. Raises EdgeDflashError when a step fails."""
        self._must("systemd-sysusers", "/etc/sysusers.d/edge-dflash.conf")
        self._must("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/edge-dflash.conf")
        self.reload()

    def reload(self) -> None:
        """Read the units again. Raises EdgeDflashError when that fails."""
        self._must("systemctl", "daemon-reload")

    def start(self, *, activated: bool, restart: bool) -> bool:
        """Start the service, its socket first when it is ``activated``; whether it became ready.

        Waits for READY, which large bundles reach after minutes.
        """
        self._run("systemctl", "reset-failed", UNIT, quiet=True)
        if activated and not self._run("systemctl", "is-active", SOCKET, quiet=True):
            self._run("systemctl", "stop", UNIT)  # systemd takes no socket for a service that runs already
            if not self._run("systemctl", "start", SOCKET):
                return False
        elif not activated:
            self._run("systemctl", "stop", SOCKET, quiet=True)
        return self._run("systemctl", "restart" if restart else "start", UNIT)

    def stop(self) -> None:
        """Stop service and socket."""
        for unit in (SOCKET, UNIT):
            self._run("systemctl", "stop", unit, quiet=True)
        self._run("systemctl", "reset-failed", UNIT, quiet=True)

    def _must(self, *command: str) -> None:
        if self.live and not self._run(*command):
            raise EdgeDflashError(f"{' '.join(command)} failed; see its message above, then give the command again")

    def _run(self, *command: str, quiet: bool = False) -> bool:
        """Whether a command succeeded; ``quiet``: it may well fail, and says nothing."""
        try:
            return self.live and subprocess.run(command, capture_output=quiet, check=False).returncode == 0
        except OSError:
            return False


def host_of(root: Path) -> Host:
    """Whom to tell about changes below ``root``."""
    return Host(live=root.resolve() == Path("/"))
