"""The server: questions over HTTP, one page, errors as JSON.

Cheap questions never wait for expensive ones: lists and answers that are kept are given at once, arithmetic has
threads of its own, models that must be traced have others, and each has a bounded number of waiting questions. Slow
connections are closed, and a signal ends the server within seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import mimetypes
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from forerun import __version__
from forerun.base.errors import FailureError, ForerunError, UsageError
from forerun.base.isolation import MOST_TIMES_THE_LIMIT, TimeLimit
from forerun.surface.web.answers import OF_CHILDREN, Answers, Kind
from forerun.surface.web.guard import Guard, problem
from forerun.surface.web.load import BusyError, ClientLimit, Figures, Lane, Tracer
from forerun.surface.web.questions import (
    DiagnoseBody,
    ForecastBody,
    PlanBody,
    PredictBody,
    ScaleBody,
    ScheduleBody,
    wrong_values,
)
from forerun.surface.web.reach import Reach, kept_config, question
from forerun.tracing.source import TRACED_MODULES

_STATIC = Path(__file__).parent / "static"
_NUM_TRACED_AT_ONCE = 2
_NUM_WAITING = 8
_NUM_COMPUTED_AT_ONCE = 2
"""Predictions are arithmetic: more threads than these would only wait for each other."""
_NUM_COMPUTED_WAITING = 200
_MOST_OF_A_CLIENT = 4
_LARGE_PLAN = 2000
"""Candidates from which on a plan does not compete with small questions."""
_RETRY_AFTER_S = 5
_FORGET_EVERY_S = 60.0
_BYTES = "application/octet-stream"
_A_FILE = {
    "requestBody": {"required": True, "content": {_BYTES: {"schema": {"type": "string", "format": "binary"}}}}
}
_QUESTIONS: Mapping[Kind, tuple[type[BaseModel], str]] = {
    "predict": (PredictBody, "Time, memory and cost of a training job"),
    "scale": (ScaleBody, "Throughput of a training job on more and more devices"),
    "plan": (PlanBody, "The best configuration under limits"),
    "diagnose": (DiagnoseBody, "A measured step beside its prediction"),
    "forecast": (ForecastBody, "The end of a training run from its first epochs"),
    "schedule": (ScheduleBody, "A cluster shared among jobs, and policies compared"),
}
"""Questions with the form of their bodies and their lines in the document."""
_ADMISSION_S = 4.5
"""Longest wait for the size of a TrainJob [s]: the API server of Kubernetes waits for 5 s."""
_OF_LANGUAGE_MODELS = ("transformers.models.llama.modeling_llama",)
"""A module that loads all that models of Transformers share, which is most of the time of their first trace."""
_BODY = "expected a question as an object of JSON, got a body that is none; see /openapi.json"


class Problem(BaseModel):
    """An error: the expectation, the value given, and the next step."""

    error: str


class _ClosingError(Exception):
    """The server ends before the answer is ready."""


class _Desk:
    """Answers questions without letting cheap ones wait for expensive ones."""

    def __init__(self, answers: Answers, tracer: Tracer, limit_s: float, code: Path | None) -> None:
        self.answers = answers
        self.tracer = tracer
        self.limit_s = limit_s
        self.reach = Reach(code=code, captures=answers.captures)
        self.tracing = Lane("traced", _NUM_TRACED_AT_ONCE + _NUM_WAITING, 0)
        self.computing = Lane("computed", _NUM_COMPUTED_AT_ONCE, _NUM_COMPUTED_WAITING)
        self.planning = Lane("planned", 1, _NUM_WAITING)
        self.clients = ClientLimit(_MOST_OF_A_CLIENT)
        self.listing = asyncio.Lock()
        self._closing: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begins, inside the loop of the server."""
        self._closing, self._loop = asyncio.Event(), asyncio.get_running_loop()

    def close_soon(self) -> None:
        """Answers waiting questions with 503; may be called from anywhere."""
        if self._loop is not None and self._closing is not None:
            self._loop.call_soon_threadsafe(self._closing.set)

    def close(self) -> None:
        """Ends all work."""
        for lane in (self.tracing, self.computing, self.planning):
            lane.close()
        self.tracer.close()
        self.answers.captures.close()

    async def forget_captures(self) -> None:
        """Removes the captures that nobody asks for, until the server ends."""
        while True:
            await asyncio.sleep(_FORGET_EVERY_S)
            self.answers.captures.forget()

    async def answer(self, kind: Kind, body: Any, client: str) -> Response:
        """The answer to a question as JSON."""
        arguments = body.arguments(self.reach)
        kept = self.answers.kept(kind, arguments)
        if kept is not None:
            return Response(kept, media_type="application/json")
        if kind in OF_CHILDREN:
            with self.clients.question(client):
                made = await self.traced(self.answers.make, kind, arguments)
            return Response(made, media_type="application/json")
        lane = self.planning if _is_large(kind, arguments) else self.computing
        missing = await self.in_time(self.computing.run(self.answers.missing, kind, arguments))
        if missing:
            with self.clients.question(client):
                for trace in missing:
                    await self.traced(self.answers.trace, trace)
        made = await self.in_time(lane.run(self.answers.make, kind, arguments))
        return Response(made, media_type="application/json")

    async def kept(
        self, work: Callable[[bytes], dict[str, Any]], request: Request, origin: str
    ) -> JSONResponse:
        """The answer to a file that is sent; a refusal of another type says what the file is made by."""
        if request.headers.get("content-type") != _BYTES:  # no form of another site sends this type
            raise HTTPException(415, f"expected a file of {origin} as {_BYTES}")
        with self.clients.question(_client(request)):
            found = self.tracing.run(work, await request.body())
            return JSONResponse(await self.in_time(found))

    async def traced(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of work for which a child traces; its own limit counts processor time."""
        longest_s = MOST_TIMES_THE_LIMIT * 2 * self.limit_s  # for what waits for a child
        return await self.in_time(self.tracing.run(work, *arguments), TimeLimit(longest_s))

    async def in_time(self, work: Awaitable[Any], limit: TimeLimit | None = None) -> Any:
        """The result of some work.

        Args:
            work: The work.
            limit: Its limit; None for twice the limit of a trace, as far as this process has had a processor.

        Raises:
            TimeoutError: It took too long.
            _ClosingError: The server ends.
        """
        limit = TimeLimit(2 * self.limit_s, time.process_time) if limit is None else limit
        task = asyncio.ensure_future(work)
        if self._closing is None:
            self.open()
        assert self._closing is not None
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            done: set[asyncio.Future[Any]] = set()
            while not (done or limit.is_over()):
                done, _ = await asyncio.wait(
                    {task, closing}, timeout=limit.left_s, return_when=asyncio.FIRST_COMPLETED
                )
            if task not in done and closing in done:
                # What is nearly ready is still given.
                done, _ = await asyncio.wait({task}, timeout=1.0)
                if task not in done:
                    raise _ClosingError
            if task not in done:
                raise TimeoutError
            return task.result()
        finally:
            closing.cancel()
            if not task.done():
                task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def _is_large(kind: Kind, arguments: dict[str, Any]) -> bool:
    if kind != "plan":
        return False
    axes = ("models", "devices", "batch_sizes", "precisions")
    return math.prod(max(1, len(arguments.get(axis) or ())) for axis in axes) > _LARGE_PLAN


def make_app(
    *,
    limit_s: float = 60.0,
    hosts: Iterable[str] = (),
    code: Path | None = None,
    is_warm: bool = False,
) -> FastAPI:
    """The application.

    Args:
        limit_s: Time that tracing a model, or half of what any answer, may take on processors [s].
        hosts: Names by which the server is reached besides the loopback ones, see ``Guard``.
        code: Folder whose code is run to build models; None runs none.
        is_warm: Whether it listens only once the libraries that trace language models are loaded.
    """
    preload = (*TRACED_MODULES, *(_OF_LANGUAGE_MODELS if is_warm else ()))
    tracer = Tracer(limit_s, num_children=_NUM_TRACED_AT_ONCE, preload=preload)
    desk = _Desk(Answers(tracer), tracer, limit_s, code)
    figures = Figures()
    figures.watch("traces", "Models that are traced or wait for it", lambda: desk.tracing.num_calls)
    figures.watch(
        "computations", "Answers that are computed or wait for it", lambda: desk.computing.num_calls
    )
    figures.watch("kept_answers_bytes", "Size of the answers that are kept", lambda: desk.answers.kept_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        desk.open()
        if is_warm:
            desk.answers.warm()
        forgetting = asyncio.create_task(desk.forget_captures())
        yield
        forgetting.cancel()
        desk.close()

    app = FastAPI(
        title="forerun",
        version=__version__,
        summary="Know what a training run will take before you run it.",
        description="The same JSON as the command line prints with --json.",
        lifespan=lifespan,
        # Both would load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.close_soon = desk.close_soon
    app.add_middleware(Guard, figures=figures, hosts=tuple(hosts))
    _add_errors(app, limit_s)
    _add_questions(app, desk)
    _add_figures(app, figures)
    _add_page(app)
    return app


def _add_questions(app: FastAPI, desk: _Desk) -> None:
    problems: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem} for status in (400, 408, 413, 415, 421, 422, 429, 503)
    }
    answers = desk.answers

    for kind, (form, summary) in _QUESTIONS.items():
        app.post(f"/{kind}", responses=problems, summary=summary, name=kind)(_asked(desk, kind, form))

    @app.post("/trainjob", responses=problems, summary="Size of a TrainJob of Kubeflow before it is admitted")
    async def trainjob(document: dict[str, Any]) -> JSONResponse:
        # Not beside the cheap questions: it may wait for a trace, which goes on where this answer ends the wait.
        work = desk.tracing.run(question("trainjob"), document, answers.predict_of)
        try:
            return JSONResponse(await desk.in_time(work, TimeLimit(_ADMISSION_S)))
        except TimeoutError:
            return JSONResponse(question("trainjob")(document, _still_traced))

    @app.post("/configs", responses=problems, summary="Keep a Transformers configuration, and name it")
    async def configs(config: dict[str, Any]) -> JSONResponse:
        name = await desk.in_time(desk.computing.run(kept_config, config))
        return JSONResponse({"model": name})

    @app.post(
        "/captures", responses=problems, openapi_extra=_A_FILE, summary="Keep a captured step, and name it"
    )
    async def captures(request: Request) -> JSONResponse:
        return await desk.kept(answers.keep_capture, request, "'forerun capture'")

    @app.post(
        "/traces",
        responses=problems,
        openapi_extra=_A_FILE,
        summary="Judge and keep a profiler's trace, and name it",
    )
    async def traces(request: Request) -> JSONResponse:
        return await desk.kept(answers.keep_trace, request, "PyTorch's profiler")

    @app.get("/hardware", summary="Devices of the catalogue")
    async def hardware() -> Response:
        return Response(answers.listed("hardware"), media_type="application/json")

    @app.get("/models", summary="Models by name")
    async def models() -> Response:
        async with desk.listing:  # whoever waits for the first list takes no place of the traces
            if not answers.knows_models:
                await desk.traced(answers.models)
        return Response(answers.listed("models"), media_type="application/json")

    @app.get("/datasets", summary="Datasets by name")
    async def datasets() -> Response:
        return Response(answers.listed("datasets"), media_type="application/json")

    @app.get("/currencies", summary="Currencies with their rates")
    async def currencies() -> Response:
        return Response(answers.listed("currencies"), media_type="application/json")


def _asked(desk: _Desk, kind: Kind, form: type[BaseModel]) -> Callable[..., Awaitable[Response]]:
    async def asked(body: Any, request: Request) -> Response:
        return await desk.answer(kind, body, _client(request))

    asked.__annotations__["body"] = form
    return asked


def _client(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def _still_traced(settings: dict[str, Any]) -> dict[str, Any]:
    raise UsageError(f"{settings['model']} is being traced; create the job again in a minute")


def _add_figures(app: FastAPI, figures: Figures) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok", "version": __version__})

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _page_file(path: Path) -> Response:
    """A file of the page, in memory: the event loop gives it without the thread that reading a disk takes."""
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Response(content, media_type=kind, headers={"ETag": tag})


def _add_page(app: FastAPI) -> None:
    files = {
        str(path.relative_to(_STATIC)): _page_file(path) for path in _STATIC.rglob("*") if path.is_file()
    }

    @app.api_route("/static/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def static(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404)
        tag = files[name].headers["etag"]
        if request.headers.get("if-none-match") == tag:  # the browser has it
            return Response(status_code=304, headers={"ETag": tag})
        return files[name]

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await static("index.html", request)


def _add_errors(app: FastAPI, limit_s: float) -> None:
    @app.exception_handler(BusyError)
    async def busy(request: Request, error: BusyError) -> JSONResponse:
        return problem(error.status, str(error), _RETRY_AFTER_S)

    @app.exception_handler(_ClosingError)
    async def closing(request: Request, error: _ClosingError) -> JSONResponse:
        return problem(503, "the server ends just now; ask again when it is back", _RETRY_AFTER_S)

    @app.exception_handler(TimeoutError)
    async def late(request: Request, error: TimeoutError) -> JSONResponse:
        return problem(408, f"the answer took longer than {2 * limit_s:g} s; ask for less")

    @app.exception_handler(ForerunError)
    async def known(request: Request, error: ForerunError) -> JSONResponse:
        # The question is well formed either way: what cannot be answered is the question's fault, not the server's.
        return problem(422 if isinstance(error, FailureError) else 400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        form = next((form for kind, (form, _) in _QUESTIONS.items() if request.url.path == f"/{kind}"), None)
        return problem(422, wrong_values(error.errors(), form.model_fields if form else ()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        words = _BODY if error.detail == "There was an error parsing the body" else str(error.detail)
        return JSONResponse({"error": words}, error.status_code, headers=error.headers)


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
