"""A predicted job in the words of schedulers: a JSON estimate, Slurm, SkyPilot and its time estimator, dstack, Ray."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from forerun.base.answers import plain
from forerun.base.errors import (
    FailureError,
    InvalidSetupError,
    RecordError,
    UnknownDeviceError,
    UsageError,
    near_matches,
)
from forerun.jobs.scheduling.live import LiveNode, inside
from forerun.prediction.estimate import Estimate, Interval
from forerun.question.devices.prices import InstancePrice, load_prices
from forerun.question.job import time_limit_s
from forerun.search.plan_answer import Plan, PlanPoint
from forerun.search.predict import predict
from forerun.surface.cli.submit import SKYPILOT_ACCELERATORS, sky_accelerators


def slurm_time(answer: Plan | Estimate) -> str:
    """Slurm's time limit of a job, ``--time=D-HH:MM:SS``.

    limit = 1.15 * upper end of the job's interval + 5 min, rounded up to minutes.

    Args:
        answer: A plan, of which the chosen candidate counts, or a prediction.

    Raises:
        FailureError: The plan has no chosen candidate.
        UsageError: The prediction has no job.
    """
    return f"--time={_days(time_limit_s(_job_time(answer).high))}"


def job_estimate(answer: Plan | Estimate) -> dict[str, Any]:
    """The job as one object: model, devices, duration, and the limits to ask a scheduler for."""
    job_s = _job_time(answer)
    what = _chosen(answer)
    assert what.peak_memory_bytes is not None
    return {
        "model": what.model,
        "device": what.device,
        "num_devices": what.num_devices,
        "batch_size_per_device": what.batch_size_per_device,
        "precision": what.precision,
        **(what.settings if isinstance(what, PlanPoint) else {}),
        "job_time_s": plain(job_s),
        "time_limit_s": time_limit_s(job_s.high),
        "slurm_time": _days(time_limit_s(job_s.high)),
        "peak_memory_bytes": plain(what.peak_memory_bytes),
        "throughput_samples_per_s": plain(what.throughput_samples_per_s),
        "cost_usd": plain(what.cost_usd),
        "energy_j": plain(what.energy_j),
    }


def _chosen(answer: Plan | Estimate) -> PlanPoint | Estimate:
    what: PlanPoint | Estimate | None = answer.chosen if isinstance(answer, Plan) else answer
    if what is None:
        raise FailureError("no candidate keeps the limits, so there is no job to schedule; relax a limit")
    return what


def _job_time(answer: Plan | Estimate) -> Interval:
    what = _chosen(answer)
    if what.job_time_s is None:
        raise UsageError("a time limit needs the length of the job: give a dataset and the number of epochs")
    return what.job_time_s


def _days(limit_s: int) -> str:
    days, rest = divmod(limit_s, 86400)
    return f"{days}-{rest // 3600:02d}:{rest % 3600 // 60:02d}:00"


def _line(answer: Plan | Estimate, words: str) -> str:
    """Words of a scheduler with the devices and the time limit of the job."""
    what, limit_s = _chosen(answer), time_limit_s(_job_time(answer).high)
    nodes = answer.run.cluster.num_nodes if isinstance(answer, Estimate) else 1
    if what.num_devices > _LARGEST_NODE * nodes:
        raise UsageError(
            f"a plan does not say on how many nodes its {what.num_devices} devices are; ask forerun predict about "
            f"2x8x{what.device}, say, with --json, and forerun report --format for that"
        )
    device = what.device
    name = next((theirs for theirs, ours in SKYPILOT_ACCELERATORS.items() if ours == device), device)
    memory = re.search(r"-(\d+GB)", name)
    return words.format(
        nodes=nodes,
        per_node=what.num_devices // nodes,
        name=name,
        # dstack tells devices of one name apart by their memory.
        short=f"{name.partition('-')[0]}{f':{memory[1]}' if memory else ''}",
        minutes=limit_s // 60,
        limit_s=limit_s,
    )


_LARGEST_NODE = 8
"""Devices above which a job is on several nodes, where the answer does not say."""

_WORDS = {
    "sbatch": "#SBATCH --nodes={nodes} --gres=gpu:{per_node} --time={minutes}",
    "sky": "resources: {{accelerators: '{name}:{per_node}'}}\nnum_nodes: {nodes}",
    "dstack": "nodes: {nodes}\nresources: {{gpu: '{short}:{per_node}'}}\nmax_duration: {minutes}m",
    "ray": "ray job submit --entrypoint-num-gpus {per_node} -- timeout {limit_s}",
}
"""Words of each scheduler about a job. Ray itself ends no job, so that ``timeout`` does.

Sources: Slurm, sbatch(1); SkyPilot, "Task YAML"; dstack, "Reference: task"; Ray, "ray job submit".
"""

sbatch_line, sky_lines, dstack_lines, ray_line = (partial(_line, words=words) for words in _WORDS.values())


_GPU_MEMORY = re.compile(r"\d+GB")
_VENDORS = ("nvidia", "amd", "google", "intel")


def asked_nodes(document: Mapping[str, Any]) -> list[LiveNode]:
    """Nodes that a fleet or task of dstack or a task of SkyPilot asks for, the most of a range; none of another file.

    Raises:
        RecordError: Its GPUs have no name, or only dstack itself can find them.
        UsageError: A number of accelerators is no whole one.
    """
    resources, number = inside(document, "resources") or {}, document.get("num_nodes") or 1
    if document.get("type") in ("fleet", "task"):
        number = inside(document, "nodes", "max") or document.get("nodes") or 1
        kind, per_node = _dstack_gpus(document, resources.get("gpu"))
    elif isinstance(resources, Mapping):
        kind, per_node = sky_accelerators(resources, "resources")
    number = int(str(number).rpartition("..")[2] or 1)
    return [LiveNode(name=str(i), device=kind, num_devices=per_node) for i in range(number if kind else 0)]


def sold_as(instance: str) -> InstancePrice | None:
    """A price of an instance of a cloud, which tells its GPUs; None of one that the list lacks."""
    return next((price for price in load_prices() if instance and price.instance == instance), None)


def _dstack_gpus(document: Mapping[str, Any], asked: Any) -> tuple[str, int]:
    """Kind and number of the GPUs of a node of dstack, from ``A100:80GB:8``, its parts by name, or an instance."""
    if "ssh_config" in document:
        raise RecordError("dstack itself finds the GPUs of hosts that it reaches by SSH")
    instance = next(iter(document.get("instance_types") or ()), "")
    if sold := sold_as(instance):
        return sold.device, sold.num_devices
    told = [asked.get(key) for key in ("name", "memory", "count")] if isinstance(asked, Mapping) else [asked]
    name, memory, number = "", "", 1
    for part in ":".join(str(one[0] if isinstance(one, list) else one) for one in told if one).split(":"):
        if _GPU_MEMORY.match(part):
            memory = part
        elif part.replace(".", "").isdigit():
            number = int(part.strip(".").rpartition("..")[2])
        elif part.lower() not in _VENDORS:
            name = part.partition(",")[0].upper()
    if not name:
        raise RecordError(
            f"the GPUs of the fleet have no name: expected gpu: A100:80GB:8, got {asked or instance}"
        )
    short = f"{name}-{memory}"
    return SKYPILOT_ACCELERATORS.get(short, SKYPILOT_ACCELERATORS.get(name, name.lower())), number


def time_estimator(model: str, **question: Any) -> Callable[[Any], float]:
    """A function from SkyPilot's resources to the time of the job [s], for ``sky.Task.set_time_estimator``.

    SkyPilot's optimizer multiplies this time with prices to find the cheapest or fastest cloud. Any object with an
    attribute ``accelerators``, a mapping of a name to a number, serves as resources.

    Args:
        model: As in ``forerun.predict``.
        question: Further arguments of ``forerun.predict``; a dataset and a number of epochs are needed.

    Raises:
        InvalidSetupError: The question names a device, or has no job; and, when called, resources without
            exactly one kind of accelerator, or with a part of one.
        UnknownDeviceError: When called, an accelerator that the catalogue does not have.

    Examples:
        >>> from types import SimpleNamespace
        >>> estimate = time_estimator("cnn:depth=2", dataset="cifar10", epochs=3)
        >>> estimate(SimpleNamespace(accelerators={"T4": 1})) > estimate(SimpleNamespace(accelerators={"A100": 1}))
        True
    """
    if "device" in question:
        raise InvalidSetupError("the device comes from the scheduler, so none can be given; leave it out")
    if not question.get("epochs") or not (question.get("dataset") or question.get("dataset_size")):
        raise InvalidSetupError("the time of a job needs a dataset and the number of epochs")

    def estimate(resources: Any) -> float:
        device, num_devices = _device(resources)
        found = predict(model, device=device, num_devices=num_devices, **question)
        assert found.job_time_s is not None
        return found.job_time_s.value

    return estimate


def _device(resources: Any) -> tuple[str, int]:
    accelerators = getattr(resources, "accelerators", None)
    if not isinstance(accelerators, Mapping) or len(accelerators) != 1:
        raise InvalidSetupError(f"expected resources with one kind of accelerator, got {accelerators!r}")
    ((name, count),) = accelerators.items()
    if count < 1 or count != int(count):
        raise InvalidSetupError(f"a job has whole devices, got {count:g} x {name}")
    known = {key.lower(): device for key, device in SKYPILOT_ACCELERATORS.items()}
    if name.lower() not in known:
        raise UnknownDeviceError(
            f"no device of the catalogue for the accelerator '{name}'{near_matches(name, SKYPILOT_ACCELERATORS)}; "
            f"known are {', '.join(SKYPILOT_ACCELERATORS)}"
        )
    return known[name.lower()], int(count)
