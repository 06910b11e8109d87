"""One run has one step time: predict, sweep, scale, plan and the page agree on it, for PyTorch and for Keras."""

import json
from dataclasses import dataclass, field

import pytest

import forerun
from forerun.base.errors import UsageError
from forerun.cost.time.correction import CALIBRATIONS_VARIABLE, calibration_path
from forerun.cost.time.weights import save_weights
from forerun.question.devices import find_device
from forerun.question.sharing import Strategy
from forerun.surface.web.answers import Answers
from forerun.surface.web.load import Tracer
from forerun.surface.web.questions import PlanBody, PredictBody, ScaleBody
from forerun.surface.web.reach import kept_config
from made_calibrations import made_calibration

CNN = "cnn:depth=2,base_filters=32"
LINKS = {"inter": "infiniband-hdr"}


@dataclass(frozen=True)
class Case:
    """A model with a setup that every verb can be asked about."""

    model: str
    batch_size: int = 32
    precision: str = "fp32"
    layout: str | None = None
    options: dict = field(default_factory=dict)

    @property
    def setup(self):
        """Options of predict and scale."""
        layout = {} if self.layout is None else {"layout": self.layout}
        return {"batch_size": self.batch_size, "precision": self.precision, **layout, **self.options}

    @property
    def axes(self):
        """The same as the axes of a plan."""
        one_value = {
            "batch_sizes": self.batch_size,
            "precisions": self.precision,
            "layouts": self.layout,
            "image_sizes": self.options.get("image_size"),
        }
        axes = {name: [value] for name, value in one_value.items() if value is not None}
        return axes | {name: value for name, value in self.options.items() if name != "image_size"}

    def __str__(self):
        words = (self.model, self.batch_size, self.precision, self.layout, *self.options.values())
        return " ".join(str(word) for word in words if word is not None)


PYTORCH = [
    Case(CNN),
    Case(CNN, 64, "amp", "nhwc", {"optimizer": "adam"}),
    Case("mnist-cnn", 128, options={"compile": True, "torch_version": "2.2"}),
    Case("torchvision:resnet18", 16, options={"image_size": 64, "optimizer": "momentum"}),
]
KERAS = [
    Case(f"keras:{CNN}", options={"optimizer": "adam"}),
    Case(f"keras:{CNN}", 64, options={"optimizer": "adam"}),
    Case("keras:mlp:depth=1,width=64", 64, "amp", options={"optimizer": "adam"}),
]
CASES = [*PYTORCH, *KERAS]
DEVICES = ("t4", "v100-sxm2-16gb", "cpu")


def ends(interval):
    """Value, low and high of an interval, of an answer in Python or in JSON."""
    if isinstance(interval, dict):
        return [interval[name] for name in ("value", "low", "high")]
    return [interval.value, interval.low, interval.high]


def same(one, other):
    assert ends(one) == pytest.approx(ends(other), rel=1e-6)


def agree(one, other):
    same(one.step_time_s, other.step_time_s)
    same(one.throughput_samples_per_s, other.throughput_samples_per_s)


def planned(case, device):
    found = forerun.plan(case.model, devices=device, dataset_size=50_000, **case.axes)
    (point,) = found.points
    return point


@pytest.fixture(scope="module")
def page():
    tracer = Tracer()
    yield Answers(tracer)
    tracer.close()


@pytest.fixture(scope="module")
def alone():
    """Asks for the answer of one device, once for each case."""
    known = {}

    def ask(case, device):
        key = str(case), device
        if key not in known:
            known[key] = forerun.predict(case.model, device=device, **case.setup)
        return known[key]

    return ask


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_of_one_device(case, device):
    own = forerun.predict(case.model, device=device, **case.setup)
    point = planned(case, device)
    agree(own, point)
    assert own.fits == point.fits
    assert own.layout == point.layout
    (alone,) = forerun.scale(case.model, device=device, num_devices=[1], **case.setup).points
    agree(own, alone)
    assert alone.peak_memory_bytes == pytest.approx(own.peak_memory_bytes.value)
    options = {name: value for name, value in case.setup.items() if name not in ("batch_size", "precision")}
    swept = forerun.sweep(
        case.model,
        devices=[device, "l4"],
        batch_sizes=[case.batch_size, 2 * case.batch_size],
        precisions=[case.precision],
        **options,
    )
    times = (swept.step_time_s, swept.step_time_low_s, swept.step_time_high_s)
    assert [float(values[0, 0, 0]) for values in times] == pytest.approx(ends(own.step_time_s), rel=1e-6)
    rates = (
        swept.throughput_samples_per_s,
        swept.throughput_low_samples_per_s,
        swept.throughput_high_samples_per_s,
    )
    found = [float(values[0, 0, 0]) for values in rates]
    assert found == pytest.approx(ends(own.throughput_samples_per_s), rel=1e-6)


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_of_several_devices(case, strategy, alone):
    for device, links in (("1x4xv100-sxm2-16gb", {}), ("2x4xt4", LINKS)):
        own = forerun.predict(case.model, device=device, strategy=strategy, **links, **case.setup)
        curve = forerun.scale(
            case.model,
            device=device,
            num_devices=[1, own.num_devices],
            strategy=strategy,
            **links,
            **case.setup,
        )
        agree(own, curve.points[-1])
        assert curve.points[-1].peak_memory_bytes == pytest.approx(own.peak_memory_bytes.value)
        agree(alone(case, device.split("x", 2)[2]), curve.points[0])


def test_an_epoch_that_ends_in_a_part_of_a_step_behind_a_slow_loader():
    fed = {"dataset_size": 1000, "epochs": 3, "loader_ms": 0.05, "loader_workers": 0}
    own = forerun.predict(CNN, device="t4", batch_size=64, **fed)
    (point,) = forerun.plan(CNN, devices="t4", batch_sizes=[64], precisions=["fp32"], **fed).points
    for name in ("epoch_time_s", "job_time_s", "energy_j"):
        same(getattr(own, name), getattr(point, name))


@pytest.mark.parametrize(
    "sharing", [{"strategy": "fsdp"}, {"parallel": "tp=2,pp=2", "accumulation": 4}], ids=str
)
@pytest.mark.parametrize("precision", ["amp-bf16", "fp16"])
def test_a_model_that_devices_divide(sharing, precision, page):
    model, job = "gpt:depth=4,width=256,vocabulary=512", {"dataset_size": 4001, "epochs": 2}
    setup = {"sequence_length": 64, "optimizer": "adamw", **sharing}
    of_batch = {"batch_size": 4, "precision": precision}
    own = forerun.predict(model, device="8xa100-sxm4-40gb", **of_batch, **setup, **job)
    (point,) = forerun.scale(
        model, device="a100-sxm4-40gb", num_devices=[8], **of_batch, **setup, **job
    ).points
    axes = {"batch_sizes": [4], "precisions": [precision]}
    points = forerun.plan(
        model, devices="a100-sxm4-40gb,8xa100-sxm4-40gb", minimize="energy", **axes, **setup, **job
    ).points
    (in_plan,) = (each for each in points if each.num_devices == 8)
    for answer in (point, in_plan):
        agree(own, answer)
        same(own.job_time_s, answer.job_time_s)
        assert answer.fits == own.fits
    same(own.energy_j, in_plan.energy_j)
    same(own.peak_memory_bytes, in_plan.peak_memory_bytes)
    swept = forerun.sweep(model, devices=["8xa100-sxm4-40gb", "8xt4"], **axes, **setup)
    assert swept.step_time_s[0, 0, 0] == pytest.approx(own.step_time_s.value, rel=1e-6)
    rate = swept.throughput_samples_per_s[0, 0, 0]
    assert rate == pytest.approx(own.throughput_samples_per_s.value, rel=1e-6)
    body = PredictBody(model=model, device="8xa100-sxm4-40gb", **of_batch, **setup, **job)
    same(page.whole("predict", body)["job_time_s"], own.job_time_s)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_of_several_devices_in_a_plan(case):
    own = forerun.predict(case.model, device="1x4xv100-sxm2-16gb", **case.setup)
    point = planned(case, "v100-sxm2-16gbx4")
    agree(own, point)
    assert own.fits == point.fits


@pytest.mark.parametrize(
    "case", [*(c for c in PYTORCH if "torch_version" not in c.options), KERAS[0]], ids=str
)
def test_the_page_says_what_python_says(case, page):
    own = forerun.predict(case.model, device="t4", **case.setup).as_dict()
    assert page.whole("predict", PredictBody(model=case.model, device="t4", **case.setup)) == own
    for strategy in Strategy:
        words = {"model": case.model, "device": "2x4xt4", "strategy": str(strategy), **LINKS, **case.setup}
        several = page.whole("predict", PredictBody(**words))
        (point,) = page.whole("scale", ScaleBody(**words, num_devices=[8]))["points"]
        for name in ("step_time_s", "throughput_samples_per_s"):
            same(several[name], point[name])
            same(several[name], getattr(forerun.predict(**words), name))


def test_the_page_plans_what_python_predicts(page):
    case = PYTORCH[1]
    (point,) = page.whole(
        "plan", PlanBody(models=[case.model], devices=["t4"], dataset_size=50_000, **case.axes)
    )["points"]
    own = forerun.predict(case.model, device="t4", **case.setup)
    same(point["step_time_s"], own.step_time_s)
    same(point["throughput_samples_per_s"], own.throughput_samples_per_s)
    assert point["fits"] == own.fits


def test_every_verb_says_alike_that_positions_end(page, tmp_path):
    path = tmp_path / "config.json"
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    path.write_text(json.dumps(config))
    words = {"model": f"hf:{path}", "sequence_length": 65, "batch_size": 1, "precision": "bf16"}
    plan = {"models": words["model"], "devices": "2xt4", "sequence_length": 65, "batch_sizes": [1]}
    pasted = {**words, "model": kept_config(config)}
    asked = [
        lambda: forerun.predict(**words, device="t4"),
        lambda: forerun.predict(**words, device="2xt4", strategy="fsdp"),
        lambda: forerun.predict(**words, device="t4", phase="inference"),
        lambda: forerun.plan(**plan),
        lambda: forerun.scale(**words, device="t4", num_devices=[1, 2]),
        lambda: forerun.layouts(words["model"], device="2xt4", sequence_length=65, global_batch=2),
        lambda: page.whole("predict", PredictBody(**pasted, device="t4")),
        lambda: page.whole("scale", ScaleBody(**pasted, device="t4", num_devices=[1, 2])),
        lambda: page.whole("plan", PlanBody(models=[pasted["model"]], devices=["t4"], sequence_length=65)),
    ]
    for ask in asked:
        with pytest.raises(UsageError, match="give --sequence-length 64 or less"):
            ask()


@pytest.mark.parametrize("case", [PYTORCH[0], KERAS[0]], ids=str)
def test_calibrations_of_this_machine_are_taken_by_all(case, tmp_path, monkeypatch):
    monkeypatch.setenv(CALIBRATIONS_VARIABLE, str(tmp_path))
    here = find_device("here")
    for framework, loop_s in (("pytorch", 0.0), ("keras", 0.003)):
        calibration = made_calibration(here, framework, loop_s)
        calibration.provenance["date"] = "2026-11-22"
        save_weights(calibration, calibration_path(here, framework))
    own = forerun.predict(case.model, device="here", **case.setup)
    assert own.provenance == "calibrated"
    agree(own, planned(case, "here"))
    (alone,) = forerun.scale(case.model, device="here", num_devices=[1], **case.setup).points
    agree(own, alone)


@pytest.mark.parametrize("model", [CNN, f"keras:{CNN}"])
def test_parameter_servers_begin_with_the_step_of_one_device(model):
    setup = {"batch_size": 32, "optimizer": "adam"}
    own = forerun.predict(model, device="t4", **setup)
    curve = forerun.scale_servers(
        model, device="t4", num_workers=[1], num_servers=[1], inter="8xinfiniband-hdr", **setup
    )
    (point,) = curve.points
    # A worker alone pushes and pulls over a link whose time is far below that of this step.
    assert own.step_time_s.value < point.step_time_s < 1.1 * own.step_time_s.value
