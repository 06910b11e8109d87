"""Jobs: small frozen descriptions of runs that travel to a child process, or to another host, as JSON.

A job does not depend on its timing (``protocol``) or its runner (``runners``). Its parameters are plain scalars, so
that one dictionary is its JSON form, its identity, and the ``parameters`` of its measurement.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from forerun.records.measurement import JobKind, Scalar

__all__ = ["MeasurementJob", "RunResult", "job_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementJob:
    """One job to run.

    Attributes:
        kind: Kind of the job, which selects the runner.
        subject: Model as ``predict`` names it, or name of a layer or kernel.
        family: Group that must not be split between fit and test.
        parameters: All settings for the runner: batch_size, precision, layout, compile, optimizer, phase,
            image_size, num_epochs, sizes of the layer ... Scalars only.
    """

    kind: JobKind
    subject: str
    family: str
    parameters: dict[str, Scalar] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON with sorted keys."""
        return json.dumps(
            {
                "kind": str(self.kind),
                "subject": self.subject,
                "family": self.family,
                "parameters": self.parameters,
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> MeasurementJob:
        """The job from the output of ``to_json``."""
        values = json.loads(text)
        return cls(
            kind=JobKind(values["kind"]),
            subject=values["subject"],
            family=values["family"],
            parameters=values["parameters"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a runner on the device.

    Attributes:
        warm_up_s: Repetitions before the step time was stationary [s].
        repetitions_s: Timed repetitions, in order [s].
        results: Figures beside time; see ``Measurement.results``.
        is_stationary: True if the warm-up ended because the times were stationary, not because it ran out.
    """

    repetitions_s: tuple[float, ...]
    warm_up_s: tuple[float, ...] = ()
    results: dict[str, Scalar] = field(default_factory=dict)
    is_stationary: bool = True


def job_key(job: MeasurementJob, *, device: str, framework_version: str, occasion: str) -> str:
    """Identity of a job on a device with a framework on an occasion: 32 hexadecimal digits.

    All repetitions on one occasion share the key; the protocol's settings are not part of it.
    """
    text = "\n".join([job.to_json(), device, framework_version, occasion])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
