"""The studies of scheduling alone: prints their section of docs/accuracy.md and draws the plot of the errors.

    python benchmarks/schedule_replay.py [--quick] [--plot docs/methods/schedule-errors.png]

Needs the public tables, in the folder that FORERUN_REFERENCE_DATA names. Takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun.report.schedule_plots import error_plot
from studies.schedule.page import schedule_section
from studies.schedule.study import schedule_study
from studies.tables.reference_steps import require_reference_folder


def main() -> None:
    """Runs the studies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two workloads, no integer program")
    parser.add_argument("--plot", type=Path, help="write the plot of the forecast errors there")
    arguments = parser.parse_args()
    found = schedule_study(
        require_reference_folder(), lambda line: print(line, file=sys.stderr, flush=True), arguments.quick
    )
    print(schedule_section(found))
    if arguments.plot is not None:
        error_plot(arguments.plot, found.errors)


if __name__ == "__main__":
    main()
