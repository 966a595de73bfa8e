"""``edge-dflash service``: the planner as a systemd service, from its installation to its removal."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edge_dflash.cli.output import Json, emit_json, say
from edge_dflash.cli.usage import Command, opt, switch
from edge_dflash.install import service as installed

service = typer.Typer(
    help="Install, upgrade, roll back and remove the systemd service. docs/thor.md shows every step.",
    add_completion=False,
    rich_markup_mode=None,
)

Root = Annotated[Path, opt("DIR", "Directory to work below; another than / gets files only.")]
Start = Annotated[bool, switch("--start/--no-start", "Start the service, and take a bad release back.")]


@service.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@service.command("install", cls=Command, short_help="Serve a bundle; again for an upgrade.")
def install_command(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory that a build made; it is copied.")],
    root: Root = Path("/"),
    program: Annotated[Path | None, opt("FILE", "The edge-dflash that serves; default: the one that runs now.")] = None,
    keep: Annotated[int, opt("N", "Releases to keep, the new one included.", min=1)] = installed.KEEP,
    tcp: Annotated[
        bool | None, switch("--tcp/--no-tcp", "Let the unit use TCP; where it listens is in config.toml.")
    ] = None,
    activation: Annotated[
        bool | None, switch("--socket-activation/--no-socket-activation", "Let systemd hold the socket from boot on.")
    ] = None,
    start: Start = True,
    json: Json = False,
) -> None:
    """Copy BUNDLE, install units and user, and serve it from now on and after every boot.

    Given again with another bundle or from another program, it upgrades: the copy is checked, one link is switched, and
    a release that does not become ready is taken back. Given again with the same, it checks the copy that is there and
    replaces it if it was damaged. Needs no network.

    JSON keys: release, previous, releases, written, removed, started.
    """
    if line := installed.left_to_build(bundle):
        say(line)
    outcome = installed.install(bundle, root, installed.InstallOptions(keep, tcp, activation, start), program=program)
    _show(outcome, json, f"{outcome.release} is installed" + (" and ready" if outcome.started else ""))
    for line in installed.next_step(root, program):
        say(line)


@service.command("rollback", cls=Command, short_help="Serve the release before the current one.")
def rollback_command(root: Root = Path("/"), start: Start = True, json: Json = False) -> None:
    """Switch to the release before the current one, program and bundle together.

    JSON keys: as of install.
    """
    outcome = installed.rollback(root, start=start)
    _show(outcome, json, f"{outcome.release} is current again" + (" and ready" if outcome.started else ""))


@service.command("remove", cls=Command, short_help="Remove the service.")
def remove_command(
    root: Root = Path("/"),
    purge: Annotated[bool, switch("--purge", "Configuration, drop-ins and saved sessions as well.")] = False,
    json: Json = False,
) -> None:
    """Stop the service and remove its units and bundles; configuration and saved sessions stay without --purge.

    JSON keys: as of install.
    """
    outcome = installed.remove(root, purge=purge)
    _show(outcome, json, "the service is removed" if outcome.removed else "nothing was installed")


def _show(outcome: installed.Outcome, json: bool, line: str) -> None:
    if json:
        emit_json(asdict(outcome))
        return
    for verb, paths in (("wrote", outcome.written), ("removed", outcome.removed)):
        for path in paths:
            say(f"{verb} {path}")
    print(line)
    if outcome.previous is not None:
        say(f"a rollback goes to {outcome.previous}")
