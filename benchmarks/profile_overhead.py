"""Time that profiling adds to a step: the same script alone and under the profiler, by turns.

    python benchmarks/profile_overhead.py [--pairs 10] [--out FILE.json]

The script times its own steps and waits. Printed: its step alone and profiled with the paired ratio, at the median and
at the tenth percentile, which other work on the machine moves least; the wait by hand beside the profile's, and the
phases' sum beside the wall time. Then the same with a step that does next to nothing: what the hooks take is their
difference, far below the noise of a real step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from result_files import write_results

import forerun
from forerun.script.compare import paired_ratio

SCRIPT = """
import statistics, time, torch
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __len__(self): return 960
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.randn(3, 48, 48), index % 6
layers = torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3), torch.nn.AdaptiveAvgPool2d(1)
model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps, waits = [], []
for epoch in range(2):
    iterator = iter(DataLoader(Images(), batch_size=8, shuffle=True))
    begin = time.monotonic()
    for images, labels in iterator:
        waits.append(time.monotonic() - begin)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.monotonic() - begin)
        begin = time.monotonic()
low, middle = (sorted(steps[10:])[int(share * len(steps[10:]))] for share in (0.1, 0.5))
print("BYHAND", statistics.mean(waits[1:]), low, middle)
"""


IDLE_SCRIPT = (
    SCRIPT.replace("time.sleep(0.001)", "pass")
    .replace("torch.randn(3, 48, 48)", "torch.zeros(3, 8, 8)")
    .replace("return 960", "return 16000")
)


def main() -> None:
    """Runs the pairs and prints the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="Results for the page of figures.")
    options = parser.parse_args()
    found = {}
    for title, key, text in (
        ("a real step", "pairs", SCRIPT),
        ("a step that does next to nothing", "idle_pairs", IDLE_SCRIPT),
    ):
        print(title)
        with tempfile.TemporaryDirectory() as folder:
            found[key] = _pairs(Path(folder), text, options.pairs)
        for words, name in (("tenth percentile", "low"), ("median", "median")):
            first, second = (
                [pair[f"{which}_{name}_s"] for pair in found[key]] for which in ("alone", "profiled")
            )
            ratio = paired_ratio(first, second)
            ends = "" if ratio.low is None else f", 95 % {ratio.low:.3f} to {ratio.high:.3f}"
            print(
                f"{words} of the steps: alone {1e3 * median(first):.3f} ms, profiled {1e3 * median(second):.3f} ms, "
                f"difference {1e6 * (median(second) - median(first)):.0f} us; ratio {ratio.ratio:.3f}{ends} over "
                f"{options.pairs} pairs"
            )
    write_results(options.out, **found)


def _pairs(folder: Path, text: str, num_pairs: int) -> list[dict[str, float]]:
    script = folder / "loop.py"
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, str(script)]
    return [
        _pair(command, folder / "output.txt", is_watched_first=index % 2 == 0) for index in range(num_pairs)
    ]


def _pair(command: list[str], output: Path, *, is_watched_first: bool) -> dict[str, float]:
    """Both runs; their order changes from pair to pair, so that a drift of the machine affects both."""
    found: dict[str, float] = {}
    for is_watched in (True, False) if is_watched_first else (False, True):
        found |= _watched(command, output) if is_watched else _alone(command)
    return found


def _alone(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, low_s, median_s = _by_hand(done.stdout)
    return {"alone_low_s": low_s, "alone_median_s": median_s}


def _watched(command: list[str], output: Path) -> dict[str, float]:
    with output.open("w", encoding="utf-8") as echo:
        found = forerun.profile(command, echo=echo)
    wait_s, low_s, median_s = _by_hand(output.read_text(encoding="utf-8"))
    total_s = sum(found.phases_s.values())
    print(
        f"wait {1e3 * found.loader_wait_s:.3f} ms, by hand {1e3 * wait_s:.3f} ms; "
        f"phases {total_s:.2f} s, wall {found.wall_s:.2f} s; parts {1e3 * found.parts.step_s:.3f} ms, "
        f"step {1e3 * found.step_time_s:.3f} ms"
    )
    return {
        "profiled_low_s": low_s,
        "profiled_median_s": median_s,
        "wait_s": found.loader_wait_s,
        "wait_by_hand_s": wait_s,
        "phases_s": total_s,
        "wall_s": found.wall_s,
        "parts_s": found.parts.step_s,
        "step_s": found.step_time_s,
    }


def _by_hand(text: str) -> tuple[float, float, float]:
    """Mean wait, tenth percentile and median of the steps as the script timed them [s]."""
    words = text.split("BYHAND")[1].split()
    return float(words[0]), float(words[1]), float(words[2])


if __name__ == "__main__":
    main()
