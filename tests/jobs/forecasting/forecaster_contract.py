"""What every forecaster must do; each inherits these tests."""

import numpy as np
import pytest

from forerun.jobs.forecasting.forecaster import Prefix, can_answer, path_of


def power_curve(num=60, floor=0.1, alpha=0.6, noise=0.0, seed=0):
    epochs = np.arange(1.0, num + 1)
    errors = floor + (1 - floor) * epochs**-alpha
    return epochs, errors * (1 + np.random.default_rng(seed).normal(0, noise, num))


def prefix(seen=20, num=60, floor=0.1, noise=0.01, seed=0, rates="cosine", scale=1.0):
    epochs, errors = power_curve(num, floor, noise=noise, seed=seed)
    shapes = {
        "cosine": 0.5 * (1 + np.cos(np.pi * np.arange(num) / num)),
        "constant": np.ones(num),
        "none": None,
    }
    siblings = np.stack([power_curve(num, floor + 0.01 * i, noise=0.01, seed=i + 5)[1] for i in range(3)])
    return Prefix(
        epochs=epochs,
        errors=scale * errors[:seen],
        rates=shapes[rates],
        siblings=scale * siblings,
    )


class ForecasterContract:
    name = ""

    @pytest.mark.parametrize("seen", [4, 7, 20, 59, 60])
    @pytest.mark.parametrize("rates", ["cosine", "constant"])
    def test_a_path_has_every_point_and_only_numbers(self, seen, rates):
        question = prefix(seen, rates=rates)
        path = path_of(self.name, question)
        assert path.shape == (60,)
        assert np.all(np.isfinite(path) & (path >= 0))

    def test_the_prefix_is_left_alone(self):
        question = prefix(20)
        before = question.errors.copy()
        path_of(self.name, question)
        np.testing.assert_array_equal(question.errors, before)

    def test_the_same_question_gets_the_same_answer(self):
        np.testing.assert_array_equal(path_of(self.name, prefix(20)), path_of(self.name, prefix(20)))

    def test_errors_ten_times_larger_give_a_path_ten_times_larger(self):
        once, ten = path_of(self.name, prefix(20)), path_of(self.name, prefix(20, scale=10.0))
        np.testing.assert_allclose(ten[20:], 10 * once[20:], rtol=self.scale_tolerance)

    scale_tolerance = 1e-6

    def test_a_flat_curve_stays_where_it_is_or_falls(self):
        epochs = np.arange(1.0, 31)
        question = Prefix(
            epochs=epochs,
            errors=np.full(10, 0.3),
            rates=np.ones(30),
            siblings=np.full((1, 30), 0.3),
        )
        path = path_of(self.name, question)
        assert np.all(path <= 0.3 + 1e-9)
        assert np.all(path >= 0)

    def test_uneven_points_are_no_obstacle(self):
        epochs = np.asarray([1.0, 2, 5, 6, 9, 14, 20, 30])
        question = Prefix(
            epochs=epochs,
            errors=0.1 + epochs[:6] ** -0.5,
            rates=np.ones(8),
            siblings=np.stack([0.1 + epochs**-0.5]),
        )
        assert np.all(np.isfinite(path_of(self.name, question)))

    def test_it_says_whether_it_can_answer(self):
        assert can_answer(self.name, prefix(10))
