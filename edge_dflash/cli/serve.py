"""``edge-dflash serve``: the OpenAI API in front of a bundle."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from edge_dflash.cli.output import stages
from edge_dflash.common.allocator import return_large_blocks
from edge_dflash.errors import ServiceError


def serve(
    bundle: Annotated[
        Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made, in place of the config's.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file of settings, each with a default; docs/service.md."),
    ] = None,
    socket: Annotated[Path | None, typer.Option(metavar="PATH", help="Unix socket, in place of the config's.")] = None,
    tcp: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Listen there as well; loopback without a key.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where sessions are saved, in place of the config's.")
    ] = None,
) -> None:
    """Serve a bundle over the OpenAI API, until SIGTERM or SIGINT.

    Chat and plain completions, streams, forms, tools, sessions, metrics; see docs/service.md. Listens on a Unix socket;
    on TCP only when asked, and beyond this machine only with an API key. It says where it serves once it is loaded, and
    under systemd that it is ready. SIGHUP saves the sessions.
    """
    try:
        from edge_dflash.serve.config import ServeConfig, load_config
        from edge_dflash.serve.logs import log_to
        from edge_dflash.serve.server import listen_sockets, logged, run
        from edge_dflash.serve.service import SystemdNotifier
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise ServiceError(f"{error.name} is missing; install it with: pip install 'edge-dflash[serve]'") from None
    from edge_dflash.board.power import EnergyMeter
    from edge_dflash.board.state import read_board_state

    chosen = load_config(config) if config is not None else ServeConfig()
    given = chosen.service
    given = replace(
        given,
        bundle=given.bundle if bundle is None else str(bundle),
        socket=given.socket if socket is None else str(socket),
        tcp=given.tcp if tcp is None else tcp,
        state_dir=given.state_dir if state_dir is None else str(state_dir),
    )
    chosen = replace(chosen, service=given)
    log_to(2)
    showing = stages if sys.stderr.isatty() else logged
    return_large_blocks()
    run(
        chosen,
        SystemdNotifier(os.environ.get("NOTIFY_SOCKET")),
        read_board_state,
        listen_sockets(),
        EnergyMeter(),
        showing,
    )
