"""One contract for every whole-model regressor."""

import dataclasses

import numpy as np
import pytest
from regressor_contract import RegressorContract, StorableContract, one_thread  # noqa: F401 - a fixture

from forerun.adapters.classics import baselines
from forerun.adapters.classics.baselines import (
    BoostedTrees,
    GreyBox,
    LinearOnFlops,
    NonNegativeSums,
    Paleo,
    PytorchRule,
    Roofline,
    ScaledRoofline,
)
from forerun.adapters.classics.network_regressors import AnnSettings, NeuralNetwork
from forerun.base.errors import UsageError
from regressor_cases import lawful_times_s, random_features


class TestRoofline(RegressorContract):
    needs_fit = False

    def make(self):
        return Roofline()

    def test_the_longer_of_computing_and_moving(self, features):
        expected = np.maximum(features.flops / 4e13, features.traffic_bytes / 1e12)
        np.testing.assert_allclose(Roofline().predict(features), expected)


class TestPytorchRule(RegressorContract):
    needs_fit = False

    def make(self):
        return PytorchRule()


class TestPaleo(RegressorContract):
    def make(self):
        return Paleo()

    def test_slower_measurements_give_slower_predictions(self, fitted, features):
        """The time to move bytes is fixed, so only the computing slows down: a third of the share."""
        moving_s = features.traffic_bytes / features.bandwidth_bytes_per_s
        computing_s = fitted.predict(features) - moving_s
        slower = self.make()
        slower.fit(features, 3 * computing_s + moving_s)
        np.testing.assert_allclose(slower.predict(features), 3 * computing_s + moving_s, rtol=1e-9)

    def test_a_known_share_of_the_peak_is_found(self, features):
        moving_s = features.traffic_bytes / features.bandwidth_bytes_per_s
        times = features.flops / (0.4 * features.peak_flops_per_s) + moving_s
        found = Paleo()
        found.fit(features, times)
        np.testing.assert_allclose(found.predict(features), times, rtol=1e-6)


class TestScaledRoofline(RegressorContract):
    def make(self):
        return ScaledRoofline()

    def test_the_constant_is_recovered(self, features):
        regressor = ScaledRoofline()
        regressor.fit(features, 2.5 * Roofline().predict(features))
        np.testing.assert_allclose(regressor.predict(features), 2.5 * Roofline().predict(features))


class TestLinearOnFlops(StorableContract):
    def make(self):
        return LinearOnFlops()

    def test_a_line_is_recovered(self, features):
        line = 2e-3 + 3.0 * features.flops / features.peak_flops_per_s
        regressor = LinearOnFlops()
        regressor.fit(features, line)
        np.testing.assert_allclose(regressor.predict(features), line, rtol=1e-9)


class TestGreyBox(StorableContract):
    def make(self):
        return GreyBox()

    def rows(self, n, seed=0):
        """Steps whose operations the cost model thinks 1.4 times too slow, beside a constant that it does not know."""
        rows = random_features(n, seed)
        return dataclasses.replace(rows, op_time_s=1.4 * lawful_times_s(rows))

    def far_rows(self):
        return dataclasses.replace(self.rows(20, seed=9), flops=random_features(20, seed=9).flops * 1e-6)

    def test_a_cost_model_that_is_off_by_a_factor_is_mended_by_a_few_rows(self):
        few, unseen = self.rows(6), self.rows(50, seed=5)
        errors = []
        for regressor in (GreyBox(), LinearOnFlops()):
            regressor.fit(few, lawful_times_s(few))
            errors.append(np.mean(np.abs(regressor.predict(unseen) / lawful_times_s(unseen) - 1)))
        assert errors[0] < 0.6 * errors[1]

    def test_a_file_beside_another_cost_model_is_refused(self, fitted, monkeypatch):
        state = fitted.state()
        monkeypatch.setattr(baselines, "_weights_digest", lambda: "another")
        with pytest.raises(ValueError, match="fit it again"):
            GreyBox.from_state(state)


class TestNonNegativeSums(RegressorContract):
    def make(self):
        return NonNegativeSums()

    def test_a_sum_of_classes_is_recovered_on_unseen_rows(self, fitted):
        unseen = random_features(50, seed=5)
        np.testing.assert_allclose(fitted.predict(unseen), lawful_times_s(unseen), rtol=1e-6)

    def test_more_work_is_never_faster(self, fitted, features):
        more = dataclasses.replace(
            features, class_flops=features.class_flops * 2, class_bytes=features.class_bytes * 2
        )
        assert np.all(fitted.predict(more) >= fitted.predict(features))


class TestBoostedTrees(StorableContract):
    def make(self):
        return BoostedTrees()

    def test_rows_of_a_file_that_do_not_belong_together_are_refused(self, fitted):
        state = fitted.state()
        for name in state.arrays:
            cut = {**state.arrays, name: state.arrays[name][:-1]}
            with pytest.raises(ValueError, match="with a time each"):
                BoostedTrees.from_state(dataclasses.replace(state, arrays=cut))

    def test_the_law_is_learned(self):
        seen, unseen = random_features(400, seed=1), random_features(100, seed=2)
        regressor = BoostedTrees()
        regressor.fit(seen, lawful_times_s(seen))
        relative = np.abs(regressor.predict(unseen) / lawful_times_s(unseen) - 1)
        assert np.median(relative) < 0.08


class TestNeuralNetwork(StorableContract):
    def make(self):
        return NeuralNetwork(AnnSettings(max_epochs=40, seeds=(0, 1)))

    def test_a_power_law_is_learned_from_eighteen_rows(self):
        """The grid of the old predictor: times follow parameters and batch, and few rows must do."""
        features = random_features(18, seed=3)
        times = 1e-8 * features.num_parameters**0.8 * features.batch_size**0.5
        regressor = NeuralNetwork(AnnSettings(columns=("num_parameters", "batch_size")))
        regressor.fit(features, times)
        assert np.max(np.abs(regressor.predict(features) / times - 1)) < 0.05

    def test_the_summary_counts_every_parameter(self):
        text = NeuralNetwork(AnnSettings(columns=("flops", "batch_size"), hidden_sizes=(8, 4))).summary()
        assert "dense_1 (Dense, relu)" in text
        assert "(None, 4)" in text
        assert f"Total params: {(2 + 1) * 8 + (8 + 1) * 4 + 4 + 1}" in text
        assert "seeds 0, 1, 2" in text

    @pytest.mark.parametrize("loss", ["mse", "mae"])
    def test_both_losses_and_three_layers_learn(self, features, times, loss):
        regressor = NeuralNetwork(
            AnnSettings(
                columns=("flops", "num_kernels"), hidden_sizes=(32, 32, 32), loss=loss, max_epochs=150
            )
        )
        regressor.fit(features, times)
        assert np.median(np.abs(regressor.predict(features) / times - 1)) < 0.1

    def test_a_constant_column_is_harmless(self, features, times):
        same = dataclasses.replace(features, image_size=np.full(60, 32.0))
        regressor = self.make()
        regressor.fit(same, times)
        assert np.all(np.isfinite(regressor.predict(same)))

    def test_the_global_random_state_is_left_alone(self, features, times):
        import torch

        torch.manual_seed(4)
        expected = torch.rand(3)
        torch.manual_seed(4)
        self.make().fit(features, times)
        assert torch.equal(torch.rand(3), expected)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"columns": ("depth",)}, "columns must be of"),
            ({"columns": ()}, "columns must be of"),
            ({"loss": "huber"}, "mse or mae"),
            ({"seeds": ()}, "a seed or more"),
            ({"hidden_sizes": (0,)}, "hidden sizes"),
            ({"dropout": 1.0}, "dropout"),
            ({"max_epochs": 0}, "at least one epoch"),
            ({"learning_rate": float("nan")}, "learning"),
        ],
    )
    def test_settings_that_cannot_be_meant(self, changes, message):
        with pytest.raises(UsageError, match=message):
            AnnSettings(**changes)


class TestRegistry:
    def test_the_baselines_of_every_accuracy_statement(self):
        assert {
            "roofline", "roofline x constant", "paleo", "linear on FLOPs", "ann", "gradient boosting",
        } <= set(baselines.BASELINES)  # fmt: skip

    def test_each_call_makes_a_new_regressor(self):
        for make in baselines.BASELINES.values():
            assert make() is not make()
