"""Networks that count as measured: what they make of the distance of a question."""

import pytest

from forerun.cost.time.evidence import LogWidths, operation_mix, step_kind
from forerun.cost.time.features import Point
from forerun.question.devices import find_device
from forerun.question.setup import Precision, TrainingSetup
from op_models import ops_named
from studies.optime.evidence_study import KnownNetwork, evidence_of

SETUP = TrainingSetup(precision=Precision.AMP)


def known(device, name):
    mix = operation_mix(ops_named(name, "amp"))
    return KnownNetwork(device=find_device(device), kind=step_kind(SETUP), era=1.0, mix=mix)


def test_a_network_that_is_in_no_fit_is_as_near_as_one_that_is():
    own, other = known("h100-sxm", "vit"), known("t4", "mobilenet")
    question = Point(device=own.device, setup=SETUP, era=1.0)
    widths = LogWidths()
    far = evidence_of([], widths=widths, others=[other]).log_width(question, own.mix)
    near = evidence_of([], widths=widths, others=[other, own]).log_width(question, own.mix)
    assert near == pytest.approx(widths.base, abs=0.5 * 0.08)  # mixes that lie close are one
    assert far > near + widths.device + widths.architecture
