"""``python -m studies scripts``: public training scripts captured as they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.settings import DebugOption


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
