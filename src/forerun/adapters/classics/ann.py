"""A dense neural network on a few figures of the model: the regressor of the earlier CNN time predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Self

import numpy as np

from forerun.adapters.classics.dense_network import (
    DenseNetwork,
    DenseSettings,
    Scaling,
    network_arrays,
    networks_of,
    summary_text,
)
from forerun.adapters.classics.interface import Floats, RegressorState, check_fit_input, not_fitted
from forerun.adapters.classics.step_features import WholeModelFeatures
from forerun.base.errors import InvalidSetupError

__all__ = ["AnnSettings", "NeuralNetwork"]

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
