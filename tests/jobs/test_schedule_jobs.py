"""Speeds of the jobs of a schedule: predicted on one device and several, fitted, measured; and what is asked for."""

import pytest

from forerun.base.errors import InvalidSetupError, RecordError, UnknownDeviceError, UsageError
from forerun.jobs.schedule import schedule
from forerun.jobs.schedule_jobs import Links, known_jobs, predicted_sizes
from forerun.jobs.scheduling.job import NodeGroup, parse_cluster
from forerun.jobs.scheduling.jobs_file import check_entries

MODEL = {"name": "a", "model": "mnist-cnn", "batch_size": 1024, "epochs": 2, "dataset": "mnist"}


def known(row, cluster, **links):
    return known_jobs(check_entries([row]), parse_cluster(cluster), Links(**links))[0]


@pytest.mark.parametrize(
    ("nodes", "per_node", "most", "sizes"),
    [
        (1, 1, 1, []),
        (1, 8, 8, [2, 4, 8]),
        (2, 4, 8, [2, 4, 8]),
        (5, 6, 100, [2, 4, 6, 12, 24]),
        (4, 1, 4, [2, 4]),
        (8, 4, 4, [2, 4]),
    ],
)
def test_sizes_asked_about_double_up_to_the_limit(nodes, per_node, most, sizes):
    group = NodeGroup(device="t4", num_nodes=nodes, devices_per_node=per_node)
    assert predicted_sizes(group, most) == sizes


def test_a_predicted_job_is_faster_on_more_devices_and_slower_over_a_slow_link():
    fast = known(MODEL, "2x8xv100-sxm2-16gb", inter="infiniband-hdr")
    slow = known(MODEL, "2x8xv100-sxm2-16gb", inter="ethernet-1g")
    assert fast.source == "predicted"
    assert fast.speed_spread > 0
    assert fast.job.work_samples == 2 * 60_000
    (of_fast,), (of_slow,) = fast.job.training.speeds.values(), slow.job.training.speeds.values()
    assert of_fast(1, 1, 1024) < of_fast(8, 1, 8 * 1024)
    assert of_slow(16, 2, 1024) < of_fast(16, 2, 1024)


def test_jobs_of_one_model_have_the_speeds_of_their_own_settings():
    rows = [
        MODEL | {"name": name, "precision": precision} for name, precision in (("a", "fp32"), ("b", "amp"))
    ]
    rows.append(MODEL | {"name": "c", "layout": "nhwc"})
    speeds = [
        item.job.training.speeds["v100-sxm2-16gb"](1, 1, 1024)
        for item in known_jobs(check_entries(rows), parse_cluster("1x1xv100-sxm2-16gb"), Links())
    ]
    assert len(set(speeds)) == 3


def test_the_link_between_nodes_is_asked_for_not_guessed():
    with pytest.raises(UnknownDeviceError, match="--inter"):
        known(MODEL, "2x8xv100-sxm2-16gb")


def test_a_table_of_steps_is_fitted_and_its_holes_are_named(tmp_path):
    table = tmp_path / "steps.csv"
    rows = [(1, 32, 0.1), (1, 64, 0.18), (2, 64, 0.12), (4, 128, 0.13)]
    table.write_text(
        "num_devices,batch_size,step_time_s\n" + "".join(f"{n},{b},{s}\n" for n, b, s in rows),
        encoding="utf-8",
    )
    row = {"name": "a", "table": str(table), "batch_size": 64, "steps": 1000}
    speed = known(row, "1x4xt4").job.training.speeds["t4"]
    for n, batch, step_s in rows:
        assert batch / speed(n, 1, batch) == pytest.approx(step_s, rel=0.1)
    table.write_text("num_devices,batch_size,step_time_s\n1,32,\n", encoding="utf-8")
    with pytest.raises(RecordError, match=r"steps\.csv, line 2: .step_time_s. must be a number above zero"):
        known(row, "1x4xt4")


def test_a_target_is_forecast_from_the_losses_so_far(tmp_path):
    curve = tmp_path / "losses.csv"
    losses = [1 / (0.2 * k + 1.0) for k in range(1, 13)]
    curve.write_text("loss\n" + "".join(f"{loss}\n" for loss in losses), encoding="utf-8")
    row = {
        "name": "a",
        "points": "1:100",
        "batch_size": 10,
        "epochs": 60,
        "dataset_size": 1000,
        "target": 1 / (0.2 * 30 + 1.0),
        "curve": str(curve),
    }
    found = known(row, "1x1xt4")
    # The curve is at its target after 30 epochs, 12 are done.
    assert found.job.work_samples == pytest.approx(18_000, rel=0.1)
    assert found.work_spread > 0
    curve.write_text("accuracy\n0.5\n", encoding="utf-8")
    with pytest.raises(RecordError, match=r"line 2: .loss. must be a number above zero, got None; add it"):
        known(row, "1x1xt4")


def test_points_for_other_devices_than_there_are():
    row = {"name": "a", "points": "v100 1:100", "batch_size": 10, "steps": 10}
    with pytest.raises(InvalidSetupError, match="points are for v100, the cluster has t4"):
        known(row, "1x4xt4")


def test_mappings_do_as_well_as_a_file():
    rows = [{"name": "a", "points": {1: 100, 2: 190}, "batch_size": 32, "steps": 3000}]
    found = schedule(rows, cluster="1x2xt4", policies=["foresight"])
    (finish,) = found.outcomes[0].finish_times
    assert finish.finish_s.value == pytest.approx(60 + 3000 * 32 / 190)
    assert finish.finish_s.low < finish.finish_s.value < finish.finish_s.high


def test_a_table_is_fitted_once_for_all_its_jobs(tmp_path, monkeypatch):
    import forerun.jobs.schedule_jobs as module

    table = tmp_path / "steps.csv"
    table.write_text("num_devices,batch_size,step_time_s\n1,32,0.1\n2,64,0.12\n", encoding="utf-8")
    fits = []
    fit = module.fit_data_parallel
    monkeypatch.setattr(module, "fit_data_parallel", lambda *given: fits.append(given) or fit(*given))
    rows = [{"name": f"j{i}", "table": str(table), "batch_size": 32 + i, "steps": 10} for i in range(50)]
    said = []
    found = known_jobs(check_entries(rows), parse_cluster("1x4xt4"), Links(), said.append)
    assert len(fits) == 1
    assert said == ["speed of j0, job 1 of 50"]
    assert len({id(item.job.training.speeds["t4"]) for item in found}) == 1


def test_min_run_and_preemptible_reach_the_job():
    row = {"name": "a", "points": "1:100", "batch_size": 32, "steps": 10}
    job = known({**row, "min_run": "30min"}, "1x4xt4").job
    assert (job.min_run_s, job.is_preemptible) == (1800.0, True)
    assert not known({**row, "preemptible": False}, "1x4xt4").job.is_preemptible


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"table": "steps.csv"}, r"job 'late': steps\.csv: expected steps on t4, got none"),
        ({"model": "resnet5"}, "job 'late': no model 'resnet5'"),
        ({"points": "1:1", "elastic": False, "num_devices": 9}, "job 'late' asks for 9 devices of one kind"),
        (
            {"table": "small.csv", "batch_size": 1, "num_devices": 2, "elastic": False},
            "job 'late': a batch of 1 runs on none",
        ),
    ],
)
def test_an_error_names_the_job_before_anything_is_simulated(tmp_path, monkeypatch, changed, message):
    monkeypatch.chdir(tmp_path)
    header = "device,num_devices,batch_size,step_time_s\n"
    (tmp_path / "steps.csv").write_text(header + "v100,1,32,0.1\n", encoding="utf-8")
    (tmp_path / "small.csv").write_text(header + "t4,1,32,0.1\n", encoding="utf-8")
    rows = [
        {"name": "first", "points": "1:100", "batch_size": 32, "steps": 10},
        {"name": "late", "batch_size": 32, "steps": 10, **changed},
    ]
    with pytest.raises(UsageError, match=message) as caught:
        schedule(rows, cluster="1x4xt4")
    assert "\n" not in str(caught.value)
