"""The fit of Optimus' five coefficients."""

import pytest

from forerun.adapters.classics.server_models import SynchronousServerSpeed
from forerun.base.errors import InvalidSetupError
from studies.schedule.optimus_study import fit_server_speed

OPTIMUS_SYNC = (1.02, 2.78, 4.92, 0.00, 0.02)


def server_speed(*theta):
    return SynchronousServerSpeed(theta)


def test_a_server_fit_finds_its_coefficients():
    true = server_speed(*OPTIMUS_SYNC)
    grid = [(w, p) for w in (1, 2, 4, 8) for p in (1, 3, 6, 12)]
    workers, servers = zip(*grid, strict=True)
    found = fit_server_speed(workers, servers, [true(w, p) for w, p in grid])
    assert [found(w, p) for w, p in [(3, 5), (16, 16)]] == pytest.approx(
        [true(w, p) for w, p in [(3, 5), (16, 16)]]
    )


@pytest.mark.parametrize("speeds", [[float("nan")], [0.0], []])
def test_fits_refuse_nothing_and_nonsense(speeds):
    some = [1] * len(speeds)
    with pytest.raises(InvalidSetupError):
        fit_server_speed(some, some, speeds)
