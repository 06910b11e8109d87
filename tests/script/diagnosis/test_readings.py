"""Logs and tables as frameworks print them: the step, and what of it waits for data."""

import pytest

import forerun
from forerun.base.errors import ForerunError, UsageError
from forerun.script.diagnosis.readings import read_steps, read_table

_RULE = "-" * 40 + "\n"
_HEAD = "Name  Self CPU %  Self CPU  CPU total %  CPU total  Self CUDA  Self CUDA %  CUDA total  # of Calls\n"
_TABLE = f"""{_RULE}{_HEAD}{_RULE}
enumerate(DataLoader)#_SingleProcessDataLoaderIter._...  30.00%  6.000s  40.00%  8.000s  0.000us  0.00%  0.000us  10
  cudaMalloc  10.00%  2.000s  10.00%  2.000s  0.000us  0.00%  0.000us  20
  aten::mm  5.00%  1.000s  5.00%  1.000s  6.000s  100.00%  6.000s  40
  ampere_sgemm_128x64_nn  0.00%  0.000us  0.00%  0.000us  6.000s  100.00%  6.000s  40
{_RULE}Self CPU time total: 20.000s
Self CUDA time total: 6.000s
"""


@pytest.mark.parametrize(
    ("text", "step_s", "wait_s"),
    [
        ("Epoch: [0][16/5005]\tTime 67.619 (11.0)\tData 67.5 (10.7)\tLoss 6.9 (6.9)", 11.0, 10.7),
        (
            "Epoch [1][50/751]\tlr: 0.1, eta: 4:57:01, time: 0.594, data_time: 0.033, memory: 6836",
            0.594,
            0.033,
        ),
        (
            "iter: 280/983, mem: 7746Mb, iter_time: 4.5s, data_time: 2.5s, total_loss: 5.4, ETA: 1:02:03",
            4.5,
            2.5,
        ),
        (
            "Train: 0 [50/12]  Time: 0.389s, 131.1/s  (0.402s, 127.1/s)  LR: 1e-06  Data: 0.010 (0.222)",
            0.402,
            0.222,
        ),
        ("Epoch: [0] [20/125] eta: 0:12:01 time: 0.4 data: 0.2 max mem: 7000\nTotal time: 0:09:31", 0.4, 0.2),
        ("load_data_time: 3.0, train_step_time: 1.0.", 4.0, 3.0),
        (
            "eta: 8:29  time: 0.34  last_time: 0.3  data_time: 0.04  last_data_time: 0.01  lr: 0.0002",
            0.34,
            0.04,
        ),
        ("\n".join("time: 1.0 data: 0.0" for _ in range(9)) + "\ntime: 91.0 data: 0.0", 11.0, 0.0),
        (" iteration 10/ 500 | elapsed time per iteration (ms): 6512.4 | lm loss: 1.05E+01 |", 6.5124, 0.0),
        (
            "time (ms) | forward: 200 | backward: 500 | optimizer: 250 | batch generator: 50 | data loader: 9",
            1.0,
            0.05,
        ),
        ("iter 10: loss 4.2, time 135.44ms, mfu 17.30%", 0.13544, 0.0),
        ("  1%| | 10/1000 [00:25<41:00,  2.48s/it]", 2.48, 0.0),
        ("{'train_samples_per_second': 12.3, 'train_steps_per_second': 0.5}", 2.0, 0.0),
        ("(step=0000100) Train Loss: 9.1, Train Steps/Sec: 2.5", 0.4, 0.0),
    ],
)
def test_lines_of_a_log_tell_the_step_and_its_wait(text, step_s, wait_s):
    seen = read_steps(text, None)
    assert (seen.step_s, seen.loader_s) == pytest.approx((step_s, wait_s))


def test_a_log_is_judged_alone_and_beside_a_prediction(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("time: 8.9  data_time: 7.4\n" * 3)
    assert forerun.diagnose(measured=log).causes[0].cause == "data loader"
    assert forerun.diagnose(trace=log).causes[0].share == pytest.approx(7.4 / 8.9)
    beside = forerun.diagnose("mnist-cnn", measured=log, device="t4")
    assert (beside.verdict, beside.causes[0].cause) == ("slow", "data loader")
    stalls = forerun.diagnose(measured="time: 1 data: 0\n" * 9 + "time: 91 data: 0")
    assert stalls.causes[0].cause == "host and launches"
    shared = "time (ms) | forward_microstep: 1\ntime (ms) | forward: 4 | backward: 7 | backward_allreduce: 2 | step: 1"
    assert forerun.diagnose(measured=shared).causes[0].cost_s == pytest.approx(0.002)
    zero = forerun.diagnose(measured="time (ms) | forward: 200.1 | backward: 3509 | optimizer: 38738.77")
    assert zero.causes[0].cause == "optimizer longer than the rest"
    assert forerun.diagnose(measured="time: 0.594, data_time: 0.033").causes[0].cause == "busy device or host"
    # What comes over HTTP is words, never the name of a file of the server.
    with pytest.raises(ForerunError, match="expected a number with a unit"):
        forerun.diagnose(measured=str(log))


def test_a_table_of_the_profiler_is_judged(tmp_path):
    seen = read_table(_TABLE, "table.txt")
    parts = (seen.step_s, seen.busy_s, seen.loader_s, seen.allocator_s, seen.host_s)
    assert parts == pytest.approx((2.0, 0.6, 0.8, 0.2, 0.4))
    assert seen.off_units_s == {"fp32": pytest.approx(0.6)}
    path = tmp_path / "table.txt"
    path.write_text(_TABLE)
    assert forerun.diagnose(trace=path).causes[0].cause == "data loader"
    report = (
        "FIT Profiler Report\nrun_training_epoch | 90 | 1 | 90 |\n[a].train_dataloader_next | 5 | 16 | 80 |\n"
    )
    seen = read_table(report + "run_training_batch | 0.6 | 16 | 9.6 |\n", "report.txt")
    assert (seen.step_s, seen.loader_s) == pytest.approx((90 / 16, 5.0))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"# gpu   pwr    sm   mem\n# Idx     W     %     %\n    0    57    43    12\n", "--gpu-utilization"),
        (b"\x00\x01nsys", "Nsight Systems"),
        (b"Name  Self CPU total %  Self CPU total  CUDA total  Number of Calls\n", "before 1.7"),
        (b"import torch\n", "'time: 0.59, data_time: 0.03'"),
        (b"time: 0.5\n", "tell no cause"),
        (b"tokens_per_second_per_gpu:576.6", "expected the MODEL"),
    ],
)  # fmt: skip
def test_other_files_lead_to_what_works_in_one_line(tmp_path, content, words):
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        forerun.diagnose(measured=path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
