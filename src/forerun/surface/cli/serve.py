"""``forerun serve`` and ``forerun mcp``."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.base.errors import FailureError, UsageError
from forerun.base.extras import require
from forerun.surface.cli.main import error_line, exit_status
from forerun.surface.cli.output import quiet_libraries
from forerun.surface.cli.verbs import verb

AllowCodeOption = Annotated[
    Path | None,
    typer.Option(
        "--allow-code",
        metavar="DIR",
        help="Run code in this folder to build models such as DIR/net.py:make; without it, no code of yours is run.",
    ),
]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@verb("Serve the what-if page and JSON over HTTP.")
def serve(
    debug: bool,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 127.0.0.1 is reached from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8777,
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote", help="Listen on an address that others can reach; there is no password."
        ),
    ] = False,
    limit_s: Annotated[
        float,
        typer.Option("--limit-s", help="Longest processor time for tracing one model [s].", min=1.0),
    ] = 60.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Name by which others reach the server, such as forerun.example.org; may be repeated. Requests for "
            "other names are refused.",
        ),
    ] = None,
    allow_code: AllowCodeOption = None,
    tls: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--tls", metavar="CERT KEY", help="Files of a certificate and its key: serve HTTPS."),
    ] = None,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm", help="Load the libraries that trace models before listening: 5 s and 1 GB of memory."
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Write no log line for each request to stderr.")
    ] = False,
) -> None:
    """Serve the what-if page and the same JSON over HTTP."""
    require("forerun serve", "fastapi", "uvicorn", "prometheus_client")
    if host not in _LOOPBACK and not allow_remote:
        raise UsageError(
            f"'{host}' can be reached by others, and there is no password; add --allow-remote to allow it"
        )
    from forerun.surface.web.app import make_app

    with quiet_libraries(debug=debug):
        hosts, code = _hosts(host, allow_host), _code_folder(allow_code)
        app = make_app(limit_s=limit_s, hosts=hosts, code=code, is_warm=warm)
        _serve(host, port, app, tls, quiet=quiet, debug=debug)


def _code_folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise UsageError(f"expected a folder for --allow-code, got '{path}'; name the folder of the code")
    return None if path is None else path.resolve()


def _hosts(host: str, allowed: list[str] | None) -> list[str]:
    """Host names that requests may use: the address that is listened on, those allowed, and any on a public address."""
    return [host, *(allowed or []), *(["*"] if host not in _LOOPBACK else [])]


def _serve(
    host: str, port: int, app: Any, tls: tuple[Path, Path] | None, *, quiet: bool, debug: bool
) -> None:
    from forerun.surface.web.app import make_server
    from forerun.surface.web.guard import REQUEST_LOG

    listener = _listener(host, port)
    if not quiet:
        REQUEST_LOG.addHandler(logging.StreamHandler(sys.stderr))
        REQUEST_LOG.setLevel(logging.INFO)
        REQUEST_LOG.propagate = False
    server = make_server(app, debug=debug, tls=tls)
    found_port = listener.getsockname()[1]
    typer.echo(
        f"forerun at http{'s' if tls else ''}://{'[::1]' if host == '::1' else host}:{found_port}/ (Ctrl-C ends it)",
        err=True,
    )
    status = 0
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt as error:  # raised again by the server once it has ended
        typer.echo(error_line(error), err=True)
        status = exit_status(error)
    # A computation that nobody waits for any more must not hold up the end.
    sys.stderr.flush()
    os._exit(status)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise FailureError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; take another with --port or --host"
        ) from error


@verb("Serve the questions as tools for agents and editors.")
def mcp(allow_code: AllowCodeOption = None) -> None:
    """Serve the questions as tools of the Model Context Protocol, over stdin and stdout."""
    require("forerun mcp", "mcp")
    from forerun.surface.web.agent import make_server

    make_server(_code_folder(allow_code)).run("stdio")
