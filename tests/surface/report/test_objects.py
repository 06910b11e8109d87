"""Answers in a notebook."""

import pytest

import forerun

RUN = {"batch_size": 32, "dataset": "cifar10", "epochs": 2}


@pytest.fixture(scope="module")
def answers():
    estimate = forerun.predict("cnn", device="t4", **RUN)
    return {
        "estimate": estimate,
        "comparison": estimate.compare(forerun.predict("cnn", device="l4", **RUN)),
        "sweep": forerun.sweep("cnn", devices=["t4", "l4"], batch_sizes=[32, 64], precisions=["fp32"]),
        "scale": forerun.scale("cnn", device="v100-sxm2-16gb", num_devices=[1, 2], batch_size=32),
        "plan": forerun.plan("cnn", devices="t4,l4", batch_sizes=[32, 64], dataset="cifar10", epochs=1),
        "advice": forerun.advise("cnn", device="t4", **RUN),
    }


def test_each_has_a_page_as_text_and_a_card_as_html(answers):
    for answer in answers.values():
        page, card = str(answer), answer._repr_html_()
        assert page.count("\n") >= 2
        assert "(run=" not in page
        assert card.startswith("<pre style=")
        assert card.endswith("</pre>")
        assert "<script" not in card


def test_rows_are_a_table_with_a_column_for_each_end_of_an_interval(answers):
    frame = answers["estimate"].to_frame()
    assert frame["step_time_s"][0] == answers["estimate"].step_time_s.value
    assert frame["step_time_s_low"][0] <= frame["step_time_s"][0]
    assert len(answers["sweep"].to_frame()) == 4
    assert list(answers["scale"].to_frame()["num_devices"]) == [1, 2]


def test_answers_are_drawn(answers):
    for answer in (answers[name] for name in ("estimate", "comparison", "sweep", "scale", "plan", "advice")):
        assert answer.plot().axes


def test_schedules_and_forecasts_are_drawn_and_no_file_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = tmp_path / "jobs.csv"
    jobs.write_text(
        "name,points,batch_size,steps,num_devices\na,1:100 2:190,32,2000,2\nb,1:50 2:95,64,400,1\n"
    )
    schedule = forerun.schedule(jobs, cluster="1x2xt4", policies=["srtf"])
    curve = [0.95 - 0.6 * n**-0.7 for n in range(1, 16)]
    forecast = forerun.forecast(curve, metric="accuracy", schedule="cosine:epochs=30")
    for answer in (schedule, forecast):
        assert answer.plot().axes
        assert answer.to_frame().shape[0] >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.csv"]


def test_a_part_without_a_page_is_its_fields(answers):
    assert str(answers["estimate"].step_time_s).startswith("Interval(value=")
    assert answers["estimate"].step_time_s._repr_html_() is None
    assert answers["estimate"].to_dict() == answers["estimate"].as_dict()
