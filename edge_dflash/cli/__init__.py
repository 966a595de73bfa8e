"""The command line: flags become one call; results go to stdout, progress and errors to stderr.

Exit codes: 0 done, 2 wrong usage, 130 interrupted, otherwise the ``exit_code`` of the error's class in
:mod:`edge_dflash.errors`; docs/cli.md has them all. Of SIGTERM and SIGHUP the process dies, after the same
clean-up. An error is one line that starts with ``error:``.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections import UserDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from edge_dflash.cli.usage import Command
from edge_dflash.errors import BackendError, EdgeDflashError
from edge_dflash.version import __version__

INTERRUPTED = 130
LONGEST_ERROR = 2000  # characters
SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # SIGINT is Python's own KeyboardInterrupt
TWICE_SECONDS = 1.0  # within which a signal that comes again is the same one: timeout(1) sends it twice

# A command is the function, or the typer app, of its name in the module of its name; imported when it is called for.
COMMANDS = {
    "demo": "Make a robot plan with the shipped demo pair.",
    "build": "Build an engine bundle from checkpoints.",
    "generate": "Answer one prompt.",
    "verify": "Check that a bundle is lossless here.",
    "bench": "Time a pair against the speed of memory.",
    "inspect": "Print bytes, memory and speed limits of a pair.",
    "serve": "Answer the OpenAI API on a socket.",
    "train-drafter": "Train a drafter on your own prompts.",
    "doctor": "Check that this machine can serve a bundle.",
    "service": "Install, upgrade and remove the systemd service.",
}


class _Commands(UserDict[str, Any]):
    """The commands by name: what a list says of each, until one is called for and loaded."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.data[name], str):
            with _starting():
                module = name.replace("-", "_")
                app = getattr(import_module(f"edge_dflash.cli.{module}"), module)
            if not isinstance(app, typer.Typer):
                function, app = app, typer.Typer(add_completion=False, rich_markup_mode=None)
                app.command(name, cls=Command)(function)
            self.data[name] = typer.main.get_command(app)
        return self.data[name]


@contextmanager
def _starting() -> Iterator[None]:
    """A word on the terminal while imports take their half second (more on a board), wiped afterwards."""
    word = "starting" if sys.stderr.isatty() else ""
    print(word, end="\r" if word else "", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(word), end="\r" if word else "", file=sys.stderr, flush=True)


class _Group(TyperGroup):
    """All commands; their list needs none of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": _Commands(COMMANDS)})

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=_Group,
    help="Lossless speculative decoding (DFlash) for language models on robots.",
    epilog="Start with: edge-dflash demo. Then: edge-dflash COMMAND --help.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"edge-dflash {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character must not stop us
    with ending() as ended:
        code = run(sys.argv[1:] if argv is None else argv)
    ended.leave()
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; an error has been printed."""
    try:
        done = app(args=list(argv), prog_name="edge-dflash", standalone_mode=False)
        code = done if isinstance(done, int) else 0
        if code == INTERRUPTED:
            _print_error("interrupted")
        return code
    except KeyboardInterrupt:
        _print_error("interrupted")
        return INTERRUPTED
    except EdgeDflashError as error:
        _print_error(str(error))
        return INTERRUPTED if isinstance(error.__context__, KeyboardInterrupt) else error.exit_code
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)  # of the command that was used wrongly
        command = "edge-dflash" if context is None else context.command_path
        _print_error(f"{error.format_message()} (see {command} --help)")
        return error.exit_code
    except ModuleNotFoundError as error:
        extras = {"torch": "build", "accelerate": "train", "safetensors": "train"}
        if error.name not in extras:
            raise
        extra = "train" if "train-drafter" in argv[:1] else extras[error.name]
        _print_error(f"this command needs {error.name}; install it with: pip install 'edge-dflash[{extra}]'")
        return BackendError.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: let the last flush go nowhere
        return EdgeDflashError.exit_code
    except OSError as error:
        _print_error(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return EdgeDflashError.exit_code


def _print_error(message: str) -> None:
    """One line, which names from damaged files can neither break nor flood."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(message.split()))
    if len(line) > LONGEST_ERROR:
        line = f"{line[: LONGEST_ERROR // 2]} ... {line[-LONGEST_ERROR // 2 :]}"
    print("error: " + line, file=sys.stderr, flush=True)


class EndedError(KeyboardInterrupt):
    """A signal asked the process to end."""


class EndSignals:
    """What came, and how the process ends by it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came = -TWICE_SECONDS

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler: raises in the main thread, between any two instructions."""
        now, before = time.monotonic(), self._came
        self.signal = self.signal or number
        if now - before >= TWICE_SECONDS:
            self._came = now
            raise EndedError

    def leave(self) -> None:
        """Die of the signal that came, as whoever sent it expects; without one return."""
        if self.signal is not None:
            sys.stdout.flush()
            signal.signal(self.signal, signal.SIG_DFL)
            os.kill(os.getpid(), self.signal)


@contextmanager
def ending() -> Iterator[EndSignals]:
    """Let SIGNALS raise inside. One that is ignored (nohup) stays so."""
    handler, ours = EndSignals(), []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield handler
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
