"""Predictions for several devices: the cluster that is asked about, and the estimate of all its devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.communication.scaling_constants import load_scaling_table
from forerun.errors import InvalidSetupError
from forerun.hardware.cluster import Cluster, check_num_devices, cluster_of, parse_cluster
from forerun.hardware.device import Device
from forerun.prediction.estimate import Estimate
from forerun.prediction.one_device import one_device
from forerun.prediction.predictor import Question
from forerun.prediction.scale import scaled_step
from forerun.prediction.scaled_estimate import scaled_estimate
from forerun.prediction.step import PreparedModel, predict_steps
from forerun.run.setup import Phase, choice
from forerun.run.sharing import DEFAULT_BUCKET_BYTES, Sharing, Strategy

__all__ = ["ClusterRequest", "estimate_of_cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """The devices a user asks about.

    Attributes:
        device: A device or its name, ``4x8xh100-sxm``, or a TOML file of either.
        num_devices: Devices in all, where the name does not say; None for one.
        num_nodes: Machines they are in; None for as few as hold them.
        strategy: How they share the work.
        intra, inter: Links inside a node and between nodes, where the board's form does not say them.
    """

    device: str | Device
    num_devices: int | None = None
    num_nodes: int | None = None
    strategy: str = "ddp"
    intra: str | None = None
    inter: str | None = None

    def cluster(self) -> Cluster:
        """The cluster.

        Raises:
            UsageError: The numbers cannot be meant, or a device or link is not known.
        """
        if isinstance(self.device, Device):
            found = cluster_of(self.device, 1, 1, intra=self.intra, inter=self.inter)
        else:
            found = parse_cluster(self.device, intra=self.intra, inter=self.inter)
        if self.num_devices is None and self.num_nodes is None:
            return found
        number = self.num_devices if self.num_devices is not None else found.num_devices
        check_num_devices(number)
        if found.num_devices > 1 and number != found.num_devices:
            raise InvalidSetupError(
                f"'{self.device}' has {found.num_devices} devices, but {number} are asked for; leave one of them out"
            )
        # A device alone says nothing of machines: all are in one unless their number is given.
        return found.with_devices(number, self.num_nodes or (1 if found.num_devices == 1 else None))

    def settings(self, phase: Phase) -> Sharing:
        """How the devices share the work.

        Raises:
            InvalidSetupError: The strategy is not known, or there are no gradients to share.
        """
        if phase is not Phase.TRAIN:
            raise InvalidSetupError(
                f"several devices are predicted in training only, got phase {phase}; ask for one device"
            )
        return Sharing(
            strategy=choice(Strategy, self.strategy, "strategy"), bucket_bytes=DEFAULT_BUCKET_BYTES
        )


def estimate_of_cluster(
    alone: Estimate,
    model: PreparedModel,
    validation: PreparedModel | None,
    question: Question,
    cluster: Cluster,
    settings: Sharing,
) -> Estimate:
    """The estimate of all devices of a cluster from that of one of them.

    Args:
        alone: The estimate of one device.
        model: The traced step.
        validation: The traced inference pass, if the job has validation samples.
        question: Device, setup and job of the question.
        cluster: The devices.
        settings: How they share the work.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    setup = question.setup
    one = one_device(model, question, settings.bucket_bytes)
    step_s, parts = scaled_step(one, cluster, settings, load_scaling_table(), setup.batch_size_per_device)
    validation_step_s = None
    if validation is not None:
        inference = replace(setup, phase=Phase.INFERENCE, optimizer="none")
        found = predict_steps(
            validation, question.device, [inference], question.weights, question.torch_version
        )
        validation_step_s = found[0].step_s
    return scaled_estimate(
        alone, one, step_s, parts, cluster, settings, question.job, validation_step_s=validation_step_s
    )
