"""Jobs are predicted, then handed to the real command."""

import os
import re
import time

import pytest
from command_line import invoke

from forerun.base.errors import UsageError
from forerun.surface.cli.submit import sky_task, slurm_job

RUN = "#FORERUN cnn --batch-size 64 --dataset cifar10 --epochs 2 --price 0.5/h\n"
JOB = (
    f"#!/bin/bash\n#SBATCH --gres=gpu:t4:2\n#SBATCH --nodes 2\n{RUN.strip()} --inter ethernet-25g\n"
    "srun python train.py\n"
)


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(JOB, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("directives", "device", "has_time"),
    [
        ("--gres=gpu:t4:2", "2xt4", False),
        ("--gpus-per-node=a100:8 --nodes=4 --time=1:00:00", "4x8xa100", True),
        ("--gpus=a30:8 -N2 -t60", "2x4xa30", True),
        ("--gpus-per-task=1 --ntasks-per-node=8 -N 64 -G 512", "", False),
        ("--gres=nvme:100,gpu:v100:2", "2xv100", False),
        ("--gres=shard:1", "", False),
        ("--gres=gpu:4090:2", "2x4090", False),
        ("-G 4", "", False),
        ("--gres gpu:4 -t 60", "", True),
    ],
)
def test_the_device_of_a_job_is_that_of_its_directives(directives, device, has_time):
    found = slurm_job(f"#SBATCH {directives}\npython train.py --epochs 3", "job.sh", ())
    assert (found.on(), found.has_time) == (device, has_time)
    assert found.words == ("--", "python", "train.py", "--epochs", "3")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node $N t.py > log 2>&1",
         "torchrun --nnodes=2 --nproc_per_node 4 t.py"),
        ("PYTHONPATH=. python t.py | tee log", "python t.py"),
        ("conda run -n env python -u t.py", "python -u t.py"),
        ("uv run torchrun -m apps.train\npython -m pip list\necho python t.py", "torchrun -m apps.train"),
        ("deepspeed --num_gpus=4 t.py", "deepspeed --num_gpus=4 t.py"),
        ("srun -l bash -c \"torchrun \\\n --nnodes=2 t.py\"", "torchrun --nnodes=2 t.py"),
        ("accelerate launch --num_processes $((SLURM_NNODES * 4)) t.py", "accelerate launch --num_processes 8 t.py"),
    ],
)  # fmt: skip
def test_the_command_of_a_job_is_without_its_wrapping(line, words):
    found = slurm_job(f"#SBATCH -N 2 --gres=gpu:4\n{line}\n", "job.sh", ())
    assert found.words == ("--", *words.split())
    # A kind that is asked for has the numbers of the job, and numbers of its own count.
    assert (found.on("t4"), found.on("8xt4")) == ("2x4xt4", "8xt4")


@pytest.mark.parametrize(
    ("accelerators", "device"),
    [
        ("A100:8", "8xa100-sxm4-40gb"),
        ("[L4, T4:2]", "l4"),
        ("{H100: 8, A100: 8}", "8xh100-sxm"),
        ("{L4:2, T4:1}", "2xl4"),
    ],
)
def test_accelerators_of_skypilot_are_the_catalogue_s_devices(accelerators, device):
    assert sky_task(f"resources: {{accelerators: {accelerators}}}\nrun: python t.py", "t.yaml").on() == device
    with pytest.raises(UsageError, match=r"a job has whole devices"):
        sky_task("resources: {accelerators: 'A100:0.5'}\nrun: python t.py", "t.yaml")


def test_a_task_of_skypilot_names_its_accelerators_and_command():
    text = "resources:\n  accelerators: L4:2\nnum_nodes: 2\nrun: |\n  cd code\n  torchrun \\\n    train.py\n"
    found = sky_task(text, "task.yaml")
    assert found.on() == "2x2xl4"
    assert found.words == ("--", "torchrun", "train.py")
    either = "resources: {any_of: [{accelerators: T4:4}, {accelerators: L4:1}]}\nrun: python t.py"
    assert sky_task(either, "task.yaml").on() == "4xt4"
    for wrong in (
        "- a",
        "{",
        "run: echo",
        "resources: [1]\nrun: python t.py",
        "num_nodes: $N\nrun: python t.py",
    ):
        with pytest.raises(UsageError, match=r"task\.yaml: expected"):
            sky_task(wrong, "task.yaml")


def test_the_command_has_a_time_limit_and_the_file_is_as_it_was(job):
    done = invoke("sbatch", "--dry-run", str(job), "--partition", "gpu")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("sbatch --time=")
    assert done.stdout.rstrip().endswith(f"--partition gpu {job}")
    assert "no time limit" in done.stderr
    assert re.search(r"memory [\d.,]+ [KMG]iB: fits", done.stderr)
    assert job.read_text(encoding="utf-8") == JOB


def test_a_job_over_its_budget_is_not_submitted(job, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\n", encoding="utf-8")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = invoke("sbatch", "--within", "cost<=0.001", str(job))
    assert done.exit_code
    assert "breaks 'cost<=0.001'" in done.stderr
    assert not (tmp_path / "submitted").exists()


def test_a_job_without_a_device_asks_for_it(job):
    job.write_text(f"{RUN}python train.py\n", encoding="utf-8")
    assert "add --on DEVICE" in invoke("sbatch", "--dry-run", str(job)).stderr


@pytest.mark.parametrize(
    "part", ["#SBATCH x" + " " * 500_000 + "y\n", " \n" * 400_000, "#SBATCH a" + " #" * 400_000 + "\n"]
)
def test_a_job_of_a_megabyte_is_read_in_a_moment(part):
    begin_s = time.process_time()
    assert slurm_job(f"#SBATCH --gres=gpu:t4:2 # two\n{part}python train.py", "job.sh", ()).on() == "2xt4"
    assert time.process_time() - begin_s < 2.0


def test_a_file_that_is_no_job_is_not_read_to_its_end(tmp_path):
    (tmp_path / "job.sh").write_text("x" * 2_000_000)
    refused = invoke("sbatch", str(tmp_path / "job.sh"))
    assert refused.exit_code == UsageError.exit_status
    assert "more than 1,048,576 characters" in refused.stderr
    assert "none.sh: No such file or directory; name" in invoke("sbatch", str(tmp_path / "none.sh")).stderr
