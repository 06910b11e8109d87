"""The guard before the questions: hosts, sizes and times of requests, headers of answers, and a log line of each."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.surface.web.load import Figures
from forerun.surface.web.reach import MOST_CAPTURE_BYTES

MAX_BODY_BYTES = 64 * 1024
_MOST_BYTES = {"/captures": MOST_CAPTURE_BYTES, "/traces": MOST_CAPTURE_BYTES, "/forecast": 2**20}
"""Largest bodies of paths that take files or whole logs [bytes]."""
BODY_TIMEOUT_S = 10.0
"""Longest time in which the body of a request must arrive [s]."""
REQUEST_LOG = logging.getLogger("forerun.requests")
"""Receives one line of JSON for each request."""

# Everything the page needs comes from here; no script may be loaded from elsewhere, no frame may hold the page.
_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def problem(status: int, text: str, retry_after_s: int | None = None) -> JSONResponse:
    """An error as an answer."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return JSONResponse({"error": " ".join(text.split())}, status, headers=headers)


class Guard:
    """Refuses requests for other hosts and bodies that are too large or too slow; logs and counts every request.

    Args:
        app: The application.
        figures: Figures of the server.
        hosts: Names by which the server is reached besides the loopback ones. An empty list stands for the loopback
            names alone; with ``*`` in it every IP address is accepted too. A page of another site that lets its own
            name point here (DNS rebinding) has another name, and is refused.
    """

    def __init__(self, app: ASGIApp, figures: Figures, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._figures = figures
        self._hosts = {host.lower() for host in (*_LOOPBACK, *hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        # Start and end of the server come this way as well, and are no requests.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            await self._pass_on(scope, receive, send_with_headers)
        finally:
            self._note(scope, status, time.perf_counter() - began_s)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _host_of(scope)
        if not self._is_known(host):
            text = (
                f"this server does not answer for '{host[:100]}'; use its address, or serve with --allow-host"
            )
            await problem(421, text)(scope, receive, send)
            return
        most_bytes = _MOST_BYTES.get(scope["path"], MAX_BODY_BYTES)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _body(receive, most_bytes)
        except TimeoutError:
            text = f"the question did not arrive within {BODY_TIMEOUT_S:g} s; send it at once"
            response: Response = problem(408, text)
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        if body is None:
            text = f"a question has at most {most_bytes:,} bytes; ask for less"
            await problem(413, text)(scope, receive, send)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _is_known(self, host: str) -> bool:
        return host in self._hosts or ("*" in self._hosts and _is_address(host))

    def _note(self, scope: Scope, status: int, time_s: float) -> None:
        # Paths of the application only: a client must not make up figures.
        route = scope.get("route")
        path = getattr(route, "path", "other") or "other"
        self._figures.count(path, status, time_s)
        client = scope.get("client")
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": client[0] if client else None,
            "method": scope["method"][:20],
            "path": scope["path"][:200],
            "status": status,
            "time_s": round(time_s, 4),
        }
        REQUEST_LOG.info(json.dumps(line))


def _host_of(scope: Scope) -> str:
    value = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
    name = value.rpartition(":")[0] if value.rpartition(":")[2].isdigit() else value
    return name.strip("[]").lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _body(receive: Receive, most_bytes: int) -> bytes | None:
    """The body of a request, None if it is too large or its sender is gone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > most_bytes:
            return None
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
