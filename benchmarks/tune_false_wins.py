"""Studies of a script on which no setting matters, and of one on which one does: how often a winner is called better.

    python benchmarks/tune_false_wins.py [--studies 100] [--noise 0.2] [--trials 40] [--gain 1.0]

Runs are simulated: each takes its speed from a log-normal distribution with the given noise, times the gain where a
configuration has the setting that matters. All that decides is the real thing: the sampler and its journal, the second
run of the first three trials, the pairs in turns and their interval.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.script.tuning.acceptance import repeat_winner, screen
from forerun.script.tuning.options import TuneSettings, parse_budget, parse_objectives
from forerun.script.tuning.space import space_of
from forerun.script.tuning.study import TrialStore
from forerun.script.tuning.trial import TrialOrder, TrialResult, say_nothing
from forerun.script.tuning.tuner import Task, Tuner

SPACE = space_of(
    {
        "parameters": {
            "num_workers": {"values": [0, 1, 2, 4]},
            "channels_last": {"values": [False, True]},
            "optimizer_implementation": {"values": ["foreach", "fused"]},
            "num_threads": {"values": [1, 2, 4]},
        }
    }
)
BASE = {"num_workers": 0, "channels_last": False, "optimizer_implementation": "foreach", "num_threads": 1}


@dataclass
class SimulatedRuns:
    """Runs of a script whose speed is noise, and ``gain`` times as high with a certain setting."""

    noise: float
    gain: float
    numbers: np.random.Generator
    rates: list[float] = field(default_factory=list)

    def __call__(self, order: TrialOrder, configuration: Any, **ignored: Any) -> TrialResult:
        """Runs a configuration."""
        has_gain = configuration.hooks.get("optimizer_implementation") == "fused"
        rate = 100.0 * (self.gain if has_gain else 1.0) * float(np.exp(self.numbers.normal(0.0, self.noise)))
        self.rates.append(rate)
        return TrialResult(
            outcome="done", rate_samples_per_s=rate, step_time_s=1 / rate, num_steps=50, wall_s=10.0
        )


def simulated_study(folder: Path, runs: SimulatedRuns, num_trials: int, seed: int) -> tuple[Any, float]:
    """The verdict of one study, and the ratio that its best trial promised before it was repeated."""
    objectives = parse_objectives("speed")
    store = TrialStore(folder, objectives, {}, sampler="random", seed=seed)
    task = Task(
        space=SPACE,
        order=TrialOrder(command=("python", "train.py")),
        objectives=objectives,
        budget=parse_budget(f"{num_trials} trials"),
        base=BASE,
        settings=TuneSettings(with_memory_law=False),
    )
    tuner = Tuner(task=task, store=store, say=say_nothing, run=runs)
    tuner.seed(None)
    tuner.search()
    ranked = sorted(store.trials(), key=lambda trial: -trial.values[0])
    promised = ranked[0].values[0] / store.trials()[0].values[0]
    ranked = screen(tuner, ranked, None)
    return repeat_winner(tuner, ranked[0], None), promised


def main() -> None:
    """Prints how often each verdict was given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--studies", type=int, default=100)
    parser.add_argument("--noise", type=float, default=0.2)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--gain", type=float, default=1.0)
    options = parser.parse_args()
    verdicts: Counter[str] = Counter()
    promises, ratios = [], []
    for seed in range(options.studies):
        runs = SimulatedRuns(options.noise, options.gain, np.random.default_rng(seed))
        with tempfile.TemporaryDirectory() as folder:
            verdict, promised = simulated_study(Path(folder), runs, options.trials, seed)
        verdicts[verdict.verdict] += 1
        promises.append(promised)
        ratios.extend([] if verdict.ratio is None else [verdict.ratio])
    print(
        f"{options.studies} studies of {options.trials} trials, noise {options.noise:g}, gain {options.gain:g}"
    )
    print(f"verdicts: {dict(verdicts)}")
    print(f"best trial over the first, median: {np.median(promises):.2f}")
    print(f"repeated in pairs, median: {np.median(ratios):.2f}")


if __name__ == "__main__":
    main()
