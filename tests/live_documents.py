"""What systems say of their jobs and nodes, cut to the fields that are read.

Recorded from Slurm 22.05; the others are written by their documentation.
"""

from typing import Any

NOW_S = 1_795_351_400.0

SINFO: dict[str, Any] = {
    "nodes": [
        {"name": "n1", "gres": "gpu:t4:2", "state": "mixed", "state_flags": []},
        {"name": "n2", "gres": "gpu:t4:4(S:0-1)", "state": "idle", "state_flags": []},
        {"name": "n3", "gres": "gpu:t4:4", "state": "idle", "state_flags": ["DRAIN"]},
        {"name": "login", "gres": "", "state": "idle", "state_flags": []},
    ]
}

SQUEUE: dict[str, Any] = {
    "jobs": [
        {
            "job_id": 7,
            "name": "long",
            "job_state": "RUNNING",
            "comment": "forerun points='1:100 2:190' batch_size=10 steps=300000 restart=10s",
            "gres_detail": ["gpu:t4:2(IDX:0-1)"],
            "node_count": 1,
            "nodes": "n1",
            "start_time": NOW_S - 3600,
            "time_limit": 600,
            "tres_per_node": "gres:gpu:2",
            "requeue": True,
            "state_reason": "None",
        },
        {
            "job_id": 8,
            "name": "waits",
            "job_state": "PENDING",
            "comment": "for the paper",
            "gres_detail": [],
            "node_count": 1,
            "nodes": "",
            "start_time": 0,
            "time_limit": 30,
            "tres_per_node": "gres:gpu:t4:1",
            "requeue": False,
            "state_reason": "JobHeldUser",
        },
        {"job_id": 9, "name": "cpu", "job_state": "PENDING", "node_count": 1, "tres_req_str": "cpu=4,node=1"},
        {"job_id": 6, "name": "over", "job_state": "COMPLETED", "node_count": 1},
    ]
}

NEWER_SINFO: dict[str, Any] = {
    "sinfo": [
        {"node": {"state": ["IDLE"]}, "nodes": {"nodes": ["n1", "n2"]}, "gres": {"total": "gpu:a100:8"}},
        {"node": {"state": ["DOWN"]}, "nodes": {"nodes": ["n3"]}, "gres": {"total": "gpu:a100:8"}},
    ]
}

NEWER_SQUEUE: dict[str, Any] = {
    "jobs": [
        {
            "job_id": 70,
            "array_job_id": {"set": True, "infinite": False, "number": 69},
            "array_task_id": {"set": True, "infinite": False, "number": 3},
            "name": "array",
            "job_state": ["RUNNING"],
            "comment": "",
            "gres_detail": ["gpu:a100:8(IDX:0-7)", "gpu:a100:8(IDX:0-7)"],
            "node_count": {"set": True, "infinite": False, "number": 2},
            "nodes": "n[1-2]",
            "start_time": {"set": True, "infinite": False, "number": NOW_S - 60},
            "time_limit": {"set": False, "infinite": True, "number": 0},
        }
    ]
}


def pod(job: str, node: str, gpus: int) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": f"{job}-x", "namespace": "ml", "labels": {"batch.kubernetes.io/job-name": job}},
        "spec": {"nodeName": node, "containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]},
        "status": {"phase": "Running"},
    }


def batch_job(name: str, *, gpus: int = 1, pods: int = 1, queue: str = "", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "labels": {"kueue.x-k8s.io/queue-name": queue} if queue else {},
            "annotations": {
                "forerun/points": "1:100 2:190 4:340",
                "forerun/batch_size": "32",
                "forerun/steps": "9000" if name != "long" else "9000000",
            },
        },
        "spec": {
            "parallelism": pods,
            "suspend": not status,
            "template": {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": gpus}}}]}},
        },
        "status": status,
    }


KUBECTL: dict[str, Any] = {
    "kind": "List",
    "items": [
        batch_job("long", gpus=2, active=1, startTime="2026-11-22T12:00:00Z"),
        batch_job("short", queue="team"),
        {**batch_job("done"), "status": {"conditions": [{"type": "Complete", "status": "True"}]}},
        batch_job("cpu", gpus=0),
        pod("long", "k1", 2),
        {
            "kind": "Node",
            "metadata": {"name": "k1", "labels": {"nvidia.com/gpu.product": "Tesla-T4"}},
            "status": {"allocatable": {"nvidia.com/gpu": "2"}},
        },
        {"kind": "Node", "metadata": {"name": "k2"}, "status": {"allocatable": {"cpu": "8"}}},
    ],
}

RAY_NODES: dict[str, Any] = {
    "result": True,
    "data": {
        "result": {
            "result": [
                {
                    "node_id": "aa",
                    "node_ip": "10.0.0.1",
                    "state": "ALIVE",
                    "resources_total": {"CPU": 8.0, "GPU": 2.0, "accelerator_type:T4": 1.0},
                },
                {"node_id": "bb", "node_ip": "10.0.0.2", "state": "DEAD", "resources_total": {"GPU": 2.0}},
            ]
        }
    },
}

RAY_JOBS: list[dict[str, Any]] = [
    {
        "submission_id": "run",
        "status": "RUNNING",
        "entrypoint": "python train.py --lr 0.1",
        "start_time": int(1000 * (NOW_S - 600)),
        "metadata": {
            "forerun.points": "1:100 2:190",
            "forerun.batch_size": "10",
            "forerun.steps": "900000",
            "forerun.num_devices": "2",
        },
    },
    {
        "submission_id": "next",
        "status": "PENDING",
        "entrypoint": "python eval.py",
        "metadata": {"forerun.points": "1:100", "forerun.batch_size": "10", "forerun.steps": "3000"},
    },
    {"submission_id": None, "job_id": "01000000", "status": "RUNNING", "entrypoint": "python a.py"},
    {"submission_id": "old", "status": "SUCCEEDED", "entrypoint": "python a.py"},
]
