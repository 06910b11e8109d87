"""Energy of a step from the power limit of the device.

During training a GPU draws a share of its power limit. ``TRAINING_SHARE`` is the median and the range from the
5th to the 95th percentile over 20 pairs of GPU and network of average power over the power limit, at the full
limit: BERT, DeepSpeech2, NCF, ResNet-50 and ShuffleNetV2 on A40, P100, Quadro RTX 6000 and V100. Jobs that
leave the device idle (NCF) are at the lower end, dense ones (ResNet-50, BERT) between 0.64 and 0.93.

Source: measured by the Zeus project (You, Chung and Chowdhury, NSDI 2023), table ``zeus_epoch_time_power``.
"""

from __future__ import annotations

from forerun.hardware.device import Device, DeviceKind
from forerun.prediction.estimate import Interval

__all__ = ["TRAINING_SHARE", "training_energy_j"]

TRAINING_SHARE = Interval(0.62, 0.15, 0.90)


def training_energy_j(device: Device, duration_s: Interval) -> Interval | None:
    """Energy of the device over a duration [J]; None where no power figures stand behind the share.

    energy = power limit * share * duration. The two intervals are taken as independent: relative half-widths
    add in squares. Host, cooling and network are left out.
    """
    if device.kind is not DeviceKind.GPU or device.power_limit_w <= 0:
        return None
    value = device.power_limit_w * TRAINING_SHARE.value * duration_s.value

    def spread(share: float, duration: float) -> float:
        return float((share**2 + duration**2) ** 0.5)

    below = spread(1 - TRAINING_SHARE.low / TRAINING_SHARE.value, 1 - duration_s.low / duration_s.value)
    above = spread(TRAINING_SHARE.high / TRAINING_SHARE.value - 1, duration_s.high / duration_s.value - 1)
    return Interval(value, value * max(0.0, 1 - below), value * (1 + above))
