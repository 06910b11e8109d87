"""Commands of an allocation."""

import shlex

from forerun.jobs.schedule import NodeDevices, device_numbers, torchrun_lines
from forerun.jobs.scheduling.placement import NodeShare


def test_jobs_on_a_node_get_different_devices():
    found = device_numbers({"a": (NodeShare(0, 2),), "b": (NodeShare(0, 1), NodeShare(1, 4)), "waits": ()})
    assert found == {
        "a": (NodeDevices(0, (0, 1)),),
        "b": (NodeDevices(0, (2,)), NodeDevices(1, (0, 1, 2, 3))),
        "waits": (),
    }


def test_a_line_for_each_node_with_one_meeting_point():
    lines = torchrun_lines([NodeDevices(3, (0, 1)), NodeDevices(5, (2,))], "train.py --name 'my run'", 29501)
    assert lines[0] == (
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nnodes=2 --nproc-per-node=2 --node-rank=0 --rdzv-backend=c10d "
        "--rdzv-id=29501 --rdzv-endpoint=node3:29501 train.py --name 'my run'"
    )
    assert "--node-rank=1" in lines[1]
    assert "--nproc-per-node=1" in lines[1]
    assert shlex.split(lines[1])[-1] == "my run"
