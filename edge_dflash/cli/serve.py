"""``edge-dflash serve``: the OpenAI API in front of a bundle."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_dflash.cli.output import stages
from edge_dflash.cli.usage import opt
from edge_dflash.errors import ServiceError


def serve(
    bundle: Annotated[
        Path | None, typer.Argument(metavar="BUNDLE", help="Directory that a build made, in place of the config's.")
    ] = None,
    config: Annotated[Path | None, opt("FILE", "TOML file of settings, each with a default; docs/service.md.")] = None,
    socket: Annotated[Path | None, opt("PATH", "Unix socket, in place of the config's.")] = None,
    tcp: Annotated[str | None, opt("HOST:PORT", "Listen there as well; loopback without a key.")] = None,
    state_dir: Annotated[Path | None, opt("DIR", "Where sessions are saved, in place of the config's.")] = None,
) -> None:
    """Serve a bundle over the OpenAI API, until SIGTERM or SIGINT.

    Chat and plain completions, streams, forms, tools, sessions, metrics; see docs/service.md. Listens on a Unix socket;
    on TCP only when asked, and beyond this machine only with an API key. It says where it serves once it is loaded, and
    under systemd that it is ready. SIGHUP saves the sessions.
    """
    try:
        from edge_dflash.serve.config import ServeConfig, load_config
        from edge_dflash.serve.logs import log_to
        from edge_dflash.serve.server import listen_sockets, logged, return_large_blocks, run
        from edge_dflash.serve.service import SystemdNotifier
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise ServiceError(f"{error.name} is missing; install it with: pip install 'edge-dflash[serve]'") from None
    from edge_dflash.board.state import EnergyMeter, read_board_state

    chosen = load_config(config) if config is not None else ServeConfig()
    flags = {"bundle": bundle, "socket": socket, "tcp": tcp, "state_dir": state_dir}
    given: dict[str, Any] = {name: str(value) for name, value in flags.items() if value is not None}
    chosen = replace(chosen, service=replace(chosen.service, **given))
    log_to(2)
    showing = stages if sys.stderr.isatty() else logged
    return_large_blocks()
    notifier = SystemdNotifier(os.environ.get("NOTIFY_SOCKET"))
    run(chosen, notifier, read_board_state, listen_sockets(), EnergyMeter(), showing)
