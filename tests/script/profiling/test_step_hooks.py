"""Steps and the rest, from events alone."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from forerun.script.profiling.step_hooks import LoaderSpan, StepClock


class Story:
    """A clock that is told a story, one second an event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps: list[LoaderSpan] = []
        self.rest: list[LoaderSpan] = []
        self.clock = StepClock(self.steps.append, self.rest.append)

    def pass_s(self, seconds: float = 1.0) -> float:
        self.now += seconds
        return self.now

    def batch(self, loader: int = 0, samples: int = 4, wait_s: float = 1.0) -> None:
        self.clock.request(self.now)
        self.clock.wait(self.now, self.pass_s(wait_s))
        self.clock.receive(loader, samples)

    def epoch(self, num_batches: int, *, updates_every: int = 1, optimizers: int = 1) -> None:
        self.clock.start_loader(self.now)
        for index in range(num_batches):
            self.batch()
            self.pass_s(2.0)
            if (index + 1) % updates_every == 0:
                for optimizer in range(optimizers):
                    self.clock.update(self.now, optimizer)
        self.clock.request(self.now)
        self.clock.close(self.now)

    def validation(self, num_batches: int) -> None:
        self.epoch(num_batches, updates_every=num_batches + 1)


def test_a_plain_loop_has_a_step_per_batch():
    story = Story()
    story.epoch(3)
    assert [step.end_s - step.begin_s for step in story.steps] == [3.0, 3.0, 3.0]
    assert [step.wait_s for step in story.steps] == [1.0, 1.0, 1.0]
    assert [step.starts_epoch for step in story.steps] == [True, False, False]


def test_validation_is_no_step():
    story = Story()
    story.epoch(2)
    story.validation(5)
    story.epoch(2)
    assert len(story.steps) == 4
    assert sum(part.end_s - part.begin_s for part in story.rest) == 15.0


def test_accumulated_batches_are_one_step():
    story = Story()
    story.epoch(6, updates_every=3)
    assert [step.num_samples for step in story.steps] == [12, 12]
    assert [step.num_batches for step in story.steps] == [3, 3]


def test_two_optimizers_are_one_step():
    story = Story()
    story.epoch(4, optimizers=2)
    assert [step.num_updates for step in story.steps] == [2, 2, 2, 2]


def test_without_a_loader_a_step_is_from_update_to_update():
    story = Story()
    for _ in range(4):
        story.clock.update(story.pass_s(), 0)
    assert [step.end_s - step.begin_s for step in story.steps] == [1.0, 1.0, 1.0]


def test_without_an_optimizer_a_backward_pass_is_a_step_and_the_model_tells_its_samples():
    story = Story()
    story.clock.update(story.pass_s(), 0)
    for _ in range(2):
        story.clock.call_model(story.now, 8, is_training=True)
        story.clock.update(story.pass_s(2.0), 0)
    # An evaluation between two steps is no step.
    story.clock.call_model(story.now, 8, is_training=False)
    story.pass_s(30.0)
    story.clock.call_model(story.now, 8, is_training=True)
    story.clock.update(story.pass_s(2.0), 0)
    assert [(step.end_s - step.begin_s, step.num_samples) for step in story.steps] == [(2.0, 8)] * 3
    assert sum(part.end_s - part.begin_s for part in story.rest) == 30.0


def test_the_hooks_own_time_belongs_to_no_step():
    story = Story()
    story.epoch(1)
    story.clock.skip(story.pass_s(100.0))
    story.epoch(1)
    assert [step.end_s - step.begin_s for step in story.steps] == [3.0, 3.0]


def test_what_follows_the_last_update_is_no_step():
    story = Story()
    story.batch()
    story.clock.update(story.pass_s(2.0), 0)
    story.clock.hold("saving_s", story.pass_s(50.0) - 3.0)
    story.clock.finish(story.now)
    assert [(step.end_s - step.begin_s, step.saving_s) for step in story.steps] == [(3.0, 0.0)]
    assert [part.end_s - part.begin_s for part in story.rest] == [50.0]


@given(st.lists(st.sampled_from(["train", "validate", "accumulate", "bare"]), max_size=8))
def test_steps_and_rest_cover_the_time_without_overlap(chapters):
    story = Story()
    for chapter in chapters:
        if chapter == "train":
            story.epoch(3)
        elif chapter == "validate":
            story.validation(2)
        elif chapter == "accumulate":
            story.epoch(5, updates_every=2)
        else:
            story.clock.update(story.pass_s(), 0)
    story.clock.close(story.now)
    parts = sorted([*story.steps, *story.rest], key=lambda part: part.begin_s)
    assert all(a.end_s == b.begin_s for a, b in itertools.pairwise(parts))
    first = parts[0].begin_s if parts else story.now
    assert sum(part.end_s - part.begin_s for part in parts) == story.now - first
    assert all(part.wait_s <= part.end_s - part.begin_s for part in parts)
