"""The names that are known, and this machine: ``models``, ``hardware``, ``prices``, ``doctor``, ``--version``."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import __version__
from forerun.base.answers import Answer, fields_of, plain
from forerun.base.errors import UsageError, near_matches
from forerun.base.extras import EXTRA_OF_PACKAGE, installed_version
from forerun.question.model import flat_names
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.question.devices import Device, Host
    from forerun.question.devices.prices import InstancePrice

_MOST_NAMES = 40


def _names_page(found: Mapping[str, Any]) -> Iterator[str]:
    yield from found["models"][:_MOST_NAMES]
    left = len(found["models"]) - _MOST_NAMES
    if left > 0:
        yield f"... and {left:,} more; give a longer part of the name, or --json for all"


@verb("List the models that are known by name.", page=_names_page, as_dict=dict)
def models(
    word: Annotated[str, typer.Argument(metavar="[WORD]", help="Part of the name, such as resnet.")] = "",
) -> dict[str, Any]:
    """List the models that predict knows by name; --json gives all."""
    from forerun.prediction.models import kept_model_names, model_names

    known = list(dict.fromkeys(flat_names(kept_model_names() or model_names())))
    found = [name for name in known if word.lower() in name.lower()]
    if not found:
        raise UsageError(f"no model has '{word}' in its name{near_matches(word, known)}; see docs/models.md")
    return {"word": word, "models": found}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Health(Answer):
    """The state of an installation.

    Attributes:
        version, python: Versions of forerun and of Python.
        extras: Version of each optional library, None for one that is not installed.
        cache_folder: Folder of kept graphs.
        cache_bytes: Size of its files [bytes].
        processes: Numbers of the processes of forerun that run on this machine.
        leftovers: Temporary folders of commands that ended.
        problems: Whatever keeps a question from being answered, with the remedy.
    """

    version: str
    python: str
    extras: dict[str, str | None]
    cache_folder: str
    cache_bytes: int
    processes: tuple[int, ...]
    leftovers: int
    problems: tuple[str, ...]


def _health_page(found: _Health) -> Iterator[str]:
    from forerun.base.units import format_bytes

    yield f"forerun {found.version}, Python {found.python}"
    there = [f"{name} {version}" for name, version in found.extras.items() if version]
    missing = [name for name, version in found.extras.items() if not version]
    yield f"libraries  {', '.join(there) or 'none of the optional ones'}"
    if missing:
        yield f"not there  {', '.join(missing)}: pip install 'forerun[all]' installs all"
    yield f"cache      {found.cache_folder}, {format_bytes(found.cache_bytes)}"
    own = ", ".join(map(str, found.processes))
    yield f"processes  {own or 'none beside this one'}"
    if found.leftovers:
        yield f"removed    {found.leftovers} temporary folders of commands that were ended"
    for problem in found.problems:
        yield f"problem    {problem}"
    if not found.problems:
        yield "no problem found"


@verb("Check this installation.", page=_health_page)
def doctor() -> _Health:
    """Check this installation: libraries, cache, processes that still run, and what killed commands left behind."""
    from forerun.base.kept import cache_folder, remove_leftovers

    folder = cache_folder()
    problems = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problems.append(
            f"the cache folder {folder} cannot be written ({error.strerror or error}): every model is traced anew; "
            "set FORERUN_CACHE to a folder of your own"
        )
    if find_spec("torch") is None:
        problems.append(
            "torch is not installed: only the models of the package are answered; pip install 'forerun[torch]'"
        )
    return _Health(
        version=__version__,
        python=sys.version.split()[0],
        extras={name: installed_version(_PACKAGES.get(name, name)) for name in sorted(EXTRA_OF_PACKAGE)},
        cache_folder=str(folder),
        cache_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        processes=tuple(_processes()),
        leftovers=remove_leftovers(),
        problems=tuple(problems),
    )


_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow", "tensorflow": "tensorflow-cpu"}
"""Names of packages that differ from those of their modules."""


def _processes() -> Iterator[int]:
    """Processes of this user that run forerun, this one and its parents left out."""
    import psutil

    # Programs that start this one, such as timeout, have its name in their own words.
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter(["pid", "cmdline", "username"]):
        words = process.info["cmdline"] or []
        is_forerun = any(Path(word).name == "forerun" or word == "forerun" for word in words[:3])
        if is_forerun and process.info["pid"] not in own:
            yield process.info["pid"]


_LIBRARIES = (
    "numpy", "scipy", "pydantic", "typer", "rich", "torch", "torchvision", "timm", "transformers", "onnx", "keras",
    "tensorflow-cpu", "tensorflow", "scikit-learn", "pandas", "pyarrow", "sqlalchemy", "optuna", "matplotlib", "ray",
    "fastapi", "mcp",
)  # fmt: skip


def version_lines(*, verbose: bool) -> Iterator[str]:
    """The version, and with ``verbose`` those of Python, the system, the libraries and the GPUs."""
    yield f"forerun {__version__}"
    if not verbose:
        return
    from forerun.base.kept import cache_folder
    from forerun.cost.time.weights import shipped_weights_path
    from forerun.question.devices.here import describe_host
    from forerun.tracing.trace import shipped_models

    yield f"Python {platform.python_version()} at {sys.executable}"
    yield platform.platform()
    host = describe_host()
    yield f"{host.cpu.model}, {host.num_usable_cores:g} cores usable"
    for gpu in host.gpus:
        yield f"GPU {gpu.name}, driver {gpu.driver_version}"
    found = {name: installed_version(name) for name in _LIBRARIES}
    yield "libraries: " + ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield f"cost model {shipped_weights_path().name}, graphs of {len(shipped_models())} models"
    yield f"traced graphs are kept in {cache_folder()}"


_PAGES = "forerun.surface.report.hardware_page"


@verb(
    page=f"{_PAGES}:device_table",
    as_dict=lambda devices: {"devices": [device.as_dict() for device in devices]},
)
def list_devices() -> Sequence[Device]:
    """List the devices of the catalogue."""
    from forerun.question.devices import load_catalog

    return [*load_catalog().values()]


@verb(page=f"{_PAGES}:device_page")
def show_device(
    device: Annotated[
        str,
        typer.Argument(metavar="DEVICE", help="Device: catalogue name, driver's name, TOML file or 'here'."),
    ],
) -> Device:
    """Show the figures of one device, each with its source."""
    from forerun.question.devices import find_device

    return find_device(device, prefer_sxm=True)


@verb(page=f"{_PAGES}:host_page")
def here() -> Host:
    """Show what this machine has: processor, memory, GPUs, software."""
    from forerun.question.devices import describe_host

    return describe_host()


hardware = Verbs(
    "Show the devices of the catalogue, and this machine.",
    {"list": list_devices, "show": show_device, "here": here},
)


def _row(price: InstancePrice) -> dict[str, Any]:
    found = fields_of(price) | {"date": price.date.isoformat(), "is_community": price.is_community}
    return dict(plain(found))


@verb(
    "List prices with their dates, or update them.",
    page=f"{_PAGES}:price_table",
    as_dict=lambda prices: {"prices": [_row(price) for price in prices]},
)
def prices(
    update: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL", help="Newer prices, a TOML file or its https address; they are kept."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--on", metavar="DEVICE", help="Prices of this device only, such as h100-sxm."),
    ] = None,
) -> Sequence[InstancePrice]:
    """List the prices that plans go by, with their dates and sources, or take newer ones."""
    from forerun.question.devices import find_device
    from forerun.question.devices.prices import load_prices, update_prices, updated_prices_path

    if update is not None:
        taken = update_prices(update)
        typer.echo(f"{len(taken)} prices from {update} are kept in {updated_prices_path()}", err=True)
    wanted = None if device is None else find_device(device, prefer_sxm=True).name
    return sorted(
        (price for price in load_prices() if wanted in (None, price.device)),
        key=lambda price: (price.device, price.is_community, price.usd_per_hour / price.num_devices),
    )
