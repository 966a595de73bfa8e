"""The command line: flags become one call each; results go to stdout, progress and errors to stderr.

Exit codes: 0 done, 2 wrong usage, 130 interrupted, otherwise the ``exit_code`` of the error's class in
:mod:`edge_dflash.errors`. An error is one line that starts with ``error:``.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from edge_dflash import __version__
from edge_dflash.cli import bench, build, demo, doctor, generate, inspect, serve, service, verify
from edge_dflash.errors import BackendError, EdgeDflashError

INTERRUPTED = 130

app = typer.Typer(
    help="Lossless speculative decoding (DFlash) for language models on robots.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command(short_help="Make a robot plan with the shipped demo pair.")(demo.demo)
app.command(short_help="Build an engine bundle from checkpoints.")(build.build)
app.command(short_help="Answer one prompt.")(generate.generate)
app.command(short_help="Check that a bundle is lossless here.")(verify.verify)
app.command(short_help="Time a pair against the speed of memory.")(bench.bench)
app.command(short_help="Print bytes, memory and speed limits of a pair.")(inspect.inspect)
app.command(short_help="Answer the OpenAI API on a socket.")(serve.serve)
app.command(short_help="Check that this machine can serve a bundle.")(doctor.doctor)
app.add_typer(service.app, name="service", short_help="Install, upgrade and remove the systemd service.")


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
    sys.exit(run(sys.argv[1:] if argv is None else argv))


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
        _print_error(f"{error.format_message()} (see edge-dflash --help)")
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _print_error("this command needs torch; install it with: pip install 'edge-dflash[build]'")
        return BackendError.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads: let the last flush go nowhere
        return EdgeDflashError.exit_code
    except OSError as error:
        _print_error(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return EdgeDflashError.exit_code


def _print_error(message: str) -> None:
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
