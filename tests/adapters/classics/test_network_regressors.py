"""The network on single layers: the contract, and what is its own."""

import dataclasses

import numpy as np
import pytest
from layer_cases_made import layer_law_s, random_layers
from regressor_contract import StorableContract, one_thread  # noqa: F401 - a fixture

from forerun.adapters.classics.baselines import LinearOnFlops
from forerun.adapters.classics.network_regressors import LayerNetSettings, LayerNetwork
from forerun.base.errors import CostModelError, RecordError, UsageError

SMALL = LayerNetSettings(hidden_sizes=(24, 24, 16, 16), dropout=0.02, max_epochs=40, batch_rows=32)


class TestLayerNetwork(StorableContract):
    def make(self):
        return LayerNetwork(SMALL)

    def rows(self, n, seed=0):
        return random_layers(n, seed)

    def far_rows(self):
        return random_layers(20, seed=9, largest=11)

    def law_s(self, rows):
        return layer_law_s(rows)


class TestLinearOnLayers(StorableContract):
    def make(self):
        return LinearOnFlops()

    def rows(self, n, seed=0):
        return random_layers(n, seed)

    def far_rows(self):
        return random_layers(20, seed=9, largest=11)

    def law_s(self, rows):
        return layer_law_s(rows)


def test_unseen_layers_follow_the_law_better_than_a_line():
    seen, unseen = random_layers(500, seed=1), random_layers(150, seed=2)
    errors = {}
    for regressor in (LayerNetwork(LayerNetSettings(max_epochs=60)), LinearOnFlops()):
        regressor.fit(seen, layer_law_s(seen))
        errors[regressor.kind] = np.median(np.abs(regressor.predict(unseen) / layer_law_s(unseen) - 1))
    assert errors["layers"] < 0.10
    assert errors["layers"] < 0.5 * errors["linear"]


def test_a_choice_that_the_fit_has_not_seen_is_an_error_that_names_it():
    rows = random_layers(60)
    network = LayerNetwork(SMALL)
    network.fit(rows, layer_law_s(rows))
    other = dataclasses.replace(rows, words=np.where(rows.words == "dense", "lstm", rows.words))
    with pytest.raises(CostModelError, match="layer dense and cannot tell the time of layer lstm"):
        network.predict(other)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_figures_are_refused_with_their_place(bad):
    rows = random_layers(4)
    numbers = rows.numbers.copy()
    numbers[2, 0] = bad
    with pytest.raises(RecordError, match="'batch_size' of row 3"):
        dataclasses.replace(rows, numbers=numbers)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8,) * 7])
def test_four_to_six_hidden_layers(sizes):
    with pytest.raises(UsageError, match="four to six"):
        LayerNetSettings(hidden_sizes=sizes)


def test_the_summary_shows_dropout():
    rows = random_layers(20)
    network = LayerNetwork(dataclasses.replace(SMALL, max_epochs=1))
    network.fit(rows, layer_law_s(rows))
    assert network.summary().count("(Dropout)") == 4
