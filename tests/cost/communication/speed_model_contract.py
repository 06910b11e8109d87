"""What every speed model must do."""

import numpy as np
import pytest

from forerun.adapters.classics.speed_models import SpeedPoint
from forerun.base.errors import InvalidSetupError


class SpeedModelContract:
    """Tests that each model inherits; ``make`` gives the model, ``points`` what it can be fitted to."""

    def make(self):
        raise NotImplementedError

    def points(self) -> list[SpeedPoint]:
        raise NotImplementedError

    def test_it_has_its_name_after_the_fit(self):
        model = self.make()
        assert model.fit(self.points()).name == model.name

    def test_it_reproduces_what_it_learned(self):
        points = self.points()
        fitted = self.make().fit(points).step_s(points)
        assert np.abs(fitted / [p.measured_s for p in points] - 1).mean() < 0.1

    def test_times_in_another_unit_scale_with_it(self):
        points = self.points()
        slower = [_times(point, 1000) for point in points]
        first, second = self.make().fit(points), self.make().fit(slower)
        assert second.step_s(points) == pytest.approx(1000 * first.step_s(points), rel=0.02)

    def test_intervals_hold_their_value_and_grow_away_from_the_points(self):
        points = self.points()
        fit = self.make().fit(points)
        far = [SpeedPoint(num_devices=512, num_nodes=1, num_servers=p.num_servers) for p in points[:1]]
        near, away = fit.intervals(points), fit.intervals(far)
        assert all(i.low < i.value < i.high for i in (*near, *away))
        widths = [np.log(i.high / i.low) for i in near]
        assert np.log(away[0].high / away[0].low) > np.median(widths)

    def test_parameters_are_numbers_with_names(self):
        assert all(np.isfinite(v) for v in self.make().fit(self.points()).parameters.values())

    def test_one_distinct_row_is_refused(self):
        with pytest.raises(InvalidSetupError, match=r"points of different size, got 1 \(5 rows\)"):
            self.make().fit(self.points()[:1] * 5)


def _times(point: SpeedPoint, factor: float) -> SpeedPoint:
    return SpeedPoint(
        num_devices=point.num_devices,
        num_nodes=point.num_nodes,
        batch_size_per_device=point.batch_size_per_device,
        num_servers=point.num_servers,
        step_time_s=factor * point.measured_s,
    )
