"""Dense networks as regressors: of a whole step (the earlier CNN time predictor), and of one layer.

The second is after Justus et al. 2018 (arXiv 1811.11880): a fully connected network of four to six hidden layers with
dropout learns the time of single layers; a whole model is the sum of its layers.

PyTorch fits them; a fitted network is a list of matrices, so prediction needs no framework. They are not scikit-learn's
``MLPRegressor``: that has the squared error only, no dropout, and fits one network at a time, where leaving out 18
configurations in turn with three seeds needs 54.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from forerun.adapters.classics.layer_table import LAYER_NUMBERS, LAYER_WORDS, LayerFeatures
from forerun.adapters.classics.model_file import RegressorState, check_fit_input, not_fitted
from forerun.adapters.classics.step_features import WholeModelFeatures
from forerun.base.answers import from_plain
from forerun.base.errors import CostModelError, InvalidSetupError
from forerun.evidence.fitting.evaluation import Floats

if TYPE_CHECKING:
    import torch
    from torch import nn

_WIDTHS = (26, 24, 10)
_RULE = sum(_WIDTHS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSettings:
    """Shape and training of a dense network.

    Attributes:
        hidden_sizes: Units of the hidden ReLU layers.
        dropout: Share of units that training silences after each hidden layer.
        loss: ``mse`` or ``mae``, on the standardised logarithm of the time.
        learning_rate: Step size of Adam.
        max_epochs: Passes over the rows.
        patience_epochs: Passes without a better loss after which the fit stops.
        batch_rows: Rows per step of Adam.
        held_out_share: Share of the rows that decides when to stop.
        seeds: One network per seed; predictions are averaged in the logarithm.
    """

    hidden_sizes: tuple[int, ...] = (64, 64)
    dropout: float = 0.0
    loss: str = "mse"
    learning_rate: float = 5e-3
    max_epochs: int = 400
    patience_epochs: int = 60
    batch_rows: int = 128
    held_out_share: float = 0.15
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        if self.loss not in ("mse", "mae"):
            raise InvalidSetupError(f"loss must be mse or mae, got '{self.loss}'")
        if not self.seeds or not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise InvalidSetupError(
                f"expected a seed or more and positive hidden sizes, got {self.seeds}, {self.hidden_sizes}"
            )
        if not (0 <= self.dropout < 1 and 0 <= self.held_out_share < 1):
            raise InvalidSetupError(
                "expected dropout and held_out_share of at least 0 and below 1, "
                f"got {self.dropout} and {self.held_out_share}"
            )
        if min(self.max_epochs, self.patience_epochs, self.batch_rows) < 1 or not self.learning_rate > 0:
            raise InvalidSetupError(
                "expected at least one epoch, one epoch of patience and one row per batch, and a positive learning "
                f"rate, got {self.max_epochs}, {self.patience_epochs}, {self.batch_rows}, {self.learning_rate}"
            )


@dataclass(frozen=True, slots=True)
class DenseNetworks:
    """Networks of one shape side by side: y = W_n relu(... relu(W_1 x + b_1) ...) + b_n of each.

    Attributes:
        weights: Matrices (networks, inputs, units), one per layer.
        biases: Vectors (networks, 1, units), one per layer.
    """

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, inputs: Floats) -> Floats:
        """Outputs, (networks, n), of inputs, (n, columns)."""
        values = inputs
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = values @ weight + bias
            if layer < len(self.weights) - 1:
                np.maximum(values, 0.0, out=values)
        return np.asarray(values[..., 0], dtype=float)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The matrices (units, inputs) and vectors (units,) of each network and layer by name, as PyTorch has them."""
        found: dict[str, npt.NDArray[Any]] = {}
        for layer, (weights, biases) in enumerate(zip(self.weights, self.biases, strict=True)):
            for member, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                found |= {f"{member}.{layer}.weight": weight.T, f"{member}.{layer}.bias": bias[0]}
        return found


@dataclass(frozen=True, slots=True)
class Scaling:
    """Mean and deviation of the columns of a table, the target last, which make it standard."""

    mean: Floats
    std: Floats

    @classmethod
    def of(cls, table: Floats) -> Scaling:
        """Scaling of a table, (n, columns); a constant column is only moved."""
        deviation = table.std(axis=0)
        return cls(table.mean(axis=0), np.where(deviation > 1e-9, deviation, 1.0))

    def standard(self, table: Floats) -> Floats:
        """The same table, with its target or without, made standard."""
        columns = slice(0, table.shape[1])
        return np.asarray((table - self.mean[columns]) / self.std[columns], dtype=float)


def summary_text(name: str, num_inputs: int, settings: DenseSettings) -> str:
    """Layers, output shapes and parameters as Keras prints them.

    >>> print(summary_text("ann", 3, DenseSettings(hidden_sizes=(8,), seeds=(0,))))
    Model: "ann"
    _____________________________________________________________
     Layer (type)              Output Shape            Param #
    =============================================================
     input (Input)             (None, 3)               0
     dense (Dense, relu)       (None, 8)               32
     dense_1 (Dense)           (None, 1)               9
    =============================================================
    Total params: 41 (164 B)
    Trainable params: 41 (164 B)
    Non-trainable params: 0 (0 B)
    _____________________________________________________________
    """
    rows, inputs, total = [("input (Input)", num_inputs, 0)], num_inputs, 0
    for index, units in enumerate((*settings.hidden_sizes, 1)):
        is_hidden = index < len(settings.hidden_sizes)
        suffix, count = f"_{index}" if index else "", units * (inputs + 1)
        rows.append((f"dense{suffix} (Dense{', relu' if is_hidden else ''})", units, count))
        if is_hidden and settings.dropout:
            rows.append((f"dropout{suffix} (Dropout)", units, 0))
        inputs, total = units, total + count
    rule = "_" * _RULE
    lines = [f'Model: "{name}"', rule, _line("Layer (type)", "Output Shape", "Param #"), "=" * _RULE]
    lines += [_line(layer, f"(None, {units})", f"{count:,}") for layer, units, count in rows]
    lines += ["=" * _RULE, f"Total params: {_params(total)}", f"Trainable params: {_params(total)}"]
    lines += [f"Non-trainable params: {_params(0)}", rule]
    if len(settings.seeds) > 1:
        seeds = ", ".join(map(str, settings.seeds))
        lines.append(f"{len(settings.seeds)} such networks (seeds {seeds}), averaged in the logarithm")
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return " " + "".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def _params(count: int) -> str:
    size = 4.0 * count  # as float32, which is what they were trained in
    return f"{count:,} ({size:.0f} B)" if size < 1000 else f"{count:,} ({size / 1000:.2f} kB)"


# With fewer rows than this, all serve the fit, and the best training loss stops it.
_FEWEST_ROWS_TO_HOLD_OUT = 40

_Case = tuple[Floats, Floats, int]


def fit_networks(tables: Sequence[tuple[Floats, Floats]], settings: DenseSettings) -> list[DenseNetworks]:
    """One network per seed for each of several tables.

    Args:
        tables: Standard inputs, (n, columns), and targets, (n,), of each; n may differ.
        settings: Size and schedule.
    """
    import torch

    cases = [(*table, seed) for table in tables for seed in settings.seeds]
    # Dropout and batches of rows draw other numbers for each network, so such networks cannot share a stack.
    is_shared = not settings.dropout and all(len(targets) <= settings.batch_rows for _, targets in tables)
    stacks = [cases] if is_shared else [[case] for case in cases]
    # Global generators are left as they were found: a prediction library must not reseed its user.
    with torch.random.fork_rng(devices=[]):
        parts = [_fit_stack(stack, settings) for stack in stacks]
    found = [np.concatenate(layer) for layer in zip(*parts, strict=True)]
    num_layers, num_seeds = len(found) // 2, len(settings.seeds)
    own = ([layer[i : i + num_seeds] for layer in found] for i in range(0, len(cases), num_seeds))
    return [DenseNetworks(tuple(layers[:num_layers]), tuple(layers[num_layers:])) for layers in own]


def _fit_stack(cases: Sequence[_Case], settings: DenseSettings) -> list[Floats]:
    """Weights, then biases, of networks that are trained side by side, each in its slice of one stack of matrices.

    Each network has its own loss, steps and stopping: a sum of losses has the gradients of each, and Adam acts on
    each number alone.
    """
    import torch

    shape = (len(cases), max(len(targets) for _, targets, _ in cases))
    x, y = torch.zeros(*shape, cases[0][0].shape[1]), torch.zeros(shape)
    fit_share, stop_share = torch.zeros(shape), torch.zeros(shape)
    members = []
    for member, (inputs, targets, seed) in enumerate(cases):
        torch.manual_seed(seed)
        members.append(_new_layers(inputs.shape[1], settings))
        rows, is_held_out = slice(0, len(targets)), _held_out(_groups(inputs), settings)
        x[member, rows], y[member, rows] = torch.as_tensor(inputs), torch.as_tensor(targets)
        # A row weighs its share of the mean; rows that fill up the stack weigh nothing.
        fit_share[member, rows] = _shares(~is_held_out)
        stop_share[member, rows] = _shares(is_held_out) if is_held_out.any() else fit_share[member, rows]
    layers = range(len(members[0]))
    weights = [torch.stack([m[i].weight.detach().T for m in members]).requires_grad_() for i in layers]
    biases = [torch.stack([m[i].bias.detach()[None] for m in members]).requires_grad_() for i in layers]
    best = _train([*weights, *biases], x, y, (fit_share, stop_share), settings)
    return [np.ascontiguousarray(stack.double().numpy()) for stack in best]


def _new_layers(num_inputs: int, settings: DenseSettings) -> list[nn.Linear]:
    """Layers of one network, drawn by the generator of its seed."""
    from torch import nn

    sizes = (num_inputs, *settings.hidden_sizes, 1)
    return [nn.Linear(inputs, units) for inputs, units in itertools.pairwise(sizes)]


def _groups(inputs: Floats) -> npt.NDArray[np.int64]:
    """Index of the distinct input of each row, (n,): repetitions of a configuration have equal inputs."""
    _, first, group = np.unique(inputs, axis=0, return_index=True, return_inverse=True)
    # In the order of the rows, so that a set without repetitions is numbered 0, 1, 2, ...
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    return np.asarray(place[group.reshape(-1)], dtype=np.int64)


def _held_out(groups: npt.NDArray[np.int64], settings: DenseSettings) -> torch.Tensor:
    """Rows that decide when to stop, (n,), drawn by the generator of the seed."""
    import torch

    # Whole groups: a repetition on the other side would tell the answer, and the fit would never stop.
    order = torch.randperm(int(groups.max()) + 1).numpy()
    is_enough = len(groups) >= _FEWEST_ROWS_TO_HOLD_OUT
    num_held_out = int(settings.held_out_share * len(order)) if is_enough else 0
    return torch.from_numpy(np.isin(groups, order[:num_held_out]))


def _shares(is_used: torch.Tensor) -> torch.Tensor:
    return is_used.float() / is_used.sum()


def _train(
    stacks: list[torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    shares: tuple[torch.Tensor, torch.Tensor],
    settings: DenseSettings,
) -> list[torch.Tensor]:
    """Weights, then biases, at the best epoch of each network; ``shares`` weigh the rows of its two losses."""
    import torch

    fit_share, stop_share = shares
    stop_rows = stop_share.any(0)
    stop_x, stop_y, stop_share = x[:, stop_rows], y[:, stop_rows], stop_share[:, stop_rows]
    optimizer = torch.optim.Adam(stacks, lr=settings.learning_rate, fused=True)
    best = [stack.detach().clone() for stack in stacks]
    best_loss = torch.full((len(x),), float("inf"))
    epochs_since = torch.zeros(len(x), dtype=torch.int64)
    for _ in range(settings.max_epochs):
        for rows in _batches(fit_share, settings.batch_rows):
            optimizer.zero_grad()
            losses = _row_losses(stacks, x[:, rows], y[:, rows], settings, dropout=settings.dropout)
            share = fit_share[:, rows]
            (losses * (share / share.sum(1, keepdim=True))).sum().backward()
            optimizer.step()
        with torch.no_grad():
            loss = (_row_losses(stacks, stop_x, stop_y, settings) * stop_share).sum(1)
            # A network that has waited out its patience keeps its best state while the others go on.
            is_better = (loss < best_loss) & (epochs_since < settings.patience_epochs)
            epochs_since += 1
            epochs_since[is_better] = 0
            best_loss = torch.where(is_better, loss, best_loss)
            for kept, stack in zip(best, stacks, strict=True):
                kept[is_better] = stack[is_better]
        if bool((epochs_since >= settings.patience_epochs).all()):
            break
    return best


def _batches(fit_share: torch.Tensor, batch_rows: int) -> Sequence[Any]:
    """Rows of each step of an epoch: all in their order if one batch holds them, else the fit's own, shuffled."""
    import torch

    if fit_share.shape[1] <= batch_rows:
        return [slice(None)]
    rows = torch.nonzero(fit_share.any(0))[:, 0]
    return torch.split(rows[torch.randperm(len(rows))], batch_rows)


def _row_losses(
    stacks: Sequence[torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    settings: DenseSettings,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Loss of each row of each network, (networks, rows)."""
    import torch

    num_layers, values = len(stacks) // 2, x
    for layer in range(num_layers):
        values = torch.baddbmm(stacks[num_layers + layer], values, stacks[layer])
        if layer < num_layers - 1:
            values = torch.dropout(values.relu(), dropout, train=dropout > 0)
    error = values[..., 0] - y
    return error.square() if settings.loss == "mse" else error.abs()


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
    settings: DenseSettings

    def __init__(self, settings: DenseSettings) -> None:
        self.settings = settings
        self._fitted: tuple[DenseNetworks, Scaling] | None = None

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
        scalings: list[Scaling] = []
        standard: list[tuple[Floats, Floats]] = []
        for model, (features, step_time_s) in zip(unfitted, tables, strict=True):
            # Of the logarithm: an error of a tenth counts alike for a step of a millisecond and for one of a second.
            log_times = np.log(check_fit_input(features, step_time_s))
            model._learn_choices(features)
            table = np.column_stack([model._inputs(features), log_times])
            scalings.append(Scaling.of(table))
            rows = scalings[-1].standard(table)
            standard.append((rows[:, :-1], rows[:, -1]))
        found = fit_networks(standard, unfitted[0].settings)
        for model, networks, scaling in zip(unfitted, found, scalings, strict=True):
            model._fitted = networks, scaling

    def _parts(self) -> tuple[DenseNetworks, Scaling]:
        if self._fitted is None:
            raise not_fitted(self._title)
        return self._fitted

    def predict(self, features: Any) -> Floats:
        """Times of the averaged networks [s]."""
        networks, scaling = self._parts()
        standard = networks(scaling.standard(self._inputs(features))).mean(axis=0)
        return np.asarray(np.exp(standard * scaling.std[-1] + scaling.mean[-1]), dtype=float)

    def summary(self) -> str:
        """Layers, output shapes and parameters as Keras prints them."""
        return summary_text(self.kind, len(self._columns()), self.settings)

    def _stored_settings(self) -> dict[str, Any]:
        return asdict(self.settings)

    def state(self) -> RegressorState:
        """Settings, normalisation and weights."""
        networks, scaling = self._parts()
        of_inputs = {"input_mean": scaling.mean[:-1], "input_std": scaling.std[:-1]}
        target = np.array([scaling.mean[-1], scaling.std[-1]])
        return RegressorState(
            features=self._columns(),
            settings=self._stored_settings(),
            arrays={**of_inputs, "target": target, **networks.arrays()},
        )

    def _restored(self, state: RegressorState) -> Self:
        """This network with the arrays of a state; one of another shape than the settings say is a ValueError."""
        sizes = (len(self._columns()), *self.settings.hidden_sizes, 1)
        members = range(len(self.settings.seeds))

        def array(name: str, *shape: int) -> Floats:
            found = np.asarray(state.arrays[name], dtype=float)
            if found.shape != shape:
                raise ValueError(f"array '{name}' must have shape {shape}, got {found.shape}")
            return found

        # In one order of memory, as after a fit: products of others differ in their last bits.
        weights = [
            np.ascontiguousarray([array(f"{m}.{i}.weight", units, inputs).T for m in members])
            for i, (inputs, units) in enumerate(itertools.pairwise(sizes))
        ]
        biases = [
            np.array([array(f"{m}.{i}.bias", units)[None] for m in members])
            for i, units in enumerate(sizes[1:])
        ]
        mean, std = array("target", 2)
        scaling = Scaling(
            np.append(array("input_mean", sizes[0]), mean), np.append(array("input_std", sizes[0]), std)
        )
        self._fitted = DenseNetworks(tuple(weights), tuple(biases)), scaling
        return self


class NeuralNetwork(_LogNetwork):
    """log t = network(log parameters, log batch, log image size, ...), by default two layers of 64 ReLU."""

    kind = "ann"
    _title = "the neural network"

    settings: AnnSettings

    def __init__(self, settings: AnnSettings | None = None) -> None:
        super().__init__(settings or AnnSettings())

    def _columns(self) -> tuple[str, ...]:
        return self.settings.columns

    def _inputs(self, features: WholeModelFeatures) -> Floats:
        # Times are products of powers of sizes, which are sums in logarithms; a size that a model lacks counts as one.
        columns = [getattr(features, name) for name in self._columns()]
        return np.asarray(np.log(np.maximum(np.column_stack(columns), 1.0)), dtype=float)

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The network with this state."""
        return cls(from_plain(AnnSettings, state.settings, "settings", ignores_unknown=True))._restored(state)


_SHORTEST_S = 1e-9
_RATIOS = ("compute_s", "transfer_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNetSettings(DenseSettings):
    """Shape and training of the network: four to six hidden layers; a ninth of the rows decides when to stop.

    With a tenth of all rows kept for the test this is the split 80:10:10 of the original.
    """

    hidden_sizes: tuple[int, ...] = (128, 128, 64, 64)
    dropout: float = 0.02
    loss: str = "mae"
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
        transfer_s = features.moved_bytes / features.number("bandwidth_bytes_per_s")
        seconds = np.column_stack([features.compute_s, transfer_s])
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
        found = cls(from_plain(LayerNetSettings, state.settings, "settings", ignores_unknown=True))
        found._choices = {name: tuple(state.settings["choices"][name]) for name in LAYER_WORDS}
        return found._restored(state)
