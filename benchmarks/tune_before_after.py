"""A script written without thought, tuned: before and after, from real runs, and the hash of its file.

    python benchmarks/tune_before_after.py FOLDER [--budget 4min] [--epochs 2] [--out FILE.json]

Writes 1,800 JPEGs of 640 x 480 pixels in six classes that can be learned, and a script (batch 8, no workers, single
precision, decoding in the main process), to the folder, tunes it for speed with the accuracy held, and prints both
whole runs. ``parts.png`` has the profile of the script as written.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "profiling"))

from naive_scripts import naive_study
from result_files import write_results

import forerun
from forerun.script.pages import parts_plot
from forerun.script.tuning.configuration import read_configuration
from forerun.script.tuning.space import space_of

SPACE = {
    "metric": {"name": "val_acc", "goal": "maximize"},
    "parameters": {
        "batch_size": {"values": [8, 16, 32, 64], "map": "--batch-size"},
        "lr": {"scale_with": "batch_size", "rule": "auto", "map": "--lr"},
        "num_workers": {"values": [0, 1, 2]},
        "persistent_workers": {"values": [False, True]},
        "channels_last": {"values": [False, True]},
        "optimizer_implementation": {"values": ["foreach", "fused"]},
        "num_threads": {"values": [1, 2]},
        "jpeg_decode_size": {"values": [0, 128]},
    },
}
IMAGE_SIZE = (640, 480)
NUM_IMAGES = (1500, 300)
SHOWN = ("rate_samples_per_s", "step_time_s", "wall_s", "cpu_utilisation", "peak_memory_bytes")


def main() -> None:
    """Tunes the script and prints both whole runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", default="4min")
    parser.add_argument("--epochs", default="2")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="Results for the page of figures.")
    options = parser.parse_args()
    folder = options.folder
    script, naive = naive_study(folder, num_train=NUM_IMAGES[0], num_test=NUM_IMAGES[1], size=IMAGE_SIZE)
    before_hash = _hash(script)
    command = [*naive, "--epochs", options.epochs]
    found = forerun.tune(
        command,
        budget=options.budget,
        space=space_of(SPACE),
        study=folder / "study",
        trial_s=5.0,
        seed=0,
        say=lambda line: print(line, file=sys.stderr),
    )
    checked = found.checked
    print(f"values {found.best_values}")
    if checked is not None and checked["best"] is not None:
        first, second = checked["baseline"], checked["best"]
        print("| | before | after |\n|---|---|---|")
        print(
            f"| images/s in steps | {first['rate_samples_per_s']:.1f} | {second['rate_samples_per_s']:.1f} |"
        )
        print(f"| whole run [s] | {first['wall_s']:.1f} | {second['wall_s']:.1f} |")
        print(
            f"| val_acc after {options.epochs} epochs | {checked['metric_before']} | {checked['metric_after']} |"
        )
        print(
            f"| memory [MiB] | {first['peak_memory_bytes'] / 2**20:.0f} | {second['peak_memory_bytes'] / 2**20:.0f} |"
        )
        print(
            f"ratio of images/s: {checked['speedup']:.2f}; trials {len(found.trials)}, ended by {found.ended_by}"
        )
        write_results(
            options.out,
            budget=options.budget,
            epochs=options.epochs,
            num_images=sum(NUM_IMAGES),
            image_size=IMAGE_SIZE,
            num_trials=len(found.trials),
            ended_by=found.ended_by,
            values=found.best_values,
            metric=checked["metric"],
            before={**{name: first[name] for name in SHOWN}, "metric": checked["metric_before"]},
            after={**{name: second[name] for name in SHOWN}, "metric": checked["metric_after"]},
            speedup=checked["speedup"],
            script_sha256=before_hash,
            is_script_unchanged=_hash(script) == before_hash,
        )
    print(f"notes {found.notes}")
    print(f"script unchanged: {_hash(script) == before_hash} ({before_hash[:16]})")
    if found.best is not None and found.profile is not None:
        tuned = read_configuration(folder / "study" / "best.yaml")
        parts_plot(folder / "parts.png", found.profile)
        print(f"exact command: {found.command}; hooks {tuned.hooks}")


def _hash(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
