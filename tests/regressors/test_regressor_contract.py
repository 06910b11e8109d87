"""One contract for every whole-model regressor."""

import dataclasses

import numpy as np
import pytest
from regressor_cases import lawful_times_s, random_features

from forerun.errors import CostModelError, RecordError, UsageError
from forerun.regressors import registry
from forerun.regressors.ann import AnnSettings, NeuralNetwork
from forerun.regressors.baselines import LinearOnFlops, NonNegativeSums, PytorchRule, Roofline, ScaledRoofline
from forerun.regressors.boosting import BoostedTrees


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class RegressorContract:
    """Laws that hold for any regressor; a subclass says how to make one."""

    needs_fit = True

    def make(self):
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def features(self):
        return random_features(60)

    @pytest.fixture(scope="class")
    def times(self, features):
        return lawful_times_s(features)

    @pytest.fixture(scope="class")
    def fitted(self, features, times):
        regressor = self.make()
        regressor.fit(features, times)
        return regressor

    def test_predictions_are_positive_and_one_per_row(self, fitted, features):
        predicted = fitted.predict(features)
        assert predicted.shape == (60,)
        assert predicted.dtype == np.float64
        assert np.all(np.isfinite(predicted) & (predicted > 0))

    def test_unseen_and_extreme_rows_get_positive_times(self, fitted):
        far = random_features(20, seed=9)
        far = dataclasses.replace(far, flops=far.flops * 1e-6, class_flops=far.class_flops * 1e-6)
        predicted = fitted.predict(far)
        assert np.all(np.isfinite(predicted) & (predicted > 0))

    def test_each_row_is_predicted_on_its_own(self, fitted, features):
        rows = np.array([7, 3, 59, 3])
        together = fitted.predict(features)[rows]
        np.testing.assert_allclose(fitted.predict(features.take(rows)), together, rtol=1e-5)

    def test_the_same_fit_gives_the_same_answer(self, fitted, features, times):
        again = self.make()
        again.fit(features, times)
        np.testing.assert_array_equal(again.predict(features), fitted.predict(features))

    def test_fitting_again_forgets_the_first_fit(self, fitted, features, times):
        twice = self.make()
        twice.fit(features, 10 * times)
        twice.fit(features, times)
        np.testing.assert_array_equal(twice.predict(features), fitted.predict(features))

    def test_few_rows_are_enough(self, features, times):
        regressor = self.make()
        first = features.take(np.arange(4))
        regressor.fit(first, times[:4])
        assert np.all(regressor.predict(first) > 0)

    def test_slower_measurements_give_slower_predictions(self, fitted, features, times):
        slower = self.make()
        slower.fit(features, 3 * times)
        factor = 3 if self.needs_fit else 1
        np.testing.assert_allclose(slower.predict(features), factor * fitted.predict(features), rtol=0.02)

    def test_prediction_before_fit_is_an_error(self, features):
        if not self.needs_fit:
            assert self.make().predict(features).shape == (60,)
            return
        with pytest.raises(CostModelError, match="before it was fitted"):
            self.make().predict(features)

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
    def test_impossible_times_are_refused(self, features, times, bad):
        with pytest.raises(RecordError, match="row 3"):
            self.make().fit(features, np.where(np.arange(60) == 2, bad, times))

    def test_times_and_rows_must_match(self, features, times):
        with pytest.raises(RecordError, match="one step time per row"):
            self.make().fit(features, times[:-1])

    def test_nothing_to_learn_from_is_an_error(self, features):
        with pytest.raises(RecordError, match="at least one"):
            self.make().fit(features.take(np.arange(0)), np.array([]))


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


class TestScaledRoofline(RegressorContract):
    def make(self):
        return ScaledRoofline()

    def test_the_constant_is_recovered(self, features):
        regressor = ScaledRoofline()
        regressor.fit(features, 2.5 * Roofline().predict(features))
        np.testing.assert_allclose(regressor.predict(features), 2.5 * Roofline().predict(features))


class TestLinearOnFlops(RegressorContract):
    def make(self):
        return LinearOnFlops()

    def test_a_line_is_recovered(self, features):
        line = 2e-3 + 3.0 * features.flops / features.peak_flops_per_s
        regressor = LinearOnFlops()
        regressor.fit(features, line)
        np.testing.assert_allclose(regressor.predict(features), line, rtol=1e-9)


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


class TestBoostedTrees(RegressorContract):
    def make(self):
        return BoostedTrees()

    def test_the_law_is_learned(self):
        seen, unseen = random_features(400, seed=1), random_features(100, seed=2)
        regressor = BoostedTrees()
        regressor.fit(seen, lawful_times_s(seen))
        relative = np.abs(regressor.predict(unseen) / lawful_times_s(unseen) - 1)
        assert np.median(relative) < 0.08


class TestNeuralNetwork(RegressorContract):
    def make(self):
        return NeuralNetwork(AnnSettings(max_epochs=40, seeds=(0, 1)))

    def test_a_power_law_is_learned_from_eighteen_rows(self):
        """The grid of the old predictor: times follow parameters and batch, and few rows must do."""
        features = random_features(18, seed=3)
        times = 1e-8 * features.num_parameters**0.8 * features.batch_size**0.5
        regressor = NeuralNetwork(AnnSettings(columns=("num_parameters", "batch_size")))
        regressor.fit(features, times)
        assert np.max(np.abs(regressor.predict(features) / times - 1)) < 0.05

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
        ],
    )
    def test_settings_that_cannot_be_meant(self, changes, message):
        with pytest.raises(UsageError, match=message):
            AnnSettings(**changes)


class TestRegistry:
    def test_the_baselines_of_every_accuracy_statement(self):
        assert {
            "roofline", "roofline x constant", "linear on FLOPs", "ann", "gradient boosting",
        } <= set(registry.baseline_names())  # fmt: skip

    def test_each_call_makes_a_new_regressor(self):
        for name in registry.baseline_names():
            assert registry.make_baseline(name) is not registry.make_baseline(name)

    def test_a_name_is_taken_once(self):
        with pytest.raises(ValueError, match="already registered"):
            registry.register_baseline("roofline")(Roofline)

    def test_an_unknown_name_lists_near_ones(self):
        with pytest.raises(UsageError, match="did you mean roofline"):
            registry.make_baseline("rooflin")
