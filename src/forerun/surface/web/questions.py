"""Questions over HTTP: strict types, bounds, and no names that reach into this machine's files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from forerun.base.errors import UsageError, near_matches
from forerun.base.extras import loaded, plugin
from forerun.question.model import find_architecture
from forerun.question.options import RunOptions, ScaleOptions
from forerun.question.settings import declared, field_type, setting_fields
from forerun.search.options import DEFAULT_BATCH_SIZES, PlanOptions
from forerun.search.search import USUAL_PRECISIONS, batch_sizes_of, expand_models, searched_values
from forerun.surface.web.reach import (
    CAPTURE_NAME,
    CONFIG_NAME,
    MOST_VALUES,
    TRACE_NAME,
    Reach,
    code_of,
    config_file,
)
from forerun.tracing.trace import full_name

MAX_HTTP_CANDIDATES = 20_000

_MODEL = re.compile(
    r"(?:torchvision|timm):[A-Za-z0-9_.]+|(?:[a-z][a-z0-9-]*|keras:[A-Za-z][A-Za-z0-9.-]*)(?::[a-z0-9_=,.|]*)?"
)
_FILES = (".py", ".keras", ".h5", ".hdf5")
_DEVICE = re.compile(r"[A-Za-z0-9 ()_.+*×-]+")
_HERE = re.compile(
    r"(?<![a-wyz])here(?![a-wyz])", re.IGNORECASE
)  # alone, and in forms such as 1xhere and herex2
_LINK = re.compile(r"[A-Za-z0-9 ().-]+")
_GROUPS = re.compile(r"[+,]")
_FAMILY_NUMBER = re.compile(r"\d+")
_LARGEST_FAMILY_NUMBER = 4096
_LARGEST_DEPTH = 512

Name = Annotated[str, Field(min_length=1, max_length=200)]


_NO_FILES = Reach()


def check_model_name(model: str, reach: Reach = _NO_FILES) -> str:
    """A model's name, if it names a model of a library or a family and no file but those that may be reached.

    Args:
        model: The name.
        reach: Captures that were sent, and the folder whose code may be run.

    Raises:
        UsageError: It names a file or code, or is not a name.
    """
    text = model.strip()
    if code_of(text) is not None and (reach.code is not None or not text.startswith("keras:")):
        reach.check_name(text)
        return text
    if CAPTURE_NAME.fullmatch(text) and reach.captures is not None:
        return f"capture:{reach.captures.file(text)}"
    if CONFIG_NAME.fullmatch(text):
        return config_file(text)
    # Names of the catalogue may hold a slash, as a path does.
    if find_architecture(text) is not None and not text.startswith("hf:"):
        return text
    if (
        text.startswith(("hf:", "onnx:", "mlpredict:", "capture:"))
        or any(ending in text for ending in _FILES)
        or "/" in text
        or "\\" in text
    ):
        raise UsageError(
            f"'{text}' names a file: over HTTP only families and models of torchvision, timm and Keras are answered; "
            "use the command line for files and code of your own"
        )
    if not _MODEL.fullmatch(text) and full_name(text) == text:
        raise UsageError(
            f"expected a family such as cnn:depth=4, torchvision:NAME, timm:NAME or keras:NAME, got '{text}'; see "
            "/models"
        )
    if not full_name(text).startswith(("torchvision:", "timm:")):
        _check_family_size(text.removeprefix("keras:"))
    return text


def _check_family_size(text: str) -> None:
    # A network of thousands of layers would keep the tracer busy for minutes.
    numbers = [int(number) for number in _FAMILY_NUMBER.findall(text.partition(":")[2])]
    largest = _LARGEST_DEPTH if text.startswith("cifar-resnet:") else _LARGEST_FAMILY_NUMBER
    if any(number > largest for number in numbers):
        raise UsageError(
            f"sizes above {largest} are not answered over HTTP, got '{text}'; use the command line"
        )


def _of_catalogue(name: str, form: re.Pattern[str], what: str, otherwise: str = "") -> str:
    text = name.strip()
    if text.lower().endswith(".toml") or not form.fullmatch(text):
        raise UsageError(f"expected a {what}, got '{text}'{otherwise}")
    return text


def check_device_name(device: str) -> str:
    """A device's name, if it can only be one of the catalogue.

    Raises:
        UsageError: It names a file or this machine.
    """
    text = _of_catalogue(device, _DEVICE, "device of the catalogue", "; see /hardware")
    if _HERE.search(text):
        raise UsageError("'here' is not answered over HTTP; name the device, see /hardware")
    return text


def check_links(found: dict[str, Any]) -> None:
    """Strips the links of a question, which can only be of the catalogue.

    Raises:
        UsageError: One names a file.
    """
    for name in _LINKS & found.keys():
        found[name] = _of_catalogue(found[name], _LINK, "link of the catalogue such as infiniband-hdr")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _whole_floats(cls, value: Any) -> Any:
        # JSON knows one kind of number: a slider may send 32.0 for 32.
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value

    def given(self) -> dict[str, Any]:
        """The settings that were given, by their names in Python."""
        return {name: value for name, value in self.model_dump(by_alias=True).items() if value is not None}


class RunBody(_Body):
    """The parts that all questions about one run share."""

    model: Name = Field(examples=["torchvision:resnet50"])
    device: Name = Field(examples=["a100-sxm4-40gb"])
    intra: Name | None = None
    inter: Name | None = None

    def arguments(self, reach: Reach = _NO_FILES) -> dict[str, Any]:
        """Arguments of the package's function.

        Raises:
            UsageError: A name reaches beyond the catalogue and the libraries.
        """
        found = self.given()
        found["model"] = check_model_name(self.model, reach)
        found["device"] = check_device_name(self.device)
        check_links(found)
        if found.get("trace") and reach.captures is not None:
            found["trace"] = [str(reach.captures.file(name)) for name in found["trace"]]
        return found


_MEMBER = re.compile(r"<[\w.]+: ('[^']*')>")
"""A choice as the checks of types write it."""


def wrong_values(found: Iterable[Mapping[str, Any]], known: Iterable[str]) -> str:
    """Errors of a question that the checks of types found, in one line: each setting once, with the value that came.

    Args:
        found: Errors of pydantic.
        known: Names of the settings of the question, to name the nearest.
    """
    said: dict[str, str] = {}
    names = list(known)
    for part in found:
        place = [word for word in part["loc"] if word != "body"]
        name = str(place[0]) if place else "body"
        wanted = _MEMBER.sub(r"\1", part["msg"]).removeprefix("Input should be ")
        if part["type"] == "extra_forbidden" and len(place) == 1:
            words = f"unknown setting {name[:60]!r}{near_matches(name, names)}; leave it out"
        elif part["type"] == "missing":
            words = f"{name}: expected a value, got none"
        else:
            words = f"{name}: expected {wanted}, got {part['input']!r:.60}"
        # Of a value that fits none of several types the first is said, not one sentence for each type.
        said.setdefault(name, words)
    return "; ".join(said.values())


_LINKS = {"intra", "inter"}
_LENGTHS: dict[str, Any] = {
    "lengths": (
        Annotated[
            list[Annotated[int, Field(ge=1, le=10_000_000)]], Field(min_length=1, max_length=MOST_VALUES)
        ]
        | Annotated[str, Field(pattern=r"^(lognormal:[a-z0-9=,.]+|[0-9][0-9,]*)$", max_length=20_000)]
        | None,
        Field(default=None, examples=[[180, 420, 1100], "lognormal:median=600,p95=3000"]),
    )
}
"""Lengths of samples as numbers or a law: files of the server are named by nobody."""


def _of(name: str) -> Any:
    """The type of a setting of a run."""
    return field_type(declared(RunOptions)[name], over_http=True)


def _list(kind: Any, most: int, least: int = 1) -> Any:
    return Annotated[list[kind], Field(min_length=least, max_length=most)]


_AXES: dict[str, Any] = {
    "batch_sizes": (_list(_of("batch_size"), 1024) | None, None),
    "precisions": (_list(_of("precision"), 6) | None, None),
    "layouts": (_list(_of("layout"), 2) | None, None),
    "image_sizes": (_list(_of("image_size"), 8, 0), []),
    "within": (_list(Annotated[str, Field(max_length=80)], 12, 0), []),
    "minimize": (Literal["time", "cost", "energy", "co2"], "time"),
    "price_usd_per_hour": (
        _of("price_usd_per_hour") | dict[Name, _of("price_usd_per_hour")] | None,  # type: ignore[misc]
        None,
    ),
    "price_kinds": (_list(Literal["on-demand", "spot", "reserved-1y", "reserved-3y"], 4), ["on-demand"]),
    "providers": (_list(Annotated[str, Field(max_length=20)], 10, 0), []),
    "max_rejected": (Annotated[int, Field(ge=0, le=1000)], 50),
}


_MEASURED: dict[str, Any] = {
    "measured": (
        Annotated[str, Field(max_length=40)] | Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
        Field(default=None, examples=["0.41 s", "1200 samples/s"]),
    ),
    "trace": (_list(Annotated[str, Field(pattern=TRACE_NAME)], 16) | None, None),
    "gpu_utilization": (Annotated[float, Field(ge=0, le=1)] | None, None),
}


class PlanRequest(_Body):
    """The settings of a question about a plan."""

    models: Annotated[list[Name], Field(min_length=1, max_length=16)] = Field(examples=[["cnn:depth=2..4"]])
    devices: Annotated[list[Name], Field(min_length=1, max_length=24)] = Field(examples=[["t4", "l4"]])

    def arguments(self, reach: Reach = _NO_FILES) -> dict[str, Any]:
        """Arguments of ``forerun.plan``.

        Raises:
            UsageError: A name reaches beyond the catalogue and the libraries, or there are too many candidates.
        """
        found = self.given()
        models = expand_models(";".join(check_model_name(model, reach) for model in self.models))
        found["devices"] = [check_device_name(device) for device in self.devices]
        check_links(found)
        configurations = (
            len(models)
            * len(found.get("precisions") or USUAL_PRECISIONS)
            * len(found.get("layouts") or [None])
            * max(1, len(found["image_sizes"]))
        )
        for values in searched_values(found.get("search", ()), found, models).values():
            configurations *= len(values)
        # Counted before anything is traced: one question must not hold the server for minutes.
        if configurations > 64:
            raise UsageError(
                "at most 64 combinations of model, precision, layout, image size and searched settings are answered "
                f"over HTTP, got {configurations}"
            )
        sizes = batch_sizes_of(found.get("batch_sizes", DEFAULT_BATCH_SIZES))
        count = configurations * len(self.devices) * len(sizes)
        if count > MAX_HTTP_CANDIDATES:
            raise UsageError(
                f"at most {MAX_HTTP_CANDIDATES:,} candidates are answered over HTTP, got {count:,}"
            )
        found["models"] = models
        return found


def options_of(verb: str, name: str) -> type | None:
    """The declaration of the settings of a satellite's question; None where this installation lacks it."""
    try:
        found = plugin("forerun.verbs", verb)
    except UsageError:
        return None
    options: type | None = None if found is None else vars(loaded(found.questions[name]))["options"]
    return options


def _fields_of(verb: str, name: str) -> dict[str, Any]:
    options = options_of(verb, name)
    return {} if options is None else setting_fields(options, over_http=True)


_Column = Annotated[str, Field(min_length=1, max_length=60)]
_Values = Annotated[list[float | None], Field(min_length=1, max_length=MOST_VALUES)]
_Curve = _Values | Annotated[dict[_Column, _Values], Field(min_length=1, max_length=64)]


class ForecastRequest(_Body):
    """The parts of a question about the end of a run: values of its metric, one an epoch, or columns of its log."""

    run: _Curve = Field(examples=[{"epoch": [1, 2, 3, 4, 5], "val_accuracy": [0.31, 0.42, 0.5, 0.55, 0.58]}])
    history: Annotated[list[_Curve], Field(max_length=32)] = []
    devices: Annotated[list[Name], Field(max_length=24)] = []

    def arguments(self, reach: Reach = _NO_FILES) -> dict[str, Any]:
        """Arguments of ``forerun.forecast``.

        Raises:
            UsageError: A name reaches beyond the catalogue and the libraries.
        """
        found = self.given()
        found["devices"] = [check_device_name(device) for device in self.devices]
        if "model" in found:
            found["model"] = check_model_name(found["model"], reach)
        return found


class ScheduleRequest(_Body):
    """The parts of a question about jobs on a cluster; the rows are those of a jobs file, see docs/files.md."""

    jobs: Annotated[list[dict[_Column, Any]], Field(min_length=1, max_length=200)] = Field(
        examples=[[{"name": "a", "points": "1:100 2:190", "batch_size": 64, "steps": 9000}]]
    )
    cluster: Name = Field(examples=["2x4xt4"])
    policies: Annotated[list[Name], Field(min_length=1, max_length=32)] | None = None

    def arguments(self, reach: Reach = _NO_FILES) -> dict[str, Any]:
        """Arguments of ``forerun.schedule``.

        Raises:
            UsageError: A name reaches beyond the catalogue and the libraries.
        """
        found = self.given()
        for group in _GROUPS.split(self.cluster):
            check_device_name(group)
        check_links(found)
        models = [row.get("model") for row in self.jobs]
        others = [{name: value for name, value in row.items() if name != "model"} for row in self.jobs]
        _NO_FILES.check({"jobs": others}, declared(RunOptions))
        found["jobs"] = [
            row | {"model": check_model_name(model, reach)} if isinstance(model, str) else row
            for row, model in zip(self.jobs, models, strict=True)
        ]
        return found


if TYPE_CHECKING:
    PredictBody = RunBody
    ScaleBody = RunBody
    DiagnoseBody = RunBody
    PlanBody = PlanRequest
    ForecastBody = ForecastRequest
    ScheduleBody = ScheduleRequest
else:  # made from the declarations: a type checker knows the settings from these

    def _body(verb: str, base: type[BaseModel], fields: Mapping[str, Any]) -> type[BaseModel]:
        words = f"A question for ``forerun {verb}``; names are those of ``forerun.{verb}``."
        return create_model(f"{verb.title()}Body", __base__=base, __doc__=words, **fields)

    PredictBody = _body(
        "predict", RunBody, _LENGTHS | setting_fields(RunOptions, without=_LINKS, over_http=True)
    )
    DiagnoseBody = _body("diagnose", PredictBody, _MEASURED)
    ScaleBody = _body(
        "scale", RunBody, _LENGTHS | setting_fields(ScaleOptions, without=_LINKS, over_http=True)
    )
    PlanBody = _body(
        "plan", PlanRequest, _AXES | _LENGTHS | setting_fields(PlanOptions, without=_AXES, over_http=True)
    )
    ForecastBody = _body("forecast", ForecastRequest, _fields_of("forecast", "run"))
    ScheduleBody = _body("schedule", ScheduleRequest, _fields_of("schedule", "jobs"))
