"""The HTTP server around the application: slow connections are closed, and a signal ends it within seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from forerun.base.errors import UsageError

HEADER_TIMEOUT_S = 10.0
"""Longest time in which the head of a request must arrive after the connection or its last answer [s]."""
_GRACE_S = 3
"""Time that answers in work have after a signal [s]."""
_KEEP_ALIVE_S = 30
_LEAST_FILES = 16_384
_SWITCH_INTERVAL_S = 0.0005
"""Time after which a thread that computes lets one go on that answers; Python's own is ten times as long [s]."""

_Protocol: Any = AutoHTTPProtocol


class _TimedProtocol(_Protocol):  # type: ignore[misc]
    """A connection that is closed if the head of a request does not arrive in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waits_since_s = time.monotonic()
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # The first byte of a later request starts the clock again.
        if self.timeout_keep_alive_task is not None:
            self._waits_since_s = time.monotonic()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._waits_since_s = time.monotonic()
        super().on_response_complete()

    def _look(self) -> None:
        is_busy = self.cycle is not None and not self.cycle.response_complete
        is_idle = self.timeout_keep_alive_task is not None  # uvicorn itself closes it
        left_s = HEADER_TIMEOUT_S - (time.monotonic() - self._waits_since_s)
        if not is_busy and not is_idle and left_s <= 0:
            self.transport.close()
            return
        self._timer = self.loop.call_later(max(left_s, 1.0), self._look)


class _Server(uvicorn.Server):
    """A server that tells its application about the end, so that waiting questions are answered at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the end."""
        super().handle_exit(sig, frame)
        self.config.app.state.close_soon()  # type: ignore[union-attr]


def make_server(app: FastAPI, *, debug: bool, tls: tuple[Path, Path] | None = None) -> uvicorn.Server:
    """The server of an application.

    Args:
        app: From ``make_app``.
        debug: True logs what the library does.
        tls: Files of a certificate and its key; None serves plain HTTP.

    Raises:
        UsageError: The certificate or its key cannot be read.
    """
    _allow_many_sockets()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    settings = uvicorn.Config(
        app,
        log_level="info" if debug else "critical",
        access_log=debug,
        http=_TimedProtocol,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        server_header=False,
        ssl_certfile=tls and tls[0],
        ssl_keyfile=tls and tls[1],
    )
    try:
        settings.load()
    except OSError as error:  # of TLS too
        raise UsageError(
            f"--tls {' '.join(map(str, tls or ()))}: {error.strerror or error}; give files of a certificate and its key"
        ) from error
    return _Server(settings)


def _allow_many_sockets() -> None:
    """Raises the limit of open files, so that idle connections do not keep others out."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _LEAST_FILES if hard == resource.RLIM_INFINITY else min(hard, _LEAST_FILES)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
