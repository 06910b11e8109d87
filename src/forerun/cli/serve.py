"""``forerun serve``."""

from __future__ import annotations

import importlib.util
import socket
from typing import Annotated

import typer

from forerun.cli.options import DebugOption
from forerun.errors import FailureError, MissingExtraError, UsageError

__all__ = ["serve"]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
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
        float, typer.Option("--limit-s", help="Longest time of tracing one model [s].", min=1.0)
    ] = 60.0,
    debug: DebugOption = False,
) -> None:
    """Serve the what-if page and the same JSON over HTTP."""
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError("forerun serve", "web")
    if host not in _LOOPBACK and not allow_remote:
        raise UsageError(
            f"'{host}' can be reached by others, and there is no password; add --allow-remote to allow it"
        )
    import uvicorn

    from forerun.web.app import make_app

    listener = _listener(host, port)
    settings = uvicorn.Config(
        make_app(limit_s=limit_s), log_level="info" if debug else "warning", access_log=debug
    )
    found_port = listener.getsockname()[1]
    typer.echo(
        f"forerun at http://{'[::1]' if host == '::1' else host}:{found_port}/ (Ctrl-C ends it)", err=True
    )
    uvicorn.Server(settings).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise FailureError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; take another with --port or --host"
        ) from error
