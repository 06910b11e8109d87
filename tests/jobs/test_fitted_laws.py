"""``forecast scaling``: tables and folders of runs, budgets in work and in hours, times by predict."""

import json
import math

import pytest
from typer.testing import CliRunner

from forerun.base.errors import InvalidSetupError, RecordError
from forerun.jobs.fitted_laws import forecast_scaling
from forerun.jobs.forecast import forecast
from forerun.surface.cli.main import app

ROWS = "parameters,tokens,loss\n2e8,4e9,2.62\n2e8,2e10,2.44\n2.7e8,5e9,2.558\n2.7e8,2.5e10,2.385\n4.3e8,8e9,2.437\n"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(ROWS)
    return path


def test_budgets_and_targets_have_the_work_that_was_asked_for(table, tmp_path):
    found = forecast_scaling(table, budgets=["1e20flop", "2e20 FLOP"], target="loss<=2.3")
    works = [answer.best.flop.value for answer in found.answers]
    assert works[:2] == pytest.approx([1e20, 2e20])
    assert found.answers[2].best.loss.value == pytest.approx(2.3)
    unasked = forecast_scaling(tmp_path)
    assert unasked.runs == found.runs
    assert unasked.answers[0].best.flop.value == pytest.approx(10 * 6 * 2.7e8 * 2.5e10, rel=0.01)
    assert any(
        "tokens of the largest" in note for note in forecast_scaling(table, budgets=["1e24flop"]).notes
    )


def test_a_run_may_be_named_by_its_curve(table, tmp_path):
    (tmp_path / "last.csv").write_text(
        "step,val_loss\n" + "".join(f"{k},{2 + 1 / k}\n" for k in range(1, 41))
    )
    table.write_text(ROWS.replace("loss\n", "loss,run\n", 1).replace("2.437\n", ",last.csv\n"))
    assert forecast_scaling(table).runs[-1].loss == pytest.approx(2 + (1 / 39 + 1 / 40) / 2)


@pytest.mark.parametrize(
    ("header", "row", "read_as"),
    [
        ("n_params,n_tokens,flops,val_loss", "{n},{d},{c},{loss}", "loss from val_loss"),
        ("N,C,hue,loss", "{n},{c},#fff,{loss}", "flop from C"),
        (
            "params,total_tokens,train_loss,eval/c4/macro_loss",
            "{n},{d},9,{loss}",
            "loss from eval/c4/macro_loss",
        ),
        ("num_params,training_tokens,perplexity", "{n},{d},{ppl}", "parameters from num_params"),
    ],
)
def test_columns_are_read_as_tables_write_them(table, header, row, read_as):
    plain = forecast_scaling(table)
    runs = [
        {"n": r.parameters, "d": r.tokens, "c": r.flop, "loss": r.loss, "ppl": math.exp(r.loss)}
        for r in plain.runs
    ]
    table.write_text("\n".join([header, *(row.format(**run) for run in runs)]))
    found = forecast_scaling(table.parent)
    assert [r.tokens for r in found.runs] == pytest.approx([r.tokens for r in plain.runs])
    assert found.answers[0].best.loss.value == pytest.approx(plain.answers[0].best.loss.value)
    assert any(read_as in note for note in found.notes)


def test_two_columns_that_may_be_the_loss_are_both_named(table):
    table.write_text(ROWS.replace("loss", "c4_loss,web_loss", 1).replace("\n2", ",1\n2"))
    with pytest.raises(RecordError, match="c4_loss, web_loss may each be the loss; name one of them 'loss'"):
        forecast_scaling(table)


def test_hours_of_a_device_are_its_useful_work_by_predict(table):
    asked = {"model": "gpt2", "devices": ["h100-sxm"], "batch_size": 8, "price_usd_per_hour": 2.0}
    found = forecast_scaling(table, budgets=["500gpuh"], **asked)
    (price,) = found.answers[0].prices
    assert price.device_hours.value == pytest.approx(500)
    assert price.cost_usd.value == pytest.approx(1000, rel=0.01)
    from forerun.search.predict import predict

    rate = predict("gpt2", device="h100-sxm", batch_size=8)
    assert found.rates[0].flop_per_s.value == pytest.approx(
        6 * rate.num_parameters * rate.tokens_per_s_per_device.value
    )


def test_a_price_is_that_of_each_device():
    times = forecast(
        [0.3, 0.5, 0.6, 0.65, 0.68],
        model="mnist-cnn",
        devices=["t4", "2xt4"],
        dataset="mnist",
        batch_size=64,
        price_usd_per_hour=1.5,
    ).times
    assert [time.clock.price_usd_per_hour for time in times] == pytest.approx([1.5, 3.0])


def test_the_command_prints_the_answer_and_draws_it(table, tmp_path):
    words = ["forecast", "scaling", str(table), "--target", "loss<=2.3"]
    page = CliRunner().invoke(app, [*words, "--plot", str(tmp_path / "law.svg")])
    assert page.exit_code == 0, page.output
    assert "alpha" in page.output
    assert (tmp_path / "law.svg").stat().st_size > 1000
    answer = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert answer["num_sizes"] == 5
    best = answer["answers"][0]["best"]
    assert set(best) == {"flop", "parameters", "tokens", "loss", "learning_rate", "batch_size"}
    assert best["learning_rate"] is best["batch_size"] is None


def test_a_table_with_rates_and_batches_has_their_best(table):
    def best_batch(n, d):
        return 2**18 * (n * d / 1e18) ** 0.3

    lines = ["parameters,tokens,learning_rate,batch_size,loss"]
    for row in ROWS.splitlines()[1:]:
        n, d, loss = map(float, row.split(","))
        for rate in (-2, -1, 0, 1, 2):
            for batch in (-1, 0, 1):
                worse = 1 + 0.01 * rate**2 + 0.01 * batch**2
                lines.append(f"{n},{d},{0.001 * 2**rate},{best_batch(n, d) * 2**batch},{loss * worse}")
    table.write_text("\n".join(lines))
    found = forecast_scaling(table, budgets=["1e20flop"])
    best = found.answers[0].best
    assert best.learning_rate.low < 0.001 < best.learning_rate.high
    wanted = best_batch(best.parameters.value, best.tokens.value)
    assert best.batch_size.low < wanted < best.batch_size.high
    assert any("75 runs of 5 sizes" in note for note in found.notes)
    page = CliRunner().invoke(app, ["forecast", "scaling", str(table)])
    assert "batch size" in page.output
    table.write_text("\n".join(["parameters,tokens,learning_rate,batch_size,loss", *lines[1::15]]))
    alone = forecast_scaling(table)
    assert alone.tuning is None
    assert any("a size needs three runs" in note for note in alone.notes)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"budgets": ["1e21"]}, InvalidSetupError, "such as 1e21flop, 500gpuh or 10000usd, got '1e21'"),
        ({"budgets": ["500gpuh"]}, InvalidSetupError, "hours and prices are of one device"),
        ({"target": "accuracy>=0.9"}, InvalidSetupError, "a law of scaling is of a loss"),
        ({"model": "gpt2"}, InvalidSetupError, "both the model and the device"),
    ],
)
def test_questions_that_cannot_be_answered(table, asked, error, message):
    with pytest.raises(error, match=message):
        forecast_scaling(table, **asked)


def test_a_row_without_a_loss_is_named(table):
    table.write_text(ROWS.replace("2.437", ""))
    with pytest.raises(RecordError, match=r"runs.csv, line 6: expected a loss, or the run's curve"):
        forecast_scaling(table)


def test_sizes_as_people_write_them_are_the_same_runs(tmp_path):
    sizes = (70, 125, 250, 410, 760)
    losses = [1.69 + 406.4 / (n * 1e6) ** 0.34 + 410.7 / (2e7 * n) ** 0.28 for n in sizes]
    written = {
        "params,tokens,loss": "{0}M,{1}B,{2}",
        "params (M),tokens_b,val loss": "{0},{1},{2}",
        "model_size,training_tokens,final_val_loss": "{0}e6,{1}e9,{2}",
    }
    found = []
    for header, row in written.items():
        table = tmp_path / "runs.csv"
        rows = [row.format(n, n * 0.02, loss) for n, loss in zip(sizes, losses, strict=True)]
        table.write_text("\n".join([header, *rows]))
        found.append(forecast_scaling(table, budgets=["1e21flop"]))
    bests = [one.answers[0].best for one in found]
    assert bests[0] == bests[1] == bests[2]
    # One number of tokens a parameter: the best size is open, the loss of the size that is named is not.
    assert bests[0].loss.low < 2.33 < bests[0].loss.high < bests[0].loss.low + 0.2
    assert any("do not tell how to divide" in note for note in found[0].notes)
    table.write_text("epoch,loss\n1,2\n")
    with pytest.raises(RecordError, match=r"got epoch, loss; rename that of the parameters"):
        forecast_scaling(table)
