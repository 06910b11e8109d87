"""Fitted regressors in files: load, save, and ask for the time of a step or of an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from forerun.adapters.classics.baselines import STORABLE_KINDS, GreyBox
from forerun.adapters.classics.layer_table import layer_case, layer_features
from forerun.adapters.classics.model_file import TrainedModel, load_model_file
from forerun.adapters.classics.network_regressors import LayerNetwork
from forerun.adapters.classics.step_features import whole_model_features
from forerun.base.errors import CostModelError, InvalidSetupError, UsageError, near_matches
from forerun.cost.time.weights import CostModel, is_cost_model
from forerun.evidence.fitting.evaluation import Floats
from forerun.evidence.records.measured_run import input_options_of, setup_of, software_of, whole_of
from forerun.evidence.records.model_names import network_sizes
from forerun.question.devices import find_device
from forerun.question.devices.catalogue import device_at, this_device
from forerun.question.devices.cluster import cluster_of
from forerun.question.devices.device import Device
from forerun.question.model import ModelRequest
from forerun.question.run import HERE, Run
from forerun.question.setup import Phase, TrainingSetup
from forerun.tracing.trace import trace

Config = Mapping[str, Any]

_SETTINGS = (
    "batch_size", "precision", "layout", "compile", "optimizer", "optimizer_implementation", "phase",
)  # fmt: skip

_PLACE = {"device": None, "framework_version": "", "framework": "pytorch"}

_INPUTS = ("image_size", "input_shape", "sequence_length", "num_classes")

_NAMES = ("model", "network")

# Columns of system A's records with results, or with the length of the training; a row may be asked about unchanged.
_OUTCOMES = (
    "num_params", "num_parameters", "dataset_size", "epochs", "time_per_epoch", "images_per_second", "max_gpu_mem_mb",
    "dataset", "num_epochs", "num_steps", "num_workers", "seed",
)  # fmt: skip

_SIZES = ("depth", "base_filters")

_LAYER = "layer"
_LONGEST_S = 1e15


def load_trained_model(path: str | Path) -> TrainedModel | CostModel:
    """A model that ``forerun fit RECORDS --out FILE`` wrote, or ``forerun calibrate``.

    Raises:
        CostModelError: The file is missing, damaged, of another kind, or of another version.
    """
    path = Path(path)
    return CostModel.load(path) if is_cost_model(path) else load_model_file(path, STORABLE_KINDS)


def save_trained_model(model: TrainedModel | CostModel, path: str | Path) -> None:
    """Writes a fitted model to a file without pickle.

    Raises:
        CostModelError: The file cannot be written.
    """
    model.save(path)


def predict_time(
    model: TrainedModel | CostModel,
    config: Config | str,
    setup: TrainingSetup | None = None,
    *,
    device: str | None = None,
) -> float:
    """Time of one epoch of a configuration by a fitted model [s]: ceil(dataset_size / batch_size) steps.

    A setting that the question leaves out, ``dataset_size`` among them, has the value that all records of the fit
    share, else the default of ``predict``. A size outside the fitted grid is answered with a warning.

    Args:
        model: From ``load_trained_model`` or ``fit``.
        config: A dictionary with ``model`` (such as ``torchvision:resnet18``) or the sizes of the CNN family
            (``depth``, ``base_filters``), ``batch_size``, ``dataset_size`` and other settings of a step; a row of
            the CNN grid may be given unchanged. Or the name of a model, together with ``setup``.
        setup: The whole setup, for a ``config`` that is a name.
        device: Device of the epoch.

    Raises:
        UsageError: A setting is not known or contradicts another, or nothing says how many samples an epoch has.
        FailureError: The model cannot be built or traced, or the fitted model cannot predict it.

    Examples:
        >>> model = load_trained_model("ann.safetensors")  # doctest: +SKIP
        >>> config = {"depth": 3, "base_filters": 32, "batch_size": 64, "dataset_size": 50_000}  # doctest: +SKIP
        >>> predict_time(model, config)  # doctest: +SKIP
        2.84
    """
    asked = {} if isinstance(config, str) else config
    if _LAYER in asked:
        raise UsageError("a layer alone has no epochs; ask for its time with predict_step_time")
    size = asked.get("dataset_size") or model.provenance.get("dataset_size")
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 1 <= size < float("inf"):
        raise InvalidSetupError(
            f"expected a dataset_size of at least 1 for the time of an epoch, got {size!r}; give it in the "
            "configuration, such as 'dataset_size': 50000, or ask for one step with predict_step_time"
        )
    step_s = predict_step_time(model, config, setup, device=device)
    batch_size = setup.batch_size_per_device if setup else whole_of(asked, "batch_size", 32)
    return step_s * ceil(size / batch_size)


def predict_step_time(
    model: TrainedModel | CostModel,
    config: Config | str,
    setup: TrainingSetup | None = None,
    *,
    device: str | None = None,
) -> float:
    """Time of one step of a configuration by a fitted model [s].

    Args:
        model: From ``load_trained_model`` or ``fit``.
        config: As for ``predict_time``; a layer model also takes one layer: ``layer`` and its sizes.
        setup: The whole setup, for a ``config`` that is a name.
        device: Device of the step.

    Raises:
        UsageError, FailureError: As for ``predict_time``.
    """
    shared: Mapping[str, Any] = model.provenance.get("shared", {})
    asked = {"model": config} if isinstance(config, str) else dict(config)
    if device is not None:
        asked["device"] = device
    if _LAYER in asked:
        return _layer_time_s(model, asked, shared)
    _check_names(asked)
    # What all records had in common need not be said again; what is said wins.
    known = {**_PLACE, **shared, **{k: v for k, v in asked.items() if v is not None}}
    request, setup = _request(known), setup or setup_of(known)
    _warn_outside(model.provenance.get("ranges", {}), request, setup)
    if isinstance(model, CostModel):
        return _predicted_s(model, request, setup, known, asked.get("device"))
    if known["device"] is None:
        raise InvalidSetupError(
            "the records of this model come from several devices; name one with device, such as device='a100-sxm4-40gb'"
        )
    if model.kind == LayerNetwork.kind:
        return float(_layer_times(model, request, setup, known).sum())
    case = (trace(request, setup), find_device(known["device"]), setup)
    rows = whole_model_features([case], with_op_times=model.kind == GreyBox.kind)
    return float(_finite_times_s(model, rows)[0])


def _warn_outside(ranges: Mapping[str, Sequence[float]], request: ModelRequest, setup: TrainingSetup) -> None:
    """Warns of sizes that no record of the fit had."""
    asked = {**network_sizes(request.model), "batch_size": setup.batch_size_per_device}
    outside = [
        f"{name} {asked[name]:g} (fitted: {low:g} to {high:g})"
        for name, (low, high) in ranges.items()
        if name in asked and not low <= asked[name] <= high
    ]
    if outside:
        words = f"outside of the fitted grid: {', '.join(outside)}; the time is extrapolated"
        # At the line of the user who asked for the time of an epoch.
        warnings.warn(words, UserWarning, stacklevel=4)


def _predicted_s(
    model: CostModel, request: ModelRequest, setup: TrainingSetup, known: Config, device: str | None
) -> float:
    """The step of a run as ``predict`` says it [s]."""
    from forerun.search.predict import predict

    run = Run(
        model=request,
        setup=setup,
        cluster=cluster_of(_device_of(model, device or known["device"], is_asked=device is not None), 1, 1),
        software=software_of(str(known["framework"]), str(known["framework_version"])),
    )
    return float(predict(run, cost_model=model).step_time_s.value)


def _device_of(model: CostModel, name: str | None, *, is_asked: bool) -> Device:
    """The device that a cost model was fitted to, which may be one of this machine.

    Raises:
        UsageError: Another device is asked about, or it is not known which one the model is of.
    """
    title = model.calibrated_device
    if title is None and name is not None:
        return find_device(name)  # a model of all devices
    # Calibrations of this machine name a title that the catalogue may not have.
    for found in (device_at(None), this_device()):
        if found.title == title and (not is_asked or name in (found.name, HERE)):
            return found
    if name is not None and (found := find_device(name)).title == title:
        return found
    raise InvalidSetupError(
        f"expected the device that the cost model was fitted to, {title or 'which is none'}, got {name}; "
        "fit the records of that device with: forerun fit RECORDS --on DEVICE --out FILE"
    )


def _check_names(asked: Config) -> None:
    names = (*_SETTINGS, *_PLACE, *_INPUTS, *_NAMES, *_OUTCOMES, *_SIZES)
    for name in asked:
        if name not in names:
            raise UsageError(
                f"unknown setting '{name}' of a configuration{near_matches(name, names)}; "
                f"expected some of {', '.join(names)}"
            )


def _request(known: Config) -> ModelRequest:
    sizes = {name: known[name] for name in _SIZES if name in known}
    if "model" in known:
        if sizes:
            raise InvalidSetupError(
                f"give either a model ('{known['model']}') or the sizes of the CNN family, not both"
            )
        name = str(known["model"])
    elif sizes or "network" in known:
        text = ",".join(f"{size}={int(value)}" for size, value in sizes.items())
        name = f"{known.get('network', 'cnn')}:{text}".rstrip(":")
    else:
        raise InvalidSetupError(
            "expected a model or depth and base_filters in the configuration, got neither"
        )
    shape = known.get("input_shape")
    given = {**known, "input_shape": None if shape is None else "x".join(map(str, shape))}
    return ModelRequest(model=name, **input_options_of(given))


def _layer_time_s(model: TrainedModel | CostModel, asked: dict[str, Any], shared: Config) -> float:
    if isinstance(model, CostModel) or model.kind != LayerNetwork.kind:
        raise UsageError(
            f"a model of kind {model.kind} knows whole models, not layers; fit one with --model layers"
        )
    known = {**_PLACE, **shared, **asked}
    kind = str(known.pop(_LAYER))
    return float(_times_s(model, [(kind, known)], known).sum())


def layer_times_s(model: TrainedModel, config: Config) -> list[float]:
    """Time of each layer of a model by a model of layers, in the order of the forward pass [s].

    Args:
        model: A fitted model of kind ``layers``.
        config: As for ``predict_time``.

    Raises:
        UsageError: A setting is not known, or a layer of the model is none that benchmarks know.
    """
    _check_names(config)
    known = {**_PLACE, **model.provenance.get("shared", {}), **config}
    return [float(time_s) for time_s in _layer_times(model, _request(known), setup_of(known), known)]


def _layer_times(model: TrainedModel, request: ModelRequest, setup: TrainingSetup, known: Config) -> Floats:
    """Times of the layers as measured alone, (n,) [s]; each contains the cost of a single call."""
    from forerun.evidence.measurement.layer_modules import model_layers

    trains = setup.phase is Phase.TRAIN
    same = {
        "mode": "train_step" if trains else "forward",
        "optimizer": setup.optimizer,
        "precision": str(setup.precision),
        "layout": str(setup.layout),
    }
    found = model_layers(request, setup.batch_size_per_device)
    if found.left_out:
        raise UsageError(
            f"no layer benchmark knows {', '.join(found.left_out)} of {request.model}; use a model of another kind, "
            "such as: forerun fit RECORDS --model op"
        )
    return _times_s(model, [(kind, {**sizes, **same}) for kind, sizes in found.layers], known)


def _times_s(model: TrainedModel, layers: Iterable[tuple[str, dict[str, Any]]], known: Config) -> Floats:
    if known["device"] is None:
        raise InvalidSetupError("the layers of this model come from several devices; name one with device")
    device = find_device(str(known["device"]))
    cases = [layer_case(kind, parameters, device, str(known["framework"])) for kind, parameters in layers]
    return _finite_times_s(model, layer_features(cases))


def _finite_times_s(model: TrainedModel, rows: Any) -> Floats:
    """Times by the regressor of a file, whose numbers may be any [s].

    Raises:
        CostModelError: One is none that a step could take.
    """
    with np.errstate(all="ignore"):
        times_s = np.asarray(model.regressor.predict(rows), dtype=float)
    if not (times_s.size and np.all((times_s > 0) & (times_s < _LONGEST_S))):
        raise CostModelError(
            f"the fitted model of kind {model.kind} gives no time that a step could take; fit it again with: "
            "forerun fit"
        )
    return times_s
