"""Parts of the hooks that need no script: loops read from source, and the share of a mask's blocks."""

import itertools
import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from sklearn.model_selection import KFold

from forerun.graph.graph import OpClass
from forerun.script import patching
from forerun.script.capturing.job import Counters, Progress, job_of, loops_around
from forerun.script.capturing.patches import Loaders, cover_ignite
from forerun.script.capturing.pauses import Pauses
from forerun.script.capturing.pretend import Pretence, with_numbers
from forerun.script.capturing.script_recorder import ScriptRecorder
from forerun.script.capturing.stand_ins import FlexibleAttention, Repeats
from forerun.script.capturing.start import Session
from forerun.script.capturing.steps import Steps


@pytest.fixture(autouse=True)
def _these_tests_are_the_script(monkeypatch):
    monkeypatch.setattr(patching, "_own_package", lambda main: ())  # else pytest is


def here():
    return sys._getframe(1)


def test_a_bound_out_of_a_list_makes_phases_whose_steps_add_up():
    for _, rounds in enumerate([10, 20]):
        for done in range(rounds):
            if done % 5 == 0:
                assert job_of(here(), Progress(num_steps=2)).max_steps == 30


@pytest.mark.parametrize(
    ("sizes", "is_recorded", "runs"), [([4] * 5, False, 2), ([1, 2, 3, 4, 5], False, 5), ([4] * 20, True, 16)]
)
def test_passes_without_gradients_are_run_until_two_gave_the_same_shapes(sizes, is_recorded, runs):
    seen = []

    def run(module, x, *, is_long):
        seen.append(x)
        return {"loss": x.sum(), "more": (x.expand(sizes[len(seen) - 1], 2).to(torch.bfloat16), is_long)}

    repeats = Repeats(SimpleNamespace(recorder=SimpleNamespace(records_ops=is_recorded)), lambda tensor: None)
    module, x = torch.nn.Identity(), torch.zeros(1, 2, device="meta")
    for size in sizes:
        found = repeats._repeated(run, module, (x,), {"is_long": True})
        assert found["more"][0].shape == (size, 2)
        assert (found["more"][0].dtype, found["more"][1], found["loss"].shape) == (torch.bfloat16, True, ())
    assert len(seen) == runs
    assert (
        repeats._repeated(lambda module, x: x, module, (torch.zeros(2),), {}).sum() == 0
    )  # values are computed


@pytest.mark.parametrize(("num_passes", "left"), [(16, 1), (17, 0)])
def test_a_first_step_with_many_passes_in_evaluation_mode_is_left_out_of_the_record(num_passes, left):
    network = torch.nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.SGD(network.parameters())
    steps = Steps(ScriptRecorder(pretends=True), lambda: None, lambda: None)

    def step():
        for _ in range(num_passes if steps.num_steps == 1 else 0):
            steps.module_begins(network.eval(), (), {})
            steps.module_ends()
        assert steps.num_steps != 1 or steps.recorder.records_ops is bool(left)
        steps.backward_begins()
        steps.backward_ends()
        steps.update_begins(optimizer)
        steps.update_ends(optimizer)

    steps.trained_once.add(id(network))
    step()
    step()
    assert (len(steps.recorded), steps.recorder.records_ops) == (left, True)
    step()
    step()
    assert steps.is_over is True


@pytest.mark.parametrize(("lengths", "made"), [([3] * 20, 8), ([*range(20)], 20)])
def test_a_few_costly_samples_of_one_form_stand_for_a_batch(monkeypatch, lengths, made):
    monkeypatch.setattr("forerun.script.capturing.patches._COSTLY_S", 0.0)
    seen = []
    data = SimpleNamespace(
        __getitems__=lambda places: seen.extend(places) or [[0.0] * lengths[i] for i in places]
    )
    fetcher = SimpleNamespace(auto_collation=True, dataset=data, collate_fn=lambda items: items)
    batch = Loaders(None, None, None)._fetched(None, fetcher, [*range(20)])
    assert seen == [*range(made)]
    assert [len(item) for item in batch] == lengths
    assert len({id(item) for item in batch}) == 20  # what a collation changes is of one sample


@dataclass
class Cache:
    keys: list[torch.Tensor]
    last: torch.Tensor
    length: int


@pytest.mark.parametrize(
    ("lengths", "runs"),
    [([3, 4, 5, 6, 7, 7, 7], 3), ([3, 4, 6, 9, 2], 3), ([5, 9, 5, 9], 3)],
)
def test_passes_over_a_text_that_grows_are_run_until_one_was_foreseen(lengths, runs):
    seen = []

    def run(module, x, length):
        seen.append(x)
        return Cache(keys=[x.new_zeros(1, x.shape[1], 8)], last=x[:, -1:], length=length)

    forgotten = []
    repeats = Repeats(SimpleNamespace(recorder=SimpleNamespace(records_ops=False)), forgotten.append)
    module = torch.nn.Identity()
    for length in lengths:
        found = repeats._repeated(run, module, (torch.zeros(1, length, device="meta"), length), {})
        (logits,), last = found.keys, found.last
        assert found.length == length
        assert (logits.shape, logits.stride(), last.shape) == ((1, length, 8), (8 * length, 8, 1), (1, 1))
    assert len(seen) == runs
    assert len(forgotten) == 2 * (len(lengths) - runs)


class Writing:
    def __init__(self, period):
        self.period, self.rank = period, 0

    def asks(self, number):
        return bool(self.period) and number % self.period == 0

    def after_step(self, step, last=False):
        number = step + 1
        if not self.asks(number):
            return
        if self.rank % 4 == 0:
            self.save(f"step{number}")

    def save(self, name): ...


class Scoring(Writing):
    def after_step(self, step, last=False):
        if not last and (step + 1) % self.period == 0:
            self.do_eval()

    def do_eval(self): ...


def residual(x):
    """Written in the words of its caller as it stands, its answer would have 3 to the 18th parts."""
    x = x + x + x + x + x + x + x + x + x
    x = x + x + x + x + x + x + x + x + x
    x = x + x + x + x + x + x + x + x + x
    x = x + x + x + x + x + x + x + x + x
    x = x + x + x + x + x + x + x + x + x
    x = x + x + x + x + x + x + x + x + x
    x = x + x + x + x + x + x + x + x + x
    x = x + x + x + x + x + x + x + x + x
    return x + x + x + x + x + x + x + x + x


def test_what_hooks_ask_before_they_save_or_evaluate_is_read_in_the_words_of_the_loop(tmp_path):
    hooks = [Scoring(500), Writing(250)]
    pauses = Pauses(tmp_path, lambda: None)

    def call_hooks(at):
        for hook in hooks:
            hook.after_step(at)

    for step in range(3):
        residual(step)
        call_hooks(step)
        pauses.steps_recorded(here(), goes_on=False) if step == 2 else None
    found = json.loads((tmp_path / "pauses.json").read_text())
    assert {kind: (one["unit"], one["every"]) for kind, one in found.items()} == {
        "validation": ("steps", 500),
        "checkpoints": ("steps", 250),
    }


def shows_a_few(network, pauses):
    best = 0
    for epoch in range(1, 4):
        for step in range(3):
            pauses.steps_recorded(here(), goes_on=False) if step == 2 and epoch == 1 else None
        score = epoch / 10
        if epoch > 100 and best < score:
            network.save()
            best = score
            continue
        if not epoch % 1e1:
            network.save()
    network.eval()
    network[0].eval()
    for _ in range(2):
        network(torch.randn(1, 4))


def tries_all(network, pauses):
    for epoch in range(1, 4):
        for step in range(3):
            pauses.steps_recorded(here(), goes_on=False) if step == 2 and epoch == 1 else None
        last_img = SimpleNamespace(save=list)
        last_img.save(str(epoch))
        [last_img][0].save(f"shown_{epoch}.gif")
    network.eval()
    for held_out in [torch.randn(2, 4)]:
        network(held_out)
    network.train()


def begins_its_loader_anew(network, pauses):
    rank, network.save = 0, list
    for _ in range(3):
        for step in range(3):
            if step == 2:
                pauses.steps_recorded(here(), goes_on=False)
                pauses.epoch_ended()
                pauses.stepped()
                pauses.stepped()
        if rank in (-1, 0):
            network.save()


@pytest.mark.parametrize(
    ("script", "pauses"),
    [
        (shows_a_few, {"checkpoints": ("epochs", 10)}),
        (tries_all, {"validation": ("job", 1)}),
        (begins_its_loader_anew, {"checkpoints": ("epochs", 1)}),
    ],
)
def test_a_better_score_has_no_interval_and_a_few_samples_shown_are_no_validation(tmp_path, script, pauses):
    script(torch.nn.Sequential(torch.nn.Linear(4, 2)), Pauses(tmp_path, lambda: None))
    found = json.loads((tmp_path / "pauses.json").read_text())
    assert {kind: (one["unit"], one["every"]) for kind, one in found.items()} == pauses


def test_updates_by_handlers_of_an_epoch_of_ignite_are_the_steps_of_epochs():
    steps, told = SimpleNamespace(num_steps=0), {}

    class Engine:
        state = SimpleNamespace(max_epochs=1_000_000)

        def _fire_event(self, event):
            steps.num_steps += event == "completed"

        def _handler_wrapper(self, handler, event, chosen):
            return lambda: handler() if chosen(self, 1) else None

    events = SimpleNamespace(EPOCH_STARTED="started", EPOCH_COMPLETED="completed", ITERATION_COMPLETED="one")
    pauses = SimpleNamespace(is_after=False, interval=None)
    state = SimpleNamespace(event_to_attr={"completed": "epoch"})
    patches = cover_ignite(steps, pauses, told.update)  # type: ignore[arg-type]
    patches["ignite.engine.engine"](SimpleNamespace(Engine=Engine, Events=events, State=state))
    every = 3
    handler = Engine()._handler_wrapper(
        lambda: seen.append(pauses.interval), "completed", lambda _, n: n % every == 0
    )
    seen: list[object] = []
    handler()  # not the third epoch
    pauses.is_after = True
    handler()
    assert (seen, pauses.interval) == ([("epochs", 3)], None)
    pauses.is_after = False
    for event in ("started", *["one"] * 20, "completed"):  # an episode
        Engine()._fire_event(event)
    job = job_of(here(), Progress(num_steps=1, trainer=told))
    assert (job.epochs, job.steps_per_epoch, job.max_steps) == (1_000_000, 1, None)


def test_loops_of_all_functions_around_a_step_are_counted():
    settings = SimpleNamespace(epochs=4)

    def step():
        for _ in range(0, 10, 3):
            return here()
        return None

    for _ in range(settings.epochs):
        assert [(loop.rounds, loop.is_data) for loop in loops_around(step())[-2:]] == [(4, False), (4, False)]


def test_the_loop_through_the_data_gives_the_steps_and_the_ones_around_it_the_epochs():
    data = [1, 2]
    for _ in range(3):
        for _ in data:
            job = job_of(here(), Progress(num_steps=2))
            assert (job.epochs, job.steps_per_epoch, job.max_steps) == (3, 2, None)
        for _phase in ["train", "val"]:  # one of them trains
            for _ in data:
                assert job_of(here(), Progress(num_steps=2)).epochs == 3
        for _ in data:
            several = [1, 2, 3]
            for _ in several:  # each batch of the loader is a list of three
                job = job_of(here(), Progress(num_steps=2, num_batches=2))
                assert (job.epochs, job.steps_per_epoch) == (3, 6)


def test_a_counter_that_begins_anew_ends_a_pass_and_one_that_a_trainer_raises_by_one_counts_epochs():
    counters, jobs = Counters(), []

    def train(most=1000):
        i = 0
        while i < most - 2:
            counters.note(here())
            if i == 300:
                jobs.append(job_of(here(), Progress(num_steps=20), counters))
            i += 100

    class Trainer:
        epoch, most_epochs, stops, data = 0, 300, False, [1, 2, 3]

        def fit(self):
            while self.epoch < self.most_epochs and not self.stops:
                self.run_epoch()

        def run_epoch(self):
            for _ in self.data:
                job = job_of(here(), Progress(num_steps=2))
                jobs.append(job)
            self.epoch += 1
            self.stops = True

    for _ in range(500):
        train()
        if jobs:
            break
    Trainer().fit()
    found = [(job.epochs, job.steps_per_epoch, job.max_steps) for job in jobs]
    assert found == [(500, 10, None), *3 * [(300, 3, None)]]


def test_rounds_without_a_better_loss_count_no_steps():
    bad, counters, jobs = 0, Counters(), []
    for epoch in range(50):
        counters.note(here())
        jobs += [job_of(here(), Progress(num_steps=3), counters)] if epoch == 2 else []
        if epoch < 0:
            bad = 0
        else:
            bad += 1
        if bad == 10:
            break
    assert (jobs[0].epochs, jobs[0].steps_per_epoch) == (50, 1)


def loader(samples):
    yield samples


def through_a_loader_made_here(samples):
    for _ in loader(samples):
        yield here()


def through_an_object_around_the_loader(samples):
    for _ in samples:
        yield here()


@pytest.mark.parametrize(
    ("script", "told"),
    [(through_a_loader_made_here, {}), (through_an_object_around_the_loader, {"num_samples": 640})],
)
def test_a_loop_is_as_long_as_the_batches_of_its_loader_and_not_as_its_samples(script, told):
    frames = script([0] * 640)
    job = job_of(next(frames), Progress(num_steps=2, num_fetches=1, num_batches=20, **told))
    assert job.steps_per_epoch == 20


def test_each_fold_of_a_cross_validation_trains_anew():
    jobs, folds, data = [], KFold(n_splits=5), [0] * 40
    progress = Progress(num_steps=2, num_fetches=1, num_batches=20)
    for _ in range(3):
        for _ in enumerate(folds.split(data)):
            for _ in loader(data):
                jobs += [job_of(here(), progress)]
    splits = folds.split(data)
    for _ in splits:
        for _ in loader(data):
            jobs += [job_of(here(), progress)]
    assert [(jobs[at].epochs, jobs[at].steps_per_epoch) for at in (0, -1)] == [(15, 20), (5, 20)]


def test_numbers_are_clean_however_a_script_asks():
    with Pretence():
        x = torch.empty(600, 600, device="meta")
        either = torch.isnan(x).logical_or(torch.isinf(x)).float().max()
        overflows = [either, torch.isfinite(x.amax()).logical_not()]
        assert [bool(found) for found in overflows] == [False] * 2
        assert bool(torch.isfinite(x).all())
        assert either.item() + 1 == 1
        assert with_numbers([x.sum(), [2]]) == [1.0, [2]]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_goes_on_to_its_last_round(search):
    weight = torch.ones(4, device="meta", requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=7, line_search_fn=search)
    calls = []

    def closure():
        calls.append(weight.grad)
        (loss,) = (weight**2).sum()[None]
        weight.grad = torch.autograd.grad(loss, weight)[0]
        return loss

    with Pretence() as pretence:
        pretence.recorder = SimpleNamespace(in_optimizer=True, note_read=lambda size: None)
        optimizer.step(closure)
    state = optimizer.state[weight]
    assert (state["n_iter"], len(state["old_dirs"])) == (7, 6)
    assert len(calls) == 7 + (search is not None)


@pytest.mark.parametrize(("length", "num_batches", "size"), [(20, 5, 20), (None, 5, 20), (3, 5, None)])
def test_batches_of_a_pass_are_counted_where_a_sampler_or_a_data_set_says_no_length(
    length, num_batches, size
):
    """The third data set is a single array of Keras, whose length is that of a sample."""
    loaders = Loaders(SimpleNamespace(is_first=False), None, None)
    without = type("Sampler", (), {"__iter__": lambda self: iter(range(20))})()
    sampler = without if length is None else range(20)
    data = type("Data", (), {"__getitem__": None, "__len__": lambda self: length or 20})()
    loaders.last, loaders.num_samples = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler), 4
    facts = loaders.facts()
    assert (facts["num_batches"], facts["dataset_size"]) == (num_batches, size)


def test_tapes_of_tensorflow_within_a_step_of_keras_give_the_gradients_of_pytorch(monkeypatch):
    tape, end = type("Tape", (), {}), SimpleNamespace(steps=SimpleNamespace(depth=1))
    session = Session(None, end)
    session.tensorflow(SimpleNamespace(GradientTape=tape))
    weight = torch.ones(2, requires_grad=True)
    with tape() as first, tape() as second:
        loss = (3 * weight).sum()
    found = [one.gradient(loss, [SimpleNamespace(value=weight)]) for one in (first, second)]
    assert [gradient.tolist() for (gradient,) in found] == [[3, 3]] * 2
    refused = []
    monkeypatch.setattr(session, "refuse", refused.append)
    end.steps.depth = 0
    with tape():
        assert "gradients of TensorFlow" in refused[0]


def test_a_loop_whose_length_only_running_code_could_say_is_not_counted():
    for _ in range(next(iter([2]))):
        assert loops_around(here())[-1].rounds is None


def test_a_limit_in_a_nested_configuration_ends_the_job_however_long_the_loader_is():
    config = SimpleNamespace(trainer=SimpleNamespace(max_iters=100))
    loader = range(10**10)  # a sampler that goes on for ever, as minGPT has it
    done = 0
    while True:
        job = job_of(here(), Progress(num_steps=done + 2, num_fetches=1, num_batches=len(loader)))
        assert (job.max_steps, job.epochs, job.notes) == (100, None, ())
        done += 1
        if config.trainer.max_iters is not None and done >= config.trainer.max_iters:
            break
        if done > 1:
            break


@pytest.mark.parametrize("num_micro_steps", [1, 4])
def test_micro_steps_are_not_steps(num_micro_steps):
    epochs, data = 5, [0] * 10
    for _ in range(epochs):
        for number, _ in enumerate(data):
            if number % 4 == 3:
                job = job_of(here(), Progress(num_steps=1, num_micro_steps=num_micro_steps))
                assert (job.epochs, job.steps_per_epoch) == (5, 10 // num_micro_steps)


def by_counted_rounds():
    num_epochs = 3
    for _ in range(num_epochs):
        for _ in range(100):
            yield here()


def test_counted_rounds_of_an_epoch_go_through_a_loader_several_times():
    frames = by_counted_rounds()
    for frame in (
        next(frames),
        next(itertools.islice(frames, 99, None)),
    ):  # of the first and the second epoch
        job = job_of(frame, Progress(num_steps=1, num_fetches=2, num_batches=11))
        assert (job.epochs, job.steps_per_epoch) == (3, 100)


def by_samples():
    shown = 0
    while shown < 1000:
        yield here()
        shown += 32


def by_samples_after_the_limit():
    shown = 0
    while True:
        shown += 32
        yield here()
        if shown > 1024:
            break


def few_rounds_with_a_step():
    for number in range(500):
        if number > 100 and number % 10 == 0:
            yield here()


def phases_of_a_step():
    shown, thousands = 0, 1
    while True:
        for phase in [{"name": "G"}, {"name": "D"}]:
            if phase["name"] == "D":
                yield here()
        shown += 64
        is_over = shown >= thousands * 1000
        if is_over:
            break


class Asked:
    """A trainer that asks itself whether it goes on."""

    shown = 0

    def goes_on(self):
        return self.shown < 1000

    def train(self):
        while self.goes_on():
            yield here()
            self.shown += 32


@pytest.mark.parametrize(
    "script",
    [
        by_samples,
        by_samples_after_the_limit,
        few_rounds_with_a_step,
        phases_of_a_step,
        lambda: Asked().train(),
    ],
)
def test_a_job_has_as_many_steps_as_its_counters_allow(script):
    counters, job, number = Counters(), None, 0
    for number, frame in enumerate(script(), start=1):
        if number <= 3:
            counters.note(frame)
        if number == 3:
            counters.close(frame)
            job = job_of(frame, Progress(num_steps=3), counters)
    assert (job.max_steps, job.steps_per_epoch) == (number, None)


def test_two_sources_that_disagree_are_both_said():
    max_train_steps, data = 7, [1, 2, 3]
    for _ in range(2):
        for _ in data:
            job = job_of(here(), Progress(num_steps=2))
            assert (job.epochs, job.steps_per_epoch) == (2, 3)
            assert any(
                f"max_train_steps is {max_train_steps}" in note and "6 steps" in note for note in job.notes
            )


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (lambda b, h, q, k: q >= k, 36 / 64),
        (lambda b, h, q, k: (q >= k) & (q - k < 128), 15 / 64),
        (lambda b, h, q, k: (q // 256) == (k // 256), 16 / 64),
    ],
)
def test_the_share_of_a_mask_is_that_of_its_blocks(mask, share):
    notes = {}
    flexible = FlexibleAttention(SimpleNamespace(is_paused=False), None, notes)
    assert flexible._measured_share(mask, 1024, 1024, torch.device("cpu")) == share
    assert not notes


def test_a_mask_of_single_positions_is_assumed_to_be_half_full():
    notes = {}
    flexible = FlexibleAttention(SimpleNamespace(is_paused=False), None, notes)
    mask = lambda b, h, q, k: torch.tensor(bool(q >= k))  # noqa: E731
    assert flexible._measured_share(mask, 1024, 1024, torch.device("cpu")) == 0.5
    assert "half of its blocks" in next(iter(notes))


def test_a_recording_that_begins_anew_forgets_the_updates_before():
    recorder, weight = ScriptRecorder(pretends=False), torch.zeros(4)
    for num_updates in (1, 2, 0):
        recorder.begin([], [weight])
        with recorder:
            recorder.records_ops = True
            for _ in range(num_updates):
                weight.add_(1.0)
        assert len(recorder.weight_writes) == num_updates == len(recorder.rows)


def test_kernels_of_known_libraries_are_told_by_their_names():
    recorder = ScriptRecorder(pretends=False)
    recorder.records_ops = True
    queries, sines = torch.empty(2, 8, 64, dtype=torch.bfloat16), torch.empty(8, 64, dtype=torch.bfloat16)
    for name in ("_triton_rope", "somebody_s_kernel"):
        recorder.note_kernel(name, [queries, sines, 64])
    known, unknown = (row.cost for row in recorder.rows)
    assert (known.op_class, unknown.op_class) == (OpClass.ELEMENTWISE, OpClass.UNKNOWN)
    assert known.read_bytes == 2 * unknown.read_bytes == 4 * (2 + 1) * 8 * 64  # read and written in place
    assert recorder.unsupported == {"triton somebody_s_kernel"}
