"""Answers of the server: validated questions in, the JSON of the command line out."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

from pydantic import ValidationError

import forerun
from forerun.base.errors import ForerunError, UsageError
from forerun.base.kept import KeptBytes
from forerun.prediction.models import kept_model_names, model_names, trace_model
from forerun.question.devices import load_catalog
from forerun.question.devices.prices import Rental, cheapest_rental, currencies, load_prices
from forerun.question.job import DATASETS
from forerun.question.model import ModelRequest, captured_facts, is_captured
from forerun.question.options import RunOptions
from forerun.question.run import Run
from forerun.question.settings import declared
from forerun.question.setup import TrainingSetup
from forerun.search import plan, scale
from forerun.surface.web.load import Tracer
from forerun.surface.web.questions import PlanBody, PredictBody, ScaleBody, wrong_values
from forerun.surface.web.reach import Captures, question
from forerun.tracing.trace import is_traced

_ANSWERS_BYTES = 64 * 2**20
"""Size of all answers that are kept [bytes]."""
Kind = Literal["predict", "scale", "plan", "diagnose", "forecast", "schedule"]
OF_CHILDREN = ("forecast", "schedule")
"""Questions that a child answers whole: they trace models, and may take long."""
Trace = tuple[ModelRequest, TrainingSetup, bool]
_FIRST: dict[str, Any] = {
    "model": "llama-3.2-1b",
    "device": "8xa100-sxm4-80gb",
    "strategy": "fsdp",
    "precision": "bf16",
    "sequence_length": 2048,
    "optimizer": "adamw",
}
"""A question whose graph comes with the package."""
_RUN_ARGUMENTS = {"model", "device", *declared(RunOptions)}


def _price(rental: Rental | None) -> dict[str, Any] | None:
    if rental is None:
        return None
    price = rental.price
    return {
        "usd_per_hour": rental.usd_per_hour / price.num_devices,
        "provider": price.provider,
        "instance": price.instance,
        "date": price.date.isoformat(),
        "source": price.source,
    }


def _asked(kind: Kind, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a satellite's question."""
    found: dict[str, Any] = question(kind)(**arguments).as_dict()
    return found


class Answers:
    """Answers questions and keeps the answers; equal questions have equal answers."""

    def __init__(self, tracer: Tracer) -> None:
        self.captures = Captures()
        self._tracer = tracer
        self._tracing: dict[Trace, Future[None]] = {}
        self._kept: KeptBytes[bytes] = KeptBytes(_ANSWERS_BYTES)
        self._lock = threading.Lock()
        self._models: dict[str, Any] | None = None
        self._lists: dict[str, bytes] = {}

    @property
    def kept_bytes(self) -> int:
        """Size of the answers that are kept [bytes]."""
        return self._kept.size_bytes

    def warm(self) -> None:
        """Loads what a first question would wait for, here and in the children."""
        with suppress(ForerunError):  # a server without libraries answers what comes with the package
            self.whole("predict", PredictBody(**_FIRST))
            self._tracer.call(trace_model, ModelRequest(model=_FIRST["model"]), TrainingSetup())

    def predict_of(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The same of settings by their names, checked as those of a request.

        Raises:
            UsageError: A setting is unknown or impossible.
        """
        try:
            body = PredictBody(**settings)
        except ValidationError as error:
            raise UsageError(wrong_values(error.errors(), PredictBody.model_fields)) from None
        return self.whole("predict", body)

    def whole(self, kind: Kind, body: PredictBody | ScaleBody | PlanBody) -> dict[str, Any]:
        """The JSON of ``forerun predict``, ``scale`` or ``plan``."""
        arguments = body.arguments()
        for trace in self.missing(kind, arguments):
            self.trace(trace)
        answer: dict[str, Any] = json.loads(self.make(kind, arguments))
        return answer

    def kept(self, kind: Kind, arguments: Mapping[str, Any]) -> bytes | None:
        """The answer to an earlier equal question as JSON, None if there is none."""
        return self._kept.find(_key(kind, arguments))

    def missing(self, kind: Kind, arguments: dict[str, Any]) -> list[Trace]:
        """The traces that a question needs and the cache does not have."""
        asked = dict.fromkeys(trace for run in _runs(kind, arguments) for trace in _traces(run))
        return [trace for trace in asked if not is_captured(trace[0].model) and not is_traced(*trace)]

    def trace(self, trace: Trace) -> None:
        """Makes a child trace a model; several questions that need it wait for one trace.

        Raises:
            UsageError, FailureError: It cannot be traced.
        """
        with self._lock:
            running = self._tracing.get(trace)
            if running is None:
                own = self._tracing[trace] = Future()
        if running is not None:
            running.result()
            return
        try:
            self._tracer.call(trace_model, *trace)
            own.set_result(None)
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._tracing[trace]

    def make(self, kind: Kind, arguments: dict[str, Any]) -> bytes:
        """The answer as JSON, once its models are traced."""
        if kind in OF_CHILDREN or arguments.get("trace"):  # a file of somebody else is read by a child
            found = self._tracer.call(_asked, kind, arguments, what="the question")
        else:
            found = getattr(forerun, kind)(**arguments).as_dict()
        text = json.dumps(found, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        answer = self.captures.public(text).encode()
        self._kept.keep(_key(kind, arguments), answer, len(answer))
        return answer

    def listed(self, name: Literal["hardware", "models", "datasets", "currencies"]) -> bytes:
        """A list as JSON, which is made once."""
        if name not in self._lists:
            self._lists[name] = json.dumps(
                getattr(self, name)(), allow_nan=False, ensure_ascii=False
            ).encode()
        return self._lists[name]

    def hardware(self) -> dict[str, Any]:
        """The JSON of ``forerun hardware list``, with the lowest price on demand of each device."""
        prices = load_prices()
        return {
            "devices": [
                {**device.as_dict(), "price": _price(cheapest_rental(prices, device.name))}
                for device in load_catalog().values()
            ]
        }

    def keep_capture(self, content: bytes) -> dict[str, Any]:
        """Keeps a file of ``forerun capture`` for the other questions once a child has read it whole.

        Raises:
            UsageError: It is no capture, or damaged.
        """
        name = self.captures.keep(content)
        model = f"capture:{self.captures.file(name)}"
        title = self._read(name, trace_model, ModelRequest(model=model), TrainingSetup())
        facts = captured_facts(model)
        assert facts is not None
        return {"model": name, "title": title, "settings": facts.settings() | facts.sharing_settings()}

    def keep_trace(self, content: bytes) -> dict[str, Any]:
        """Keeps a trace of PyTorch's profiler for ``/diagnose``, once a child has read it, and judges it alone.

        Raises:
            UsageError: It is no trace, or damaged.
        """
        name = self.captures.keep(content, "trace")
        found = self._read(name, _asked, "diagnose", {"trace": [str(self.captures.file(name))]})
        return {"trace": name, "diagnosis": found}

    def _read(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a child that reads a kept file; a file that it refuses goes."""
        try:
            return self._tracer.call(work, *arguments)
        except ForerunError as error:
            self.captures.file(name).unlink(missing_ok=True)
            raise type(error)(self.captures.public(str(error))) from error

    def models(self) -> dict[str, Any]:
        """Names of models; the very first call loads their libraries, in a child."""
        if self._models is None:
            self._models = kept_model_names() or self._tracer.call(model_names)
        return self._models

    @property
    def knows_models(self) -> bool:
        """True if the names of models are at hand."""
        if self._models is None:
            self._models = kept_model_names()
        return self._models is not None

    def datasets(self) -> dict[str, Any]:
        """Datasets by name, with their sizes."""
        sizes = ("name", "num_training_samples", "num_validation_samples")
        return {"datasets": [{key: getattr(one, key) for key in sizes} for one in DATASETS.values()]}

    def currencies(self) -> dict[str, Any]:
        """Currencies in which amounts may be shown, with their rates [USD]."""
        fields = ("code", "sign", "usd", "words")
        found = [{key: getattr(one, key) for key in fields} for one in currencies().values()]
        return {"currencies": found}


def _key(kind: Kind, arguments: Mapping[str, Any]) -> str:
    return f"{kind} {json.dumps(arguments, sort_keys=True)}"


def _runs(kind: Kind, arguments: dict[str, Any]) -> Iterator[Run]:
    """The runs of a question whose models are traced."""
    if kind in ("predict", "diagnose"):
        yield Run.of(**{name: value for name, value in arguments.items() if name in _RUN_ARGUMENTS})
    elif kind == "scale":
        given = {name: value for name, value in arguments.items() if name not in ("model", "device")}
        yield from scale.runs_to_trace(arguments["model"], arguments["device"], given)
    else:
        yield from plan.runs_to_trace(arguments["models"], arguments)


def _traces(run: Run) -> Iterator[Trace]:
    yield run.model, run.compute_setup, run.uses_layout
    if run.validation_setup is not None:
        yield run.model, run.validation_setup, False
