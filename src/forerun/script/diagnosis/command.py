"""``forerun diagnose``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.base.errors import UsageError
from forerun.question.options import DEVICE_HELP, MODEL_HELP, RunOptions
from forerun.surface.cli.settings import COMMAND_HELP, known_devices, known_models
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.script.diagnosis.diagnose import Diagnosis


@verb(
    "Tell whether a run is slow, and why.",
    options=RunOptions,
    page="forerun.script.pages:diagnosis_page",
    traces=True,
    examples=(
        "forerun diagnose -- python train.py --batch-size 64",
        'forerun diagnose --measured "410 samples/s" torchvision:resnet50 --on a100-sxm4-40gb --batch-size 64',
        "forerun diagnose --trace rank0.json.gz --trace rank1.json.gz",
    ),
)
def diagnose(
    settings: dict[str, Any],
    use_cache: bool,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help=MODEL_HELP + COMMAND_HELP, autocompletion=known_models),
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="DEVICE", help=DEVICE_HELP, autocompletion=known_devices)
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="0.41s",
            help='Measured step, throughput or training log: 0.41s, "1200 samples/s", train.log.',
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.json",
            help="Trace of PyTorch's profiler, .gz too, or its table; repeat it for several ranks of a job.",
        ),
    ] = None,
    other_model: Annotated[
        str | None, typer.Option("--model", help="Model of a command's prediction, in place of a capture.")
    ] = None,
    gpu_utilization: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, help="GPU utilisation that a monitor shows beside --measured [per cent]."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Number of steps after which a command is stopped.")] = 40,
) -> Diagnosis:
    """Set a measured step beside its prediction, and name the causes of the difference by what they cost.

    The step is that of a command after --, which is run here and profiled, of a trace, or a number.
    """
    import forerun

    is_command = bool(words) and measured is None and trace is None
    alone = words[0] if words and len(words) == 1 else "python"
    if is_command and not alone.endswith(".py") and not shutil.which(alone):
        raise UsageError(
            f"expected a measured step of '{alone}', got none; give --measured 0.41s or --trace FILE.json, or its "
            "training command after --"
        )
    if words and not is_command and len(words) > 1:
        words = [" ".join(words)]
    # A log that lies here; file systems refuse to look for names of more than 255 bytes.
    is_file = measured is not None and len(measured.encode()) < 255 and Path(measured).is_file()
    return forerun.diagnose(
        other_model if is_command or not words else words[0],
        command=words if is_command else None,
        trace=trace or None,
        measured=Path(measured) if measured is not None and is_file else measured,
        device=on,
        gpu_utilization=None if gpu_utilization is None else gpu_utilization / 100,
        num_steps=steps,
        echo=sys.stderr if is_command else None,
        use_cache=use_cache,
        **settings,
    )
