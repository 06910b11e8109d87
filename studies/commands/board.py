"""``python -m studies board``: the page of measured against predicted steps that people have sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from forerun.evidence.fitting.evaluation import errors
from forerun.evidence.records.sharing import SharedRow, read_shared
from forerun.surface.cli.settings import DebugOption
from studies.markdown import markdown_table

_FOLDER = Path(__file__).parents[1] / "board"
_FORMAT = """## Send yours

```bash
forerun measure model torchvision:resnet18 --batch-sizes 8,32 --device cuda:0
forerun records share mine.json
```

Read the file, then attach it to an issue. It holds no paths and no names: only public models and devices of the
catalogue, one step a row, with `model`, `device`, `num_devices`, `batch_size` (of one device), `precision`, `layout`,
`optimizer`, `framework`, `month`, and in seconds `measured_s`, `predicted_s`, `low_s`, `high_s`; `format` is 1. A file
goes into `studies/board`, and `python -m studies board` makes this page.
"""


def board_page(rows: Sequence[SharedRow]) -> str:
    """The page: errors by device, and the format of a file."""
    devices = {row.device: [other for other in rows if other.device == row.device] for row in rows}
    cells = []
    for device, found in sorted(devices.items()):
        measured, predicted, low, high = (
            [getattr(row, name) for row in found] for name in ("measured_s", "predicted_s", "low_s", "high_s")
        )
        error = errors(predicted, measured, (low, high))
        shares = (
            f"{100 * value:.0f} %" for value in (error.mape, error.median_ape, error.coverage_90 or 0.0)
        )
        num_models = len({row.model for row in found})
        cells.append((device, str(error.n), str(num_models), *shares, max(row.month for row in found)))
    header = ("device", "steps", "models", "MAPE", "median", "in 90 % interval", "latest")
    table = markdown_table(header, cells) if cells else "Nothing has come in yet.\n"
    return f"# Board\n\nSteps that people measured, beside their predictions.\n\n{table}\n{_FORMAT}"


def board(
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Files of 'forerun records share'.")
    ] = _FOLDER,
    out: Annotated[Path, typer.Option(metavar="FILE.md", help="The page to write.")] = Path("docs/board.md"),
    debug: DebugOption = False,
) -> None:
    """Make the page of the steps that people have sent."""
    rows = [row for file in sorted(folder.glob("*.json")) for row in read_shared(file)]
    out.write_text(board_page(rows), encoding="utf-8")
    typer.echo(f"{len(rows)} steps on {out}", err=True)
