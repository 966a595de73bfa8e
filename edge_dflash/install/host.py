"""What the running system has to be told after files were changed: users, directories, units; elsewhere nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from edge_dflash.errors import EdgeDflashError
from edge_dflash.install.layout import SOCKET, UNIT


class Host(Protocol):
    """A system whose services can be told about."""

    def prepare(self) -> None:
        """Make the user and the directories, and read the units again."""
        ...

    def reload(self) -> None:
        """Read the units again."""
        ...

    def start(self, *, activated: bool, restart: bool) -> bool:
        """Start the service, its socket first when it is ``activated``; whether it became ready."""
        ...

    def stop(self) -> None:
        """Stop service and socket."""
        ...


class Offline:
    """Files only: nothing runs below this root."""

    def prepare(self) -> None:
        """See Host."""

    def reload(self) -> None:
        """See Host."""

    def start(self, *, activated: bool, restart: bool) -> bool:
        """See Host."""
        return False

    def stop(self) -> None:
        """See Host."""


class Systemd:
    """The machine that this runs on."""

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
    return Systemd() if root.resolve() == Path("/") else Offline()


def _run(command: Sequence[str], *, quiet: bool = False) -> bool:
    """Whether a command succeeded; ``quiet``: it may well fail, and says nothing."""
    try:
        return subprocess.run(command, capture_output=quiet, check=False).returncode == 0
    except OSError:
        return False
