"""Dense networks as regressors: of a whole step (the earlier CNN time predictor), and of one layer.

The second is after Justus et al. 2018 (arXiv 1811.11880): a fully connected network of four to six hidden layers with
dropout learns the time of single layers; a whole model is the sum of its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from forerun.adapters.classics.dense_network import (
    DenseNetwork,
    DenseSettings,
    Scaling,
    fit_networks,
    network_arrays,
    networks_of,
    summary_text,
)
from forerun.adapters.classics.layer_table import LAYER_NUMBERS, LAYER_WORDS, LayerFeatures
from forerun.adapters.classics.model_file import RegressorState, check_fit_input, not_fitted
from forerun.adapters.classics.step_features import WholeModelFeatures
from forerun.base.errors import CostModelError, InvalidSetupError
from forerun.evidence.fitting.evaluation import Floats

_Settings = TypeVar("_Settings", bound=DenseSettings)

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


class _LogNetwork:
    """log t as the mean of dense networks, one per seed; a subclass turns rows into their inputs."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    _title: ClassVar[str]

    def __init__(self, settings: DenseSettings) -> None:
        self.settings = settings
        self._networks: list[DenseNetwork] = []
        self._scaling: Scaling | None = None

    def _columns(self) -> tuple[str, ...]:
        """Names of the inputs, in their order."""
        raise NotImplementedError

    def _inputs(self, features: Any) -> Floats:
        """Inputs of rows, (n, columns)."""
        raise NotImplementedError

    def _learn_choices(self, features: Any) -> None:
        """Notes what the rows of a fit have, if the inputs depend on it."""

    def fit(self, features: Any, step_time_s: Floats) -> None:
        """Fit one network per seed."""
        self.fit_all([self], [(features, step_time_s)])

    @classmethod
    def fit_all(cls, unfitted: Sequence[Self], tables: Sequence[tuple[Any, Floats]]) -> None:
        """Fit networks of one setting, each to its own rows, in little more time than one."""
        standard = []
        for model, (features, step_time_s) in zip(unfitted, tables, strict=True):
            target = np.log(check_fit_input(features, step_time_s))
            model._learn_choices(features)
            inputs = model._inputs(features)
            model._scaling = Scaling.of(inputs, target)
            standard.append((model._scaling.inputs(inputs), model._scaling.target(target)))
        found = fit_networks(standard, unfitted[0].settings)
        for model, networks in zip(unfitted, found, strict=True):
            model._networks = networks

    def _fitted(self) -> Scaling:
        if self._scaling is None:
            raise not_fitted(self._title)
        return self._scaling

    def predict(self, features: Any) -> Floats:
        """Times of the averaged networks [s]."""
        scaling = self._fitted()
        inputs = scaling.inputs(self._inputs(features))
        standard = np.mean([network(inputs) for network in self._networks], axis=0)
        return np.asarray(np.exp(scaling.plain(standard)), dtype=float)

    def summary(self) -> str:
        """Layers, output shapes and parameters as Keras prints them."""
        return summary_text(self.kind, len(self._columns()), self.settings)

    def _stored_settings(self) -> dict[str, Any]:
        return asdict(self.settings)

    def state(self) -> RegressorState:
        """Settings, normalisation and weights."""
        return RegressorState(
            features=self._columns(),
            settings=self._stored_settings(),
            arrays=network_arrays(self._networks, self._fitted()),
        )

    @classmethod
    def _settings_of(cls, kind: type[_Settings], stored: Mapping[str, Any]) -> _Settings:
        """Settings as stored; JSON has lists where they have tuples."""
        values: dict[str, Any] = {f.name: stored[f.name] for f in fields(kind)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return kind(**(values | lists))

    def _restored(self, state: RegressorState) -> Self:
        self._networks, self._scaling = networks_of(state.arrays, len(self._columns()), self.settings)
        return self


class NeuralNetwork(_LogNetwork):
    """log t = network(log parameters, log batch, log image size, ...), by default two layers of 64 ReLU."""

    kind = "ann"
    _title = "the neural network"

    def __init__(self, settings: AnnSettings | None = None) -> None:
        self._chosen = settings or AnnSettings()
        super().__init__(self._chosen)

    def _columns(self) -> tuple[str, ...]:
        return self._chosen.columns

    def _inputs(self, features: WholeModelFeatures) -> Floats:
        columns = [getattr(features, name) for name in self._columns()]
        return np.asarray(np.log(np.maximum(np.column_stack(columns), 1.0)), dtype=float)

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The network with this state."""
        return cls(cls._settings_of(AnnSettings, state.settings))._restored(state)


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


class LayerNetwork(_LogNetwork):
    """log t of a layer from the logarithms of its figures and the choices it was built with."""

    kind = "layers"
    _title = "the layer network"

    def __init__(self, settings: LayerNetSettings | None = None) -> None:
        super().__init__(settings or LayerNetSettings())
        self._choices: dict[str, tuple[str, ...]] = {}

    def _learn_choices(self, features: LayerFeatures) -> None:
        self._choices = {
            name: tuple(sorted(set(features.words[:, i].tolist()))) for i, name in enumerate(LAYER_WORDS)
        }

    def _columns(self) -> tuple[str, ...]:
        if not self._choices:
            raise not_fitted(self._title)
        words = (f"{name}={word}" for name in LAYER_WORDS for word in self._choices[name])
        return (*LAYER_NUMBERS, *_RATIOS, *words)

    def _inputs(self, features: LayerFeatures) -> Floats:
        self._refuse_unseen(features)
        seconds = np.column_stack(
            [
                features.flops / features.peak_flops_per_s,
                features.moved_bytes / features.number("bandwidth_bytes_per_s"),
            ]
        )
        words = [
            features.words[:, i, None] == np.array(self._choices[name]) for i, name in enumerate(LAYER_WORDS)
        ]
        logs = [np.log(np.maximum(features.numbers, 1.0)), np.log(np.maximum(seconds, _SHORTEST_S))]
        return np.column_stack([*logs, *words]).astype(float)

    def _refuse_unseen(self, features: LayerFeatures) -> None:
        """Refuses a kind of layer or a choice that the fit has not seen: its column would be all zeros."""
        for index, name in enumerate(LAYER_WORDS):
            known = self._choices[name]
            if unseen := sorted(set(features.words[:, index].tolist()) - set(known)):
                raise CostModelError(
                    f"the layer model was fitted on {name} {', '.join(known)} and cannot tell the time of "
                    f"{name} {', '.join(unseen)}; measure such layers and fit it again"
                )

    def _stored_settings(self) -> dict[str, Any]:
        choices = {name: list(words) for name, words in self._choices.items()}
        return {**asdict(self.settings), "choices": choices}

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The network with this state."""
        found = cls(cls._settings_of(LayerNetSettings, state.settings))
        found._choices = {name: tuple(state.settings["choices"][name]) for name in LAYER_WORDS}
        return found._restored(state)
