"""First trials of the cost model against TPE and random search without, replayed on measured configurations.

    python benchmarks/tune_priors.py --measure FOLDER    # a quarter of an hour on a quiet machine; a rerun resumes
    python benchmarks/tune_priors.py [--seeds 5]         # seconds

The first measures all 96 configurations of a naive script for two seconds of steps each and writes them, with the
script's profile, to ``records/tune_configurations.json``. The second runs real studies whose trials look their speed
up there, so that searches differ by what they choose and not by the noise of the machine. All begin with the script as
it is. Where this processor is that of the records and has a calibration (``forerun calibrate``), a search after the
predicted steps of the script's network is among them. Printed: the best speed after 5, 10 and 15 trials as a share of
the best of all, mean and worst over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "profiling"))

import numpy as np
from naive_scripts import NAIVE_SCRIPT, naive_study
from result_files import write_results

import forerun
from forerun.base.errors import ForerunError
from forerun.question.devices import describe_host
from forerun.script.profiling.profile import Profile, StepParts
from forerun.script.profiling.recorded import write_json
from forerun.script.tune import ScriptModel, planned_steps, predictable_device
from forerun.script.tuning.configuration import ScriptConfiguration, base_values, configure
from forerun.script.tuning.laws import DeviceSteps
from forerun.script.tuning.options import parse_budget, parse_objectives
from forerun.script.tuning.space import space_of
from forerun.script.tuning.study import TrialStore
from forerun.script.tuning.trial import TrialOrder, TrialResult, run_trial
from forerun.script.tuning.tuner import Task, Tuner

RECORDS = Path(__file__).parent / "records" / "tune_configurations.json"
SPACE = space_of(
    {
        "parameters": {
            "batch_size": {"values": [8, 16, 32, 64], "map": "--batch-size", "default": 8},
            "num_workers": {"values": [0, 1, 2]},
            "channels_last": {"values": [False, True]},
            "optimizer_implementation": {"values": ["foreach", "fused"]},
            "num_threads": {"values": [1, 2]},
        }
    }
)
CHECKPOINTS = (5, 10, 15)
PLANNED = "TPE after the plan"
SEARCHES = {
    PLANNED: ("tpe", True),
    "TPE after the cost model": ("tpe", True),
    "TPE": ("tpe", False),
    "random": ("random", False),
}
IMAGE_SIZE = 64


def main() -> None:
    """Measures, or replays."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=Path, metavar="FOLDER")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="Results for the page of figures.")
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure, options.records)
    shares = replays(options.records, options.seeds)
    print_table(shares)
    known = json.loads(options.records.read_text(encoding="utf-8"))
    write_results(
        options.out,
        machine=known["machine"],
        num_configurations=len(known["configurations"]),
        num_seeds=options.seeds,
        checkpoints=CHECKPOINTS,
        searches={
            name: {"mean": share.mean(0).tolist(), "worst": share.min(0).tolist()}
            for name, share in shares.items()
        },
    )


def measure(folder: Path, records: Path) -> None:
    """Profiles the script and runs it in every configuration that the records do not have."""
    _, naive = naive_study(folder, size=(640, 480))
    command = (*naive, "--epochs", "20")
    known = json.loads(records.read_text(encoding="utf-8")) if records.exists() else _described(command)
    base = _base(known)
    order = TrialOrder(command=command, is_short=True, short_s=2.0)
    names = [parameter.name for parameter in SPACE.parameters]
    for row in product(*(parameter.values for parameter in SPACE.parameters)):
        values = dict(zip(names, row, strict=True))
        if any(kept["values"] == values for kept in known["configurations"]):
            continue
        result = run_trial(order, configure(SPACE, values, base, known["profile"]["optimizer"]["name"]))
        if result.outcome != "done":
            sys.exit(f"{values}: {result.outcome}: {result.reason}")
        known["configurations"].append({"values": values, "rate_samples_per_s": result.rate_samples_per_s})
        print(f"{len(known['configurations'])} {values} {result.rate_samples_per_s:.0f}", file=sys.stderr)
        records.parent.mkdir(exist_ok=True)
        write_json(records, known)


def _described(command: tuple[str, ...]) -> dict[str, Any]:
    host = describe_host()
    found = forerun.profile(command, num_steps=40).as_dict()
    found.pop("command")
    machine = {"processor": host.cpu.model, "num_usable_cores": host.num_usable_cores}
    return {"machine": machine, "profile": found, "configurations": []}


def _profile(known: Mapping[str, Any]) -> Profile:
    parts = {name: known["profile"]["parts"][name] for name in StepParts.__dataclass_fields__}
    return Profile(**{**known["profile"], "command": (), "parts": StepParts(**parts), "advice": None})


def _base(known: Mapping[str, Any]) -> dict[str, Any]:
    return base_values(SPACE, _profile(known), ())


def replays(records: Path, num_seeds: int) -> dict[str, np.ndarray]:
    """Best share of the best speed after each number of trials, by search: rows are seeds, columns checkpoints."""
    known = json.loads(records.read_text(encoding="utf-8"))
    best = max(row["rate_samples_per_s"] for row in known["configurations"])
    shares, planned = {}, _planned_steps(known)
    for name, (sampler, with_priors) in SEARCHES.items():
        steps = planned if name == PLANNED else None
        if name == PLANNED and steps is None:
            continue
        runs = [
            _replay(known, sampler, steps, with_priors=with_priors, seed=seed) for seed in range(num_seeds)
        ]
        shares[name] = np.array([[max(run[:count]) / best for count in CHECKPOINTS] for run in runs])
    return shares


def _planned_steps(known: Mapping[str, Any]) -> DeviceSteps | None:
    """Predicted steps of the script's network on this processor, if that is the one of the records."""
    if describe_host().cpu.model != known["machine"]["processor"]:
        print("no search after the plan: the records are of another processor", file=sys.stderr)
        return None
    begin, end = NAIVE_SCRIPT.index("def block"), NAIVE_SCRIPT.index("optimizer =")
    lines = textwrap.indent(NAIVE_SCRIPT[begin:end], "    ")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "naive_network.py"
        path.write_text(f"from torch import nn\ndef make():\n{lines}    return model\n", encoding="utf-8")
        model = ScriptModel(model=f"{path}:make", image_size=IMAGE_SIZE)
        try:
            device = predictable_device("cpu")
            return planned_steps(model, device, SPACE, _base(known), _profile(known), memory_bytes=None)
        except ForerunError as reason:
            print(f"no search after the plan: {reason}", file=sys.stderr)
            return None


def _replay(
    known: Mapping[str, Any], sampler: str, steps: DeviceSteps | None, *, with_priors: bool, seed: int
) -> list[float]:
    profile, base = _profile(known), _base(known)
    rates = {
        _key(configure(SPACE, row["values"], base, None)): row["rate_samples_per_s"]
        for row in known["configurations"]
    }

    def look_up(order: TrialOrder, configuration: ScriptConfiguration, **ignored: Any) -> TrialResult:
        return TrialResult(outcome="done", rate_samples_per_s=rates[_key(configuration)], num_steps=2)

    objectives = parse_objectives("speed")
    task = Task(
        space=SPACE,
        order=TrialOrder(command=("train.py",)),
        objectives=objectives,
        budget=parse_budget(f"{CHECKPOINTS[-1]} trials"),
        base=base,
        with_priors=with_priors,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = TrialStore(Path(folder), objectives, {}, sampler=sampler, seed=seed)
        tuner = Tuner(task=task, store=store, say=lambda line: None, run=look_up)
        tuner.seed(profile, steps)
        tuner.search()
        return [trial.values[0] for trial in store.trials()]


def _key(configuration: ScriptConfiguration) -> str:
    return json.dumps([configuration.arguments, configuration.hooks], sort_keys=True)


def print_table(shares: Mapping[str, np.ndarray]) -> None:
    """Mean and worst share of the best speed by search and number of trials."""
    print("| search | " + " | ".join(f"{count} trials" for count in CHECKPOINTS) + " |")
    print("|---|" + "---|" * len(CHECKPOINTS))
    for name, share in shares.items():
        cells = [
            f"{100 * m:.1f} (worst {100 * w:.1f}) %" for m, w in zip(share.mean(0), share.min(0), strict=True)
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
