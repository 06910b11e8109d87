"""Parameter servers and fitted speeds by the calls a user makes."""

import csv

import pytest

import forerun
from forerun.adapters.classics.speed_models import read_points
from forerun.base.errors import InvalidSetupError, RecordError, UnknownDeviceError


def table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def server_rows(workers=(1, 2, 4, 8), servers=(1, 2, 4)):
    return [
        {
            "num_workers": w,
            "num_servers": p,
            "batch_size_per_device": 64 / w,
            "step_time_s": 4 / w + 0.5 + 0.8 * w / p + 0.01 * w + 0.02 * p,
        }
        for w in workers
        for p in servers
    ]


def test_the_restated_problem_has_two_curves_that_fall_and_flatten_with_steps_and_epochs():
    found = forerun.scale_servers(
        "resnet50",
        coefficients="optimus",
        synchronous=False,
        num_workers=range(1, 33),
        num_servers=(2, 4),
        batch_size=128,
        dataset="cifar10",
        epochs=28,
    )
    times = {p: [q.job_time_s for q in found.points if q.num_servers == p] for p in (2, 4)}
    for hours in times.values():
        assert hours == sorted(hours, reverse=True)
        assert hours[-2] / hours[-1] < 1.02
    assert times[2][-1] > 1.5 * times[4][-1]
    first = found.points[0]
    assert (first.num_steps_per_epoch, first.num_steps) == (391, 28 * 391)


def test_first_principles_use_the_link_the_workers_and_the_servers():
    def rate(**options):
        asked = {"device": "t4", "inter": "ethernet-10g", "num_workers": [8], "num_servers": [2]} | options
        return forerun.scale_servers("torchvision:resnet18", **asked).points[0].throughput_samples_per_s

    assert rate(inter="ethernet-1g") < rate() < rate(inter="ethernet-100g")
    assert rate() < rate(num_servers=[4])
    assert rate(synchronous=False) != rate()


def test_a_batch_is_that_of_each_worker_unless_all_share_one():
    def points(**options):
        asked = {"num_workers": [1, 4], "num_servers": [2], "coefficients": "optimus"} | options
        return forerun.scale_servers("resnet50", **asked)

    each, shared = points(batch_size=32), points(global_batch_size=128)
    assert [p.batch_size_per_update for p in each.points] == [32, 128]
    assert [p.batch_size_per_update for p in shared.points] == [128, 128]
    # Four workers with 32 samples each are four workers that share 128.
    assert each.points[1].step_time_s == pytest.approx(shared.points[1].step_time_s)
    assert each.points[1].throughput_samples_per_s == pytest.approx(128 / each.points[1].step_time_s)
    assert (each.is_global_batch, shared.is_global_batch) == (False, True)
    # A worker has as much to do as alone, so that only what they send takes longer.
    assert each.points[1].efficiency == pytest.approx(each.points[0].step_time_s / each.points[1].step_time_s)
    apart = points(batch_size=32, synchronous=False)
    assert [p.batch_size_per_update for p in apart.points] == [32, 32]


def test_a_table_of_servers_is_asked_at_the_batch_of_a_worker(tmp_path):
    points = table(tmp_path / "points.csv", server_rows())
    own, asked = (
        forerun.fit_speed(points, num_workers=[4], num_servers=[2], batch_size=batch).points[0]
        for batch in (None, 32)
    )
    assert (own["batch_size_per_device"], asked["batch_size_per_device"]) == (16, 32)


def test_a_fit_extrapolates_with_intervals_and_says_so(tmp_path):
    found = forerun.fit_speed(
        table(tmp_path / "points.csv", server_rows()), num_workers=[4, 16], num_servers=[2]
    )
    inside, beyond = found.points
    assert inside["step_time_s"].value == pytest.approx(4 / 4 + 0.5 + 1.6 + 0.04 + 0.04, rel=0.05)
    assert beyond["step_time_s"].low < 4 / 16 + 0.5 + 6.4 + 0.16 + 0.04 < beyond["step_time_s"].high
    assert any("extrapolated" in note for note in found.notes)


def test_proposals_are_sizes_that_tell_the_coefficients_apart():
    found = forerun.fit_speed(None, num_workers=range(1, 9), num_servers=range(1, 5), num_proposals=5)
    sizes = {(p["num_workers"], p["num_servers"]) for p in found.proposals}
    assert len(sizes) == 5
    assert len({w for w, _ in sizes}) > 2
    assert found.model is None


def test_proposals_leave_out_what_was_measured(tmp_path):
    rows = server_rows(workers=(1, 8), servers=(1, 4))
    found = forerun.fit_speed(
        table(tmp_path / "points.csv", rows),
        speed_model="log-quadratic",
        num_workers=range(1, 9),
        num_servers=range(1, 5),
        num_proposals=3,
    )
    measured = {(row["num_workers"], row["num_servers"]) for row in rows}
    assert not measured & {(p["num_workers"], p["num_servers"]) for p in found.proposals}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (server_rows()[:1] * 4, r"points of different size, got 1 \(4 rows\)"),
        (
            [
                r
                for r in server_rows((1, 2, 3, 4, 5), (1, 2, 3, 4, 5))
                if r["num_workers"] == r["num_servers"]
            ],
            "do not tell t1 .*apart",
        ),
        ([r | {"step_time_s": -1} for r in server_rows()], "line 2: a step time must be above zero"),
        ([r | {"num_workers": 0} for r in server_rows()], "line 2: num_devices must be at least 1, got 0"),
        ([r | {"num_workers": 1.5} for r in server_rows()], "must be a whole number, got '1.5'"),
        ([r | {"step_time_s": "fast"} for r in server_rows()], "'step_time_s' must be a number, got 'fast'"),
        (
            [r | {"step_tme_s": 1} for r in server_rows()],
            "unknown column 'step_tme_s'; did you mean step_time_s",
        ),
        ([{"num_servers": 1, "step_time_s": 1}], "expected num_devices or num_workers, got neither"),
        (
            [{"num_devices": 2, "throughput_samples_per_s": 9}],
            "line 2: expected the batch size of one device",
        ),
        (
            [{"num_devices": 1, "batch_size_per_device": 8}],
            "expected step_time_s or throughput_samples_per_s above zero",
        ),
    ],
)
def test_points_that_cannot_be_fitted(tmp_path, rows, message):
    with pytest.raises((InvalidSetupError, RecordError), match=message):
        forerun.fit_speed(table(tmp_path / "points.csv", rows), speed_model="optimus-synchronous")


def test_throughput_serves_as_a_time(tmp_path):
    rows = [
        {"num_devices": n, "batch_size_per_device": 32, "throughput_samples_per_s": 32 * n / (0.1 + 0.01 * n)}
        for n in (1, 2, 4, 8)
    ]
    found = forerun.fit_speed(table(tmp_path / "points.csv", rows))
    assert found.points[0]["measured_step_time_s"] == pytest.approx(0.11)


@pytest.mark.parametrize(
    ("header", "first", "second"),
    [("num_nodes,num_replicas", "1,2", "3,6"), ("placement", "2", "114")],
)
def test_traces_of_pollux_are_read_under_their_own_names(tmp_path, header, first, second):
    """github.com/petuum/adaptdl: a placement has a digit for the devices of each node, and times are in seconds."""
    file = tmp_path / "scalability.csv"
    rows = [f"{first},32,0.141,0.099", f"{second},129,0.16,0.056", f"{second},32,0.2,0.1"]
    file.write_text("\n".join([f"{header},local_bsz,step_time,sync_time", *rows]))
    sizes = [(p.num_devices, p.num_nodes, p.batch_size_per_device) for p in read_points(file)]
    assert sizes == [(2, 1, 32), (6, 3, 129), (6, 3, 32)]
    assert [(p.step_time_s, p.synchronisation_s) for p in read_points(file)][1] == (0.16, 0.056)
    file.write_text(f"{header},batch_size_per_device,step_time\n{first},32,141\n")
    with pytest.raises(RecordError, match="unknown column"):  # maybe in milliseconds
        read_points(file)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_workers": [0]}, InvalidSetupError, "at least 1, got 0"),
        ({"num_servers": [-1]}, InvalidSetupError, "at least 1, got -1"),
        ({"device": None}, InvalidSetupError, "expected the device of a worker"),
        ({"inter": None}, UnknownDeviceError, "between workers and servers.*--inter"),
        ({"coefficients": "optimum"}, InvalidSetupError, "unknown coefficients 'optimum'"),
        ({"price_usd_per_hour": 1.0}, InvalidSetupError, "cannot be used for workers and servers"),
    ],
)
def test_servers_that_cannot_be_asked(options, error, message):
    asked = {"device": "t4", "inter": "ethernet-10g", "num_workers": [2], "num_servers": [1]} | options
    with pytest.raises(error, match=message):
        forerun.scale_servers("torchvision:resnet18", **asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": None}, "expected measured points, got none"),
        ({"points": None, "num_proposals": 3}, "proposals need candidates: give --workers and --servers"),
        ({"points": "no-such.csv"}, "check the path"),
    ],
)
def test_fits_of_nothing(arguments, message):
    with pytest.raises((InvalidSetupError, RecordError), match=message):
        forerun.fit_speed(**arguments)
