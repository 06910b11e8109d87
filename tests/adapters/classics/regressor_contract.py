"""One contract for every regressor, whatever its rows; imported by the tests of each."""

import dataclasses

import numpy as np
import pytest

from forerun.adapters.classics.model_file import TrainedModel, load_model_file
from forerun.base.errors import CostModelError, RecordError
from regressor_cases import lawful_times_s, random_features


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class RegressorContract:
    """Laws that hold for any regressor; a subclass says how to make one."""

    needs_fit = True

    def make(self):
        """A new, unfitted regressor."""
        raise NotImplementedError

    def rows(self, n, seed=0):
        """n rows of features on one device."""
        return random_features(n, seed)

    def far_rows(self):
        """20 rows unlike those of the fit."""
        far = random_features(20, seed=9)
        return dataclasses.replace(far, flops=far.flops * 1e-6, class_flops=far.class_flops * 1e-6)

    def law_s(self, rows):
        """Times of rows [s]."""
        return lawful_times_s(rows)

    @pytest.fixture(scope="class")
    def features(self):
        return self.rows(60)

    @pytest.fixture(scope="class")
    def times(self, features):
        return self.law_s(features)

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
        predicted = fitted.predict(self.far_rows())
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


class StorableContract(RegressorContract):
    """What holds for those that a model file can keep."""

    def test_a_stored_model_predicts_the_same_to_the_last_bit(self, fitted, features, tmp_path):
        path = tmp_path / "model.safetensors"
        TrainedModel(regressor=fitted, provenance={"rows": 60}).save(path)
        again = load_model_file(path, {fitted.kind: type(fitted)})
        np.testing.assert_array_equal(again.regressor.predict(features), fitted.predict(features))
        assert (again.kind, again.provenance) == (fitted.kind, {"rows": 60})

    def test_a_stored_model_can_be_stored_again_unchanged(self, fitted, tmp_path):
        first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
        TrainedModel(regressor=fitted, provenance={}).save(first)
        load_model_file(first, {fitted.kind: type(fitted)}).save(second)
        assert first.read_bytes() == second.read_bytes()

    def test_an_unfitted_model_cannot_be_stored(self, tmp_path):
        with pytest.raises(CostModelError, match="before it was fitted"):
            TrainedModel(regressor=self.make(), provenance={}).save(tmp_path / "a.safetensors")
        assert not list(tmp_path.iterdir())
