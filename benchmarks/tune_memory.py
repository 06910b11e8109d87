"""A study under a limit of memory: counts trials lost to memory, with the prediction of memory and without it.

    python benchmarks/tune_memory.py FOLDER [--trials 40] [--memory 1500MB] [--seed 0] [--out FILE.json]

The script and its images are those of ``tune_before_after.py``; the space holds batches and images that need many
times the limit. Both studies have the same seed, budget and limit. Printed for each: trials that ran, those that were
ended at the limit, those rejected before they started, the best speed, and how far the predicted memory of the trials
that ran was above what they used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "profiling"))

from naive_scripts import naive_study
from result_files import write_results

import forerun
from forerun.base.units import parse_amount
from forerun.script.tuning.space import space_of

SPACE = {
    "parameters": {
        "batch_size": {"values": [8, 16, 32, 64, 128, 256, 512], "map": "--batch-size"},
        "image_size": {"values": [32, 64, 96, 128, 192, 256], "map": "--img-size"},
        "num_workers": {"values": [0, 1, 2, 4]},
        "channels_last": {"values": [False, True]},
    },
}


def main() -> None:
    """Runs both studies and prints them side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--memory", default="1500MB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="Results for the page of figures.")
    options = parser.parse_args()
    folder = options.folder
    _, naive = naive_study(folder)
    command = [*naive, "--epochs", "20"]
    print("| | trials that ran | ended at the limit | rejected before | best | predicted over used, median |")
    print("|---|---|---|---|---|---|")
    studies = []
    limit_bytes = parse_amount(options.memory, "memory")
    for words, with_memory_law in (("with prediction", True), ("without", False)):
        found = forerun.tune(
            command,
            budget=f"{options.trials} trials",
            space=space_of(SPACE),
            study=folder / words.replace(" ", "-"),
            trial_s=1.0,
            memory_limit_bytes=limit_bytes,
            with_memory_law=with_memory_law,
            check=False,
            seed=options.seed,
            say=lambda line: print(line, file=sys.stderr),
        )
        done = [trial for trial in found.trials if trial["outcome"] == "done"]
        over = [
            t["expected_memory_bytes"] / t["peak_memory_bytes"] for t in done if t["expected_memory_bytes"]
        ]
        num_run = len(found.trials) - found.num_rejected
        best = max(trial["rate_samples_per_s"] for trial in done)
        print(
            f"| {words} | {num_run} | {found.num_out_of_memory} | {found.num_rejected} | {best:.0f} images/s | "
            f"{median(over):.2f} |",
            flush=True,
        )
        studies.append(
            {
                "name": words,
                "num_run": num_run,
                "num_out_of_memory": found.num_out_of_memory,
                "num_rejected": found.num_rejected,
                "best_rate_samples_per_s": best,
                "median_predicted_over_used": median(over),
            }
        )
    write_results(options.out, limit_bytes=limit_bytes, studies=studies)


if __name__ == "__main__":
    main()
