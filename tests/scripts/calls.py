"""The chain of calls from a function to what it causes, over threads: how many, in how many files.

    python tests/scripts/calls.py plan NATIVE_BUNDLE        # Planner.plan to the launch of a graph, on no device
    python tests/scripts/calls.py chat BUNDLE [--end NAME]  # the route of /v1/chat/completions to the decoding loop
    python tests/scripts/calls.py build                     # the command's function to the first bytes of a weight file

A call is a frame of ``edge_dflash`` on the stack at that moment; the stack of the thread that handed the work over
comes before that of the thread that took it. Functions are found by name (``--start``, ``--end``), no module is
imported by path, so two trees of different modules are counted alike. The last line is one JSON object.
"""

import argparse
import http.client
import importlib.util
import itertools
import json
import os
import queue
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

PACKAGE = str(Path(importlib.util.find_spec("edge_dflash").origin).resolve().parent)
WAKING = ("notify", "notify_all", "start")  # of threading: they wake a thread or begin one


class Trace:
    """Listens to all threads that begin while it is installed, and to this one; keeps the stack at ``ends``."""

    def __init__(self, start, ends):
        """``start`` is the name of a function; ``ends(frame, event, argument)`` says that the chain is complete."""
        self.start, self.ends = start, ends
        self.armed = False
        self.chain = None
        self._count = itertools.count()
        self._woken = {}  # thread: when it last came back from waiting
        self._handed = []  # (when, thread, stack) of each waking of another thread

    @contextmanager
    def installed(self):
        """Trace in this block, and on threads that begin in it."""
        threading.setprofile(self._listen)
        sys.setprofile(self._listen)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _listen(self, frame, event, argument):
        if self.chain is not None:
            return
        thread, name = threading.get_ident(), frame.f_code.co_name
        self._woken.setdefault(thread, next(self._count))
        waited = event == "return" and name == "wait" and frame.f_code.co_filename == threading.__file__
        if waited or (event == "c_return" and isinstance(getattr(argument, "__self__", None), queue.SimpleQueue)):
            self._woken[thread] = next(self._count)
        wakes = event == "call" and name in WAKING and frame.f_code.co_filename == threading.__file__
        if wakes or (event == "c_call" and getattr(argument, "__name__", "") == "put"):
            self._handed.append((next(self._count), thread, stack(frame)))
        if self.armed and self.ends(frame, event, argument):
            self.chain = self._joined(thread, stack(frame))

    def _joined(self, thread, frames):
        """The stacks of the threads that handed the work on, from ``start`` to the end; None when it is not on them."""
        chain, before = frames, self._woken[thread]
        while self.start not in [name.rpartition(".")[2] for name, _ in chain]:
            others = [one for one in self._handed if one[0] < before and one[1] != thread and one[2]]
            if not others:
                return None
            when, thread, frames = others[-1]
            before, chain = min(when, self._woken[thread]), [*frames, *chain]
        names = [name.rpartition(".")[2] for name, _ in chain]
        return chain[names.index(self.start) :]


def stack(frame):
    """(qualified name, file:line) of the frames of the package, the outermost first."""
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            found.append((frame.f_code.co_qualname, f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno}"))
        frame = frame.f_back
    return found[::-1]


def report(chain):
    """Print a chain; calls and files in all."""
    if chain is None:
        raise SystemExit("the end was not reached from the start; give other names with --start and --end")
    for index, (name, place) in enumerate(chain, 1):
        print(f"{index:3} {name:48} {place}")
    return {"calls": len(chain), "files": len({place.partition(":")[0] for _, place in chain})}


def called(name):
    """The end is a call of the function of this qualified name, of the package or of the stand-in below."""

    def ends(frame, event, argument):
        code = frame.f_code
        ours = code.co_filename.startswith(PACKAGE) or code.co_filename == __file__
        return event == "call" and code.co_qualname == name and ours

    return ends


def no_device():
    """Put answers in the place of the functions of ``cuda.bindings.driver``: a Hopper that computes nothing."""
    from cuda.bindings import driver

    kept = []  # what was allocated

    def memory(nbytes):
        import numpy

        kept.append(numpy.full(nbytes // 4 + 64, 7, numpy.int32))  # every token and every length that is read is 7
        return kept[-1].ctypes.data

    attributes = driver.CUdevice_attribute
    given = {
        "cuMemAlloc": lambda nbytes: memory(min(nbytes, 1 << 20)),
        "cuMemAllocHost": memory,
        "cuMemGetInfo": lambda: (1 << 38, 1 << 38),
        "cuDeviceGetName": lambda *arguments: b"no device\0",
        "cuDriverGetVersion": lambda: 13000,
        "cuDeviceGetAttribute": lambda attribute, device: {
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
            attributes.CU_DEVICE_ATTRIBUTE_INTEGRATED: 0,
        }.get(attribute, 132),
        "cuOccupancyMaxActiveClusters": lambda *arguments: 66,
        "cuEventElapsedTime": lambda *arguments: 1.0,
        "cuTensorMapEncodeTiled": lambda *arguments: SimpleNamespace(opaque=[0] * 16),
    }
    for name in ("cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuModuleLoadData"):
        given[name] = lambda *arguments: 1

    def answer(name):
        def call(*arguments):
            made = given[name](*arguments) if name in given else None
            values = () if made is None else made if isinstance(made, tuple) else (made,)
            return driver.CUresult.CUDA_SUCCESS, *values

        call.__code__ = call.__code__.replace(co_name=name, co_qualname=name)
        return call

    for name in ("cuModuleGetFunction", "cuStreamEndCapture", "cuGraphInstantiate", "cuEventCreate"):
        given[name] = lambda *arguments: SimpleNamespace()
    for name in dir(driver):
        if name.startswith("cu") and name[2].isupper():
            setattr(driver, name, answer(name))


def plan(options):
    """Two chains of one plan: to the launch of the prompt's pass, and to that of the first cycle."""
    no_device()
    import numpy  # noqa: F401  # before the trace

    from edge_dflash import Planner

    found = {}
    for skipped, what in ((0, "prefill"), (1, "cycle")):
        left = [skipped]
        launched = called(options.end or "cuGraphLaunch")

        def ends(frame, event, argument, left=left, launched=launched):
            if launched(frame, event, argument):
                left[0] -= 1
            return left[0] < 0

        trace = Trace(options.start or "plan", ends)
        with trace.installed(), Planner.open(options.bundle, self_test="off", fallback=False) as planner:
            trace.armed = True
            planner.plan([5, 6, 7], max_new_tokens=8)
        print(f"Planner.plan to the launch of the {what}:")
        found[what] = report(trace.chain)
    return found


def chat(options):
    """The chain of one chat completion: the server of the command line runs here, a client asks it and ends it."""
    trace = Trace(options.start or "answer", called(options.end or "decode_steps"))
    body = json.dumps({"messages": [{"role": "user", "content": "Tidy the kitchen."}], "max_tokens": 4}).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"

        def client():
            try:
                while not path.exists() or ask(path, "GET", "/ready") != 200:
                    time.sleep(0.2)
                trace.armed = True
                ask(path, "POST", "/v1/chat/completions", body)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=client, daemon=True).start()
        words = ["serve", str(options.bundle), "--socket", str(path), "--state-dir", str(Path(folder) / "state")]
        command_line(trace, words)
    print("POST /v1/chat/completions to the loop:")
    return report(trace.chain)


def ask(path, method, target, body=None):
    """Status of the answer to one HTTP request on a Unix socket."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    with closing(connection):
        connection.sock.connect(str(path))
        connection.request(method, target, body, {"Content-Type": "application/json"})
        return connection.getresponse().status


def build(options):
    """The chain of one build: to the first bytes of a file of weights."""

    def ends(frame, event, argument):
        if event != "c_call" or getattr(argument, "__name__", "") not in ("write", "pwrite"):
            return False
        return ".safetensors" in str(getattr(getattr(argument, "__self__", None), "name", ""))

    trace = Trace(options.start or "build", ends)
    trace.armed = True
    models = Path(PACKAGE) / "demo" / "models"
    with tempfile.TemporaryDirectory() as folder:
        pair = ("--target", str(models / "target"), "--drafter", str(models / "drafter"))
        command_line(trace, ["build", *pair, "--output", str(Path(folder) / "bundle"), "--recipe", "demo-cpu"])
    print("build to the first bytes:")
    return report(trace.chain)


def command_line(trace, words):
    """Run ``edge-dflash`` with these words under a trace."""
    sys.argv = ["edge-dflash", *words]
    with trace.installed():
        try:
            runpy.run_module("edge_dflash", run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("plan", "chat", "build"))
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--start", help="name of the first function of the chain")
    parser.add_argument("--end", help="name of the function whose call ends it")
    options = parser.parse_args()
    if options.bundle is None and options.what != "build":
        parser.error(f"{options.what} needs a bundle")
    print(json.dumps({options.what: {"plan": plan, "chat": chat, "build": build}[options.what](options)}))


if __name__ == "__main__":
    main()
