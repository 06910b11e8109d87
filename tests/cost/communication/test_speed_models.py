"""Fitted speed models: the contract, identifiability, choice."""

import numpy as np
import pytest
from speed_model_contract import SpeedModelContract

from forerun.adapters.classics.model_choice import AVERAGE, POLLUX, RING, choose_speed_model
from forerun.adapters.classics.server_models import OptimusModel
from forerun.adapters.classics.speed_models import LogQuadraticModel, SmoothedModel, SpeedPoint
from forerun.base.errors import InvalidSetupError


def placements(scatter=0.02):
    """A job of a ring on nodes of four, 0.02 s and 2 ms a sample, with some scatter."""
    rng, found = np.random.default_rng(1), []
    for nodes, devices in ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (4, 16)):
        for batch in (16, 64):
            sync = 2 * (devices - 1) / devices * (0.01 if nodes == 1 else 0.08)
            step = 0.02 + 0.002 * batch + sync
            found.append(
                SpeedPoint(
                    num_devices=devices,
                    num_nodes=nodes,
                    batch_size_per_device=batch,
                    step_time_s=step * np.exp(scatter * rng.normal()),
                )
            )
    return found


def servers(scatter=0.02, workers=(1, 2, 4, 8), numbers=(1, 2, 4)):
    """A job on parameter servers of Optimus' form."""
    rng = np.random.default_rng(2)
    return [
        SpeedPoint(
            num_devices=w,
            num_servers=p,
            batch_size_per_device=64 / w,
            step_time_s=(4 / w + 0.5 + 0.8 * w / p + 0.01 * w + 0.02 * p) * np.exp(scatter * rng.normal()),
        )
        for w in workers
        for p in numbers
    ]


class TestPollux(SpeedModelContract):
    def make(self):
        return POLLUX

    def points(self):
        return placements()


class TestRing(SpeedModelContract):
    def make(self):
        return RING

    def points(self):
        return placements()


class TestAverage(SpeedModelContract):
    def make(self):
        return AVERAGE

    def points(self):
        return placements()


class TestSmoothedAverage(SpeedModelContract):
    def make(self):
        return SmoothedModel(AVERAGE)

    def points(self):
        return placements()


class TestOptimus(SpeedModelContract):
    def make(self):
        return OptimusModel()

    def points(self):
        return servers()


class TestLogQuadratic(SpeedModelContract):
    def make(self):
        return LogQuadraticModel()

    def points(self):
        return servers()


def test_optimus_finds_the_coefficients_it_was_made_with():
    points = servers(scatter=0.0)
    found = OptimusModel().fit(points).parameters
    # M = 1 stands for the whole global batch.
    assert list(found.values()) == pytest.approx([4, 0.5, 0.8, 0.01, 0.02], rel=1e-6)


def test_as_many_servers_as_workers_are_refused_and_the_message_names_the_coefficients():
    points = [p for p in servers(workers=range(1, 9), numbers=range(1, 9)) if p.num_devices == p.num_servers]
    with pytest.raises(
        InvalidSetupError, match=r"do not tell t1 .*t2 .*t3 .*t4 .*apart.*5 independent.*got 3"
    ):
        OptimusModel().fit(points)


def test_a_model_is_chosen_by_left_out_points():
    chosen = choose_speed_model(servers())
    assert set(chosen.errors) >= {
        "optimus-synchronous",
        "optimus-asynchronous",
        "log-quadratic",
        "server-average",
    }
    assert chosen.errors[chosen.fitted.name] == min(chosen.errors.values())
    assert chosen.errors[chosen.fitted.name] < 0.05


@pytest.mark.parametrize(
    ("points", "name", "message"),
    [
        ([], None, "at least 2 points of different size, got 0"),
        (placements()[:1] * 3, None, r"at least 2 points of different size, got 1 \(3 rows\)"),
        (placements() + servers(), None, "servers at every point or at none"),
        (placements(), "polux", "expected a speed model of pollux.*got 'polux'"),
    ],
)
def test_choices_that_cannot_be_made(points, name, message):
    with pytest.raises(InvalidSetupError, match=message):
        choose_speed_model(points, name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_devices": 0}, "num_devices must be at least 1, got 0"),
        ({"num_devices": 2, "num_nodes": 3}, "2 devices cannot be on 3 nodes"),
        ({"num_devices": 1, "step_time_s": -0.1}, "above zero seconds and finite, got -0.1"),
        ({"num_devices": 1, "step_time_s": float("nan")}, "above zero seconds"),
        (
            {"num_devices": 1, "step_time_s": 1.0, "synchronisation_s": 2.0},
            "between zero and the step, got 2",
        ),
        ({"num_devices": 1, "batch_size_per_device": 0}, "batch_size_per_device must be above zero"),
    ],
)
def test_points_that_cannot_be_meant(values, message):
    with pytest.raises(InvalidSetupError, match=message):
        SpeedPoint(**values)


@pytest.mark.parametrize("model", [POLLUX, RING, AVERAGE])
def test_two_devices_on_nodes_that_nobody_measured_are_no_faster_than_on_one(model):
    steps = {1: 0.084, 2: 0.134, 4: 0.159, 8: 0.1715}
    one = [SpeedPoint(num_devices=n, batch_size_per_device=32, step_time_s=s) for n, s in steps.items()]
    asked = [SpeedPoint(num_devices=2, num_nodes=nodes, batch_size_per_device=32) for nodes in (1, 2)]
    inside, apart = model.fit(one).step_s(asked)
    assert apart > inside
