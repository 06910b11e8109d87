"""Dense networks as regressors: of a whole step (the earlier CNN time predictor), and of one layer.

The second is after Justus et al. 2018 (arXiv 1811.11880): a fully connected network of four to six hidden layers with
dropout learns the time of single layers; a whole model is the sum of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Literal, Self

import numpy as np

from forerun.adapters.classics.dense_network import (
    DenseNetwork,
    DenseSettings,
    Scaling,
    network_arrays,
    networks_of,
    summary_text,
)
from forerun.adapters.classics.layer_table import LAYER_NUMBERS, LAYER_WORDS, LayerFeatures
from forerun.adapters.classics.model_file import Floats, RegressorState, check_fit_input, not_fitted
from forerun.adapters.classics.step_features import WholeModelFeatures
from forerun.base.errors import CostModelError, InvalidSetupError

__all__ = ["AnnSettings", "LayerNetSettings", "LayerNetwork", "NeuralNetwork"]


_SCALAR_COLUMNS = (
    "num_parameters",
    "batch_size",
    "image_size",
    "flops",
    "traffic_bytes",
    "num_kernels",
    "peak_flops_per_s",
    "bandwidth_bytes_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnSettings(DenseSettings):
    """Shape and training of the network; two or three hidden layers are usual.

    Attributes:
        columns: Scalar columns of ``WholeModelFeatures`` to read; their logarithms are the input.
    """

    columns: tuple[str, ...] = ("num_parameters", "batch_size", "image_size")

    def __post_init__(self) -> None:
        # The name, not ``super()``: a dataclass with slots is a new class that the cell of super does not know.
        DenseSettings.__post_init__(self)
        unknown = [name for name in self.columns if name not in _SCALAR_COLUMNS]
        if unknown or not self.columns:
            raise InvalidSetupError(f"columns must be of {', '.join(_SCALAR_COLUMNS)}, got {self.columns}")


class NeuralNetwork:
    """log t = network(log parameters, log batch, log image size, ...), by default two layers of 64 ReLU."""

    kind: ClassVar[str] = "ann"
    version: ClassVar[int] = 1

    def __init__(self, settings: AnnSettings | None = None) -> None:
        self.settings = settings or AnnSettings()
        self._networks: list[DenseNetwork] = []
        self._scaling: Scaling | None = None

    def _inputs(self, features: WholeModelFeatures) -> Floats:
        columns = [getattr(features, name) for name in self.settings.columns]
        return np.asarray(np.log(np.maximum(np.column_stack(columns), 1.0)), dtype=float)

    def fit(self, features: WholeModelFeatures, step_time_s: Floats) -> None:
        """Fit one network per seed."""
        self.fit_all([self], [(features, step_time_s)])

    @classmethod
    def fit_all(
        cls, unfitted: Sequence[NeuralNetwork], tables: Sequence[tuple[WholeModelFeatures, Floats]]
    ) -> None:
        """Fit networks of one setting, each to its own rows, in little more time than one."""
        from forerun.adapters.classics.dense_network import fit_networks_of_all

        standard = []
        for model, (features, step_time_s) in zip(unfitted, tables, strict=True):
            target, inputs = np.log(check_fit_input(features, step_time_s)), model._inputs(features)
            model._scaling = Scaling.of(inputs, target)
            standard.append((model._scaling.inputs(inputs), model._scaling.target(target)))
        found = fit_networks_of_all(standard, unfitted[0].settings)
        for model, networks in zip(unfitted, found, strict=True):
            model._networks = networks

    def predict(self, features: WholeModelFeatures) -> Floats:
        """Times of the averaged networks [s]."""
        if self._scaling is None:
            raise not_fitted("the neural network")
        inputs = self._scaling.inputs(self._inputs(features))
        standard = np.mean([network(inputs) for network in self._networks], axis=0)
        return np.asarray(np.exp(self._scaling.plain(standard)), dtype=float)

    def summary(self) -> str:
        """Layers, output shapes and parameters as Keras prints them."""
        return summary_text(self.kind, len(self.settings.columns), self.settings)

    def state(self) -> RegressorState:
        """Settings, normalisation and weights."""
        if self._scaling is None:
            raise not_fitted("the neural network")
        return RegressorState(
            features=self.settings.columns,
            settings=asdict(self.settings),
            arrays=network_arrays(self._networks, self._scaling),
        )

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The network with this state."""
        found = cls(
            AnnSettings(**{f.name: _setting(state.settings[f.name]) for f in fields(AnnSettings)})  # type: ignore[arg-type]
        )
        found._networks, found._scaling = networks_of(
            state.arrays, len(found.settings.columns), found.settings
        )
        return found


def _setting(value: object) -> object:
    """JSON has lists where settings have tuples."""
    return tuple(value) if isinstance(value, list) else value


_SHORTEST_S = 1e-9
_RATIOS = ("compute_s", "transfer_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNetSettings(DenseSettings):
    """Shape and training of the network: four to six hidden layers; a ninth of the rows decides when to stop.

    With a tenth of all rows kept for the test this is the split 80:10:10 of the original.
    """

    hidden_sizes: tuple[int, ...] = (128, 128, 64, 64)
    dropout: float = 0.02
    loss: Literal["mse", "mae"] = "mae"
    learning_rate: float = 2e-3
    max_epochs: int = 150
    patience_epochs: int = 20
    batch_rows: int = 256
    held_out_share: float = 1 / 9
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        DenseSettings.__post_init__(self)
        if not 4 <= len(self.hidden_sizes) <= 6:
            raise InvalidSetupError(f"expected four to six hidden layers, got {len(self.hidden_sizes)}")


class LayerNetwork:
    """log t of a layer from the logarithms of its figures and the choices it was built with."""

    kind: ClassVar[str] = "layers"
    version: ClassVar[int] = 1

    def __init__(self, settings: LayerNetSettings | None = None) -> None:
        self.settings = settings or LayerNetSettings()
        self._networks: list[DenseNetwork] = []
        self._scaling: Scaling | None = None
        self._choices: dict[str, tuple[str, ...]] = {}

    def fit(self, features: LayerFeatures, step_time_s: Floats) -> None:
        """Fit one network per seed."""
        from forerun.adapters.classics.dense_network import fit_networks

        target = np.log(check_fit_input(features, step_time_s))
        self._choices = {
            name: tuple(sorted(set(features.words[:, i].tolist()))) for i, name in enumerate(LAYER_WORDS)
        }
        inputs = _inputs(features, self._choices)
        scaling = Scaling.of(inputs, target)
        self._networks = fit_networks(scaling.inputs(inputs), scaling.target(target), self.settings)
        self._scaling = scaling

    def predict(self, features: LayerFeatures) -> Floats:
        """Times of the averaged networks [s].

        Raises:
            CostModelError: A layer has a kind or a choice that the fit has not seen.
        """
        if self._scaling is None:
            raise not_fitted("the layer network")
        _check_choices(features, self._choices)
        inputs = self._scaling.inputs(_inputs(features, self._choices))
        standard = np.mean([network(inputs) for network in self._networks], axis=0)
        return np.asarray(np.exp(self._scaling.plain(standard)), dtype=float)

    def summary(self) -> str:
        """Layers, output shapes and parameters as Keras prints them; the inputs are known after the fit."""
        if self._scaling is None:
            raise not_fitted("the layer network")
        return summary_text(self.kind, len(_columns(self._choices)), self.settings)

    def state(self) -> RegressorState:
        """Settings, choices, normalisation and weights."""
        if self._scaling is None:
            raise not_fitted("the layer network")
        return RegressorState(
            features=_columns(self._choices),
            settings={**asdict(self.settings), "choices": {k: list(v) for k, v in self._choices.items()}},
            arrays=network_arrays(self._networks, self._scaling),
        )

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The network with this state."""
        stored = {f.name: state.settings[f.name] for f in fields(LayerNetSettings)}
        lists = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
        found = cls(LayerNetSettings(**(stored | lists)))
        found._choices = {name: tuple(state.settings["choices"][name]) for name in LAYER_WORDS}
        num_columns = len(_columns(found._choices))
        found._networks, found._scaling = networks_of(state.arrays, num_columns, found.settings)
        return found


def _columns(choices: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return (*LAYER_NUMBERS, *_RATIOS, *(f"{name}={word}" for name in LAYER_WORDS for word in choices[name]))


def _inputs(features: LayerFeatures, choices: Mapping[str, tuple[str, ...]]) -> Floats:
    """Columns as named by ``_columns``, (n, columns)."""
    seconds = np.column_stack(
        [
            features.flops / features.peak_flops_per_s,
            features.moved_bytes / features.number("bandwidth_bytes_per_s"),
        ]
    )
    words = [features.words[:, i, None] == np.array(choices[name]) for i, name in enumerate(LAYER_WORDS)]
    logs = [np.log(np.maximum(features.numbers, 1.0)), np.log(np.maximum(seconds, _SHORTEST_S))]
    return np.column_stack([*logs, *words]).astype(float)


def _check_choices(features: LayerFeatures, choices: Mapping[str, tuple[str, ...]]) -> None:
    for index, name in enumerate(LAYER_WORDS):
        unseen = sorted(set(features.words[:, index].tolist()) - set(choices[name]))
        if unseen:
            raise CostModelError(
                f"the layer model was fitted on {name} {', '.join(choices[name])} and cannot tell the time of "
                f"{name} {', '.join(unseen)}; measure such layers and fit it again"
            )
