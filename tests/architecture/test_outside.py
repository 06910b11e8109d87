"""Another package adds a source of models, a verb, a law of kernels and a policy by entry points alone."""

import json
import os
import subprocess
import sys

import pytest

PACKAGE = '''
from dataclasses import replace

import typer
from forerun.cost.time.kernel_laws import Gives, KernelLaw
from forerun.graph.graph import OpClass
from forerun.jobs.scheduling.policy import find_policy
from forerun.tracing.source import Source


def build(rest, options):
    from forerun.tracing.models.families import build_family

    return build_family(f"cnn:depth={rest},base_filters=32", options)


SOURCE = Source(build=build)


def greet() -> None:
    """Greet."""
    typer.echo("hello from outside")


def ten_seconds(kernels, rows):
    import numpy as np

    return np.full((kernels.work_s.shape[0], len(rows)), 10.0)


def patient():
    return replace(find_policy("fifo"), name="patient")


LAW = KernelLaw(name="slow_pools", gives=Gives.LEAST, op_classes=(OpClass.MAX_POOL,), time_s=ten_seconds)
'''

POINTS = """
[forerun.sources]
outside = outside_forerun:SOURCE

[forerun.verbs]
greet = outside_forerun:greet

[forerun.laws]
slow_pools = outside_forerun:LAW

[forerun.policies]
patient = outside_forerun:patient
"""


@pytest.fixture
def outside(tmp_path):
    """Environment of a command that finds a package with entry points beside forerun."""
    (tmp_path / "outside_forerun.py").write_text(PACKAGE)
    info = tmp_path / "outside_forerun-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-forerun\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def asked(words, environment):
    done = subprocess.run(
        [sys.executable, "-m", "forerun", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_package_beside_forerun_adds_parts_by_entry_points(outside, tmp_path):
    assert "hello from outside" in asked(["greet"], outside)
    assert "greet" in asked(["--help"], outside)
    words = ["predict", "outside:2", "--on", "t4", "--json"]
    estimate = json.loads(asked(words, outside))
    assert estimate["step_time_s"]["value"] > 10.0  # two pools, each held by the law from outside
    (tmp_path / "jobs.csv").write_text("name,points,batch_size,steps,num_devices\na,1:100 2:190,32,2000,2\n")
    words = ["schedule", str(tmp_path / "jobs.csv"), "--cluster", "1x2xt4", "--policy", "patient", "--json"]
    assert "patient" in asked(words, outside)
