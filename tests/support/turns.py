"""Turns on one device among the processes of a test run: many side by side, or one alone."""

import fcntl
from contextlib import contextmanager


@contextmanager
def turn(folder, *, alone):
    """Hold the device beside others, or without them. Who waits to be alone lets nobody else begin."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "gpu-gate.lock").open("w") as gate, (folder / "gpu.lock").open("w") as device:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(device, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield
