"""The service under a real systemd: boots one in namespaces of its own, over a copy-on-write view of this machine.

By hand, as root, on a machine with systemd, cgroup v2 and overlayfs; nothing outside of a temporary directory changes:

    python tests/scripts/boot_systemd.py BUNDLE

BUNDLE is one that runs here (edge-dflash demo makes one). Prints a line for each check and one JSON object last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SOCKET = "/run/edge-dflash/edge-dflash.sock"
PROGRAM = "/opt/edge-dflash/venv/bin/edge-dflash"
UNIT = "edge-dflash.service"
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "nvmap": (10, 123)}
SHORT = "[Service]\nWatchdogSec=4\nTimeoutAbortSec=2\nRestartSec=2\n"  # nobody wants to wait two minutes
INIT = r"""
mount --make-rprivate /
mount -t overlay overlay -o lowerdir=/,upperdir=$T/up,workdir=$T/work $T/root; R=$T/root
mount -t proc proc $R/proc; mount -t sysfs sysfs $R/sys; mount -t cgroup2 none $R/sys/fs/cgroup
for d in run dev; do mount -t tmpfs -o mode=755 tmpfs $R/$d; done
mkdir -p $R/dev/pts $R/dev/shm $R/opt/py $R/opt/edge-dflash/venv/bin $R/srv/bundle
mount --bind $PREFIX $R/opt/py; mount --bind $BUNDLE $R/srv/bundle
echo "$NODES" | while read name major minor; do mknod -m 666 $R/dev/$name c $major $minor; done
mount -t devpts -o newinstance,ptmxmode=666 devpts $R/dev/pts; ln -s pts/ptmx $R/dev/ptmx
cp $T/program $R/opt/edge-dflash/venv/bin/edge-dflash; echo 0123456789abcdef0123456789abcdef > $R/etc/machine-id
exec env -i container=lxc PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot $R /lib/systemd/systemd --unit=basic.target
"""


class Machine:
    """A booted system."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.groups = folder / "cgroup"
        for name in ("up", "work", "root", "cgroup"):
            (folder / name).mkdir()
        subprocess.run(["mount", "-t", "cgroup2", "none", self.groups], check=True)
        (self.groups / "edge-dflash-trial").mkdir(exist_ok=True)
        paths = [str(CHECKOUT), *(path for path in sys.path if path.endswith("site-packages"))]
        (folder / "program").write_text(
            f"#!/bin/sh\nexport LD_LIBRARY_PATH=/opt/py/lib\nexec /opt/py/bin/python3 -c 'import sys; "
            f'sys.path[:0]={json.dumps(paths)}; from edge_dflash.cli import main; main()\' "$@"\n'
        )
        (folder / "program").chmod(0o755)
        nodes = "\n".join(f"{name} {major} {minor}" for name, (major, minor) in NODES.items())
        given = {"T": str(folder), "PREFIX": sys.base_prefix, "BUNDLE": str(bundle), "NODES": nodes}
        join = f'echo $$ > {self.groups}/edge-dflash-trial/cgroup.procs; exec unshare -mpfCnui sh -c "$INIT"'
        self.process = subprocess.Popen(
            ["sh", "-c", join],
            env={**os.environ, **given, "INIT": INIT},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._first()
        self.wait(lambda: self.run("systemctl is-system-running") in ("running", "degraded"), 60)

    def _first(self) -> int:
        """The systemd, which is the child of unshare."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.wait(lambda: bool(children.read_text().split()), 10)
        return int(children.read_text().split()[0])

    def run(self, command: str) -> str:
        """What a shell command inside prints, errors included."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-p", "-C", "-n", "-u", "-i", "-r", "-w"]
        path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            [*enter, "env", "-i", path, "sh", "-c", command],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.stdout.strip()

    def show(self, name: str) -> str:
        return self.run(f"systemctl show -P {name} {UNIT}")

    def get(self, path: str) -> str:
        return self.run(f"curl -s -m 60 --unix-socket {SOCKET} http://x{path}")

    @staticmethod
    def wait(reached, seconds: float) -> bool:
        """Whether something comes true in time."""
        end = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def close(self) -> None:
        self.process.kill()  # unshare, and with its first process the whole namespace
        os.kill(self.pid, 9)
        self.process.wait()
        time.sleep(1)
        for group, _, _ in os.walk(self.groups / "edge-dflash-trial", topdown=False):
            Path(group).rmdir()
        subprocess.run(["umount", self.groups], check=False)


def trial(m: Machine):
    """Name and outcome of every check."""
    install = f"{PROGRAM} service install /srv/bundle --program {PROGRAM}"
    yield "install waits for READY", m.run(install).endswith("is installed and ready")
    yield "status line", "serving" in m.show("StatusText")
    task = '{"messages": [{"role": "user", "content": "Close the fridge."}], "max_tokens": 8}'
    m.run("useradd -m robot; useradd -m stranger; usermod -aG edge-dflash robot")
    ask = f"curl -s --unix-socket {SOCKET} -H 'content-type: application/json' -d '{task}' http://x/v1/chat/completions"
    yield "the group may ask", '"choices"' in m.run(f"su robot -c {json.dumps(ask)}")
    yield "others may not", m.run(f"su stranger -c 'curl -s --unix-socket {SOCKET} http://x/health'; echo $?") == "7"
    main = m.show("MainPID")
    m.run("mknod -m 666 /dev/kmsg2 c 1 11")
    group = f"echo $$ > /sys/fs/cgroup/system.slice/{UNIT}/cgroup.procs;"
    yield "other devices are shut", "not permitted" in m.run(f"{group} head -c1 /dev/kmsg2")
    yield "the GPU's are not", "not permitted" not in m.run(f"{group} head -c1 /dev/nvmap")
    yield "no privileges", "CapEff:\t0000000000000000" in m.run(f"cat /proc/{main}/status")
    m.run(f"mkdir -p /etc/systemd/system/{UNIT}.d; printf '{SHORT}' > /etc/systemd/system/{UNIT}.d/trial.conf")
    m.run(f"systemctl daemon-reload; systemctl restart {UNIT}")
    time.sleep(8)
    yield "an idle engine is left alone", m.show("NRestarts") == "0"
    m.run(f"kill -STOP {m.show('MainPID')}")
    again = m.wait(lambda: m.show("NRestarts") == "1" and m.show("ActiveState") == "active", 30)
    yield "a process that stands still is ended by the watchdog and comes back", again
    yield "and the journal says watchdog", "watchdog" in m.run(f"journalctl -b -o cat -u {UNIT}").lower()
    m.run(f"kill -9 {m.show('MainPID')}")
    again = m.wait(lambda: m.show("NRestarts") == "2" and m.show("ActiveState") == "active", 30)
    yield "after kill -9 it comes back", again
    m.run("printf '#!/bin/sh\\nexit 7\\n' > /opt/bad; chmod 755 /opt/bad")
    said = m.run(f"{PROGRAM} service install /srv/bundle --program /opt/bad")
    yield "a bad release is taken back", "serves again" in said
    yield "and answers", "ready" in m.get("/ready")
    m.run("cp -r /srv/bundle /srv/other")
    m.run(f"{PROGRAM} service install /srv/other --program {PROGRAM}")
    yield "upgrade", '"other"' in m.get("/v1/models")
    m.run(f"{PROGRAM} service rollback")
    yield "rollback", '"bundle"' in m.get("/v1/models")
    m.run(f"{install} --socket-activation; systemctl stop {UNIT}")
    yield "a socket that systemd holds starts it", "status" in m.get("/ready")
    m.wait(lambda: m.show("ActiveState") == "active", 30)
    m.run("sed -i 's/^tcp = .*/tcp = \"127.0.0.1:8080\"/' /etc/edge-dflash/config.toml; ip link set lo up")
    said = m.run(f"{install} --no-socket-activation")
    yield "without its drop-in there is no TCP", "did not become ready" in said
    m.run(f"{install} --tcp")
    yield "with it there is", "ready" in m.run("curl -s http://127.0.0.1:8080/ready")
    began = time.monotonic()
    m.run(f"systemctl stop {UNIT}")
    yield "a stop is clean", m.show("Result") == "success" and time.monotonic() - began < 20
    m.run(f"{PROGRAM} service remove --purge")
    left = m.run("find /etc /opt /var/lib /run -path /opt/py -prune -o -name '*edge-dflash*' -print")
    yield "removal leaves the program only", left.split() == ["/opt/edge-dflash", PROGRAM] or left


def main() -> None:
    """Boot, check, report."""
    bundle = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="edge-dflash-systemd-") as name:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", name], check=True)
        machine = Machine(Path(name), bundle)
        results = {}
        try:
            for check, outcome in trial(machine):
                results[check] = outcome is True
                print("ok  " if outcome is True else f"FAIL ({outcome})", check, flush=True)
            version = machine.run("systemctl --version").splitlines()[0]
        finally:
            machine.close()
            subprocess.run(["umount", "-l", name], check=False)
    print(json.dumps({"ok": all(results.values()), "systemd": version, "checks": results}))
    sys.exit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
