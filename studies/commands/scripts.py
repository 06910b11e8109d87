"""``python -m studies scripts`` captures public training scripts; ``scenarios`` makes one of its own better."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.base.units import parse_amount
from forerun.surface.cli.settings import DebugOption, JsonOption


def scripts(
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the scripts.", show_default="scripts beside FORERUN_REFERENCE_DATA"
        ),
    ] = None,
    packages: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of unpacked source distributions: opacus, pytorch_ignite."),
    ] = None,
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder for generated data.")] = Path(
        "script-data"
    ),
    only: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Scripts whose name has this text.")
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="PART", help="Captures of scripts, or the faults of 'diagnose'.")
    ] = "captures",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Lines to keep and to go on from.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Capture public scripts; compare their facts with what a person reads, and steps with specifications."""
    if part == "diagnose":
        from studies.scripts.diagnose import diagnosed_numbers, diagnosed_runs, diagnosed_traces, table_of

        typer.echo(table_of([*diagnosed_traces(), *diagnosed_numbers(), *diagnosed_runs()]))
        return
    from studies.scripts.cases import cases
    from studies.scripts.generated_data import make_data
    from studies.scripts.study import CapturedCase, markdown_of, study_case

    place = _folder(folder)
    made = make_data(data.resolve())
    kept = out.read_text(encoding="utf-8").splitlines() if out is not None and out.exists() else []
    known = {line["name"]: CapturedCase(**line) for line in map(json.loads, kept)}
    found = []
    for case in cases(place, made, packages):
        if only is not None and only not in case.name:
            continue
        if case.name not in known:
            known[case.name] = study_case(case)
            typer.echo(f"{case.name}: {known[case.name].outcome} {known[case.name].wrong}", err=True)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[case.name].as_dict()) + "\n")
        found.append(known[case.name])
    typer.echo(markdown_of(found))


def _folder(given: Path | None) -> Path:
    data = os.environ.get("FORERUN_REFERENCE_DATA")
    place = given or (Path(data).parent / "scripts" if data else None)
    if place is None or not place.is_dir():
        raise UsageError(
            f"expected a folder with public scripts, got {place}; name it with --folder, or set FORERUN_REFERENCE_DATA"
        )
    return place


def scenarios(
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Images: seg_train and seg_test, a folder per class in each.")
    ],
    scenario: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Scenario: baseline, resolution, hyperparameters, hardware or all."
        ),
    ] = "all",
    generate: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Training images of six classes to write into --data if it has none, and a sixth as many to test.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(metavar="NAME", help="Initial weights: imagenet, which torchvision downloads, or none."),
    ] = "imagenet",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of a whole run.")] = 10,
    budget: Annotated[
        str | None, typer.Option(metavar="30min", help="Budget of each search, as in 'forerun tune'.")
    ] = None,
    trial_time: Annotated[
        str | None, typer.Option(metavar="10s", help="Time of a trial's steps, as in 'forerun tune'.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device: cpu or cuda:N.", show_default="the first GPU, else cpu"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the searches.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for all files.")] = Path("forerun-study"),
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train SqueezeNet 1.1 unchanged, then as well as each scenario can, and compare these runs."""
    from forerun.question.devices import describe_host
    from forerun.question.devices.local import check_device, first_device
    from forerun.surface.cli.output import page_width, print_page
    from studies.scenarios.study import (
        Job,
        chosen_scenarios,
        page,
        run_scenarios,
        training_command,
        write_plots,
    )
    from studies.scenarios.training import generate_images

    say = partial(typer.echo, err=True)
    place = first_device() if device is None else check_device(device)
    cores = int(describe_host().num_usable_cores)
    chosen = chosen_scenarios(scenario, num_cores=cores, epochs=epochs, is_gpu=place != "cpu")
    if generate is not None and not (data / "seg_train").exists():
        say(f"generating {generate} images of six classes in {data}")
        generate_images(data, num_images=generate)
    job = Job(
        command=training_command(data, epochs=epochs, weights=weights),
        folder=out,
        device=place,
        budget=budget,
        trial_s=None if trial_time is None else parse_amount(trial_time, "time"),
        seed=seed,
        say=say,
    )
    found = run_scenarios(job, chosen)
    write_plots(out, found)
    if as_json:
        typer.echo(json.dumps({"folder": str(out), "scenarios": found}))
    else:
        print_page(page(out, found), page_width(100))
