"""Files that the questions name: curves, jobs, tables and models, the same every time."""

from __future__ import annotations

import json
from pathlib import Path

from golden.training_scripts import SCRIPTS

__all__ = ["make_files"]

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2,
    "n_positions": 128, "vocab_size": 1000,
}  # fmt: skip

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip

MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 8000, "max_position_embeddings": 4096,
}  # fmt: skip

MODEL = """
import torch


def make():
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 10))
"""

DEVICE = """
[device]
name = "my-card"
title = "My card"
vendor = "nvidia"
kind = "gpu"
architecture = "ampere"
segment = "geforce"
release = "2021-03"
num_compute_units = 10
boost_clock_mhz = 1500
l2_cache_mb = 2
memory_gb = 8
memory_bandwidth_gb_s = 256.5
memory_type = "GDDR6"
bus = "PCIe 4.0 x16"
power_limit_w = 120
aliases = ["Card of mine"]

[device.peak_tflops]
fp32 = 3.84
fp16 = 15.4

[device.sources]
compute = "a"
memory = "b"
board = "c"
peak_tflops = "d"
"""

TEXTS = {
    "model.py": MODEL,
    "my-card.toml": DEVICE,
    "gpt2.json": json.dumps(GPT2),
    "llama.json": json.dumps(LLAMA),
    "deep.json": json.dumps(LLAMA | {"num_hidden_layers": 8}),
    "mixtral.json": json.dumps(MIXTRAL),
    "points.csv": "num_devices,batch_size_per_device,step_time_s\n"
    "1,64,0.200\n2,64,0.212\n4,64,0.221\n8,64,0.236\n8,32,0.139\n4,128,0.413\n",
    "servers.csv": "num_workers,num_servers,batch_size_per_device,step_time_s\n"
    "1,1,128,1.60\n2,1,64,0.95\n4,1,32,0.83\n4,2,64,0.96\n8,2,16,0.75\n8,4,32,0.71\n16,4,16,1.05\n",
    "jobs.csv": "name,points,batch_size,steps,num_devices,arrival,deadline,script\n"
    "a,1:100 2:190 4:340,32,20000,2,,,train.py --name 'run a'\n"
    "b,1:50 2:95 4:180,64,4000,4,,2h,\n"
    "c,1:400 2:700,128,9000,1,10min,,\n",
    "models.yaml": "- {name: small, model: 'cnn:depth=2,base_filters=32', batch_size: 128, dataset: cifar10, epochs: 4,"
    " num_devices: 2}\n"
    "- {name: deep, model: 'cifar-resnet:8', precision: amp, optimizer: momentum, batch_size: 256,"
    " batch_size_max: 512, noise_scale: 1000, dataset: cifar10, epochs: 3, num_devices: 4, deadline: 1h}\n",
    "philly.csv": "job,submit_time,num_gpus,duration\na,0,4,100\nb,10,4,10\nc,20,1,5\n",
    "batches.csv": "batch_size,steps\n64,9180\n128,4850\n256,3030\n",
    "epochs-by-batch.csv": "batch_size,epochs\n64,10\n192,12\n",
    "networks.csv": "network,device,depth,parameters,b0\na,x,10,1e5,0.5\na,y,10,1e5,0.6\nb,x,20,4e5,1.0\n"
    "c,y,30,9e5,1.6\nnew,x,25,6e5,\n",
    "trade-off.csv": "name,run,model,device,dataset,epochs,price\nsmall,run.csv,cifar-resnet:8,t4,cifar10,100,1\n"
    "large,better.csv,cifar-resnet:8,v100-sxm2-16gb,cifar10,100,2\n",
    "accuracies.csv": 'model,accuracy\n"cnn:depth=2,base_filters=32",0.70\n"cnn:depth=3,base_filters=32",0.76\n',
    "timm.csv": "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count\n"
    "resnet10t,4000.0,16.0,64,64,5.44\nresnet10t,5000.0,25.6,128,64,5.44\nresnet18,2500.0,25.6,64,64,11.69\n"
    "resnet18,2900.0,44.1,128,64,11.69\n",
    "layout-steps.csv": "model,device,parallel,strategy,batch_size,precision,sequence_length,step_time_s\n"
    '"gpt:depth=2,width=256,vocabulary=1000",8xh100-sxm,"tp=2,dp=4",zero1,4,bf16,256,0.02\n'
    '"gpt:depth=2,width=256,vocabulary=1000",8xh100-sxm,,fsdp,4,bf16,256,0.015\n',
    "train.py": "print('trained')\n",
    **SCRIPTS,
    "best.yaml": "arguments: {--batch-size: 64, --lr: 0.2}\nhooks: {amp: bf16, num_workers: 2}\n",
}


def make_files(folder: Path) -> None:
    """Writes all files into a folder."""
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_curves(folder)
    _write_grid(folder / "grid.csv")
    _write_calibrations(folder)
    _write_steps(folder / "device-steps.csv")
    _write_onnx(folder / "linear.onnx")


def _write_curves(folder: Path) -> None:
    _write_curve(folder / "run.csv", 30, 0.04)
    _write_curve(folder / "better.csv", 30, 0.02)
    history = folder / "history"
    history.mkdir()
    for number, floor in enumerate((0.03, 0.04, 0.05)):
        _write_curve(history / f"{number}.csv", 60, floor)
    for job in range(2):
        jobs = folder / "stored" / f"job-{job}"
        jobs.mkdir(parents=True)
        for number in range(2):
            _write_curve(jobs / f"{number}.csv", 24, 0.03 + 0.03 * job + 0.01 * number)


def _write_curve(path: Path, num_epochs: int, floor: float) -> None:
    """accuracy = 1 - floor - 0.6 epoch^-0.7 with a small wobble of period 7, 100 steps and 60 s an epoch."""
    rows = [
        f"{e},{100 * e},{1 - floor - 0.6 * e**-0.7 + 0.002 * ((e * 3) % 7 - 3) / 3:.5f},{60 * e}.0"
        for e in range(1, num_epochs + 1)
    ]
    path.write_text("\n".join(["epoch,step,accuracy,elapsed_s", *rows]) + "\n", encoding="utf-8")


def _write_grid(path: Path) -> None:
    """The grid of the CNN family with times that grow with the work, three of them off the line."""
    lines = [
        "depth,base_filters,batch_size,num_params,dataset_size,epochs,time_per_epoch,images_per_second,max_gpu_mem_mb"
    ]
    for depth in (2, 3, 4):
        for filters in (32, 64):
            for batch in (32, 64, 128):
                epoch_s = 2 + 50000 / batch * 1e-3 * (1 + depth * filters / 64) * (1.1 if batch == 64 else 1)
                count = 200_000 * depth * filters // 32
                row = (depth, filters, batch, count, 50000, 3, f"{epoch_s:.4f}", f"{50000 / epoch_s:.2f}")
                lines.append(",".join(map(str, (*row, 300 + batch))))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_calibrations(folder: Path) -> None:
    """The shipped cost model, named as one that was calibrated on a T4 with either framework."""
    from forerun.cost.time.weights import save_weights
    from forerun.question.devices import find_device
    from made_calibrations import made_calibration

    device = find_device("t4")
    save_weights(made_calibration(device), folder / "t4.safetensors")
    keras = made_calibration(device, "keras", step_cost_s=0.002)
    keras.provenance["date"] = "2026-11-21"
    save_weights(keras, folder / "t4-keras.safetensors")


def _write_steps(path: Path) -> None:
    """Records of steps of a small network on one device, about twice as long as its datasheet promises."""
    from forerun.evidence.records.measurement import JobKind, Summary
    from forerun.evidence.records.reading import export_measurements
    from made_measurements import measurement

    batches = (32, 64, 128, 256)
    times = {batch: 4e-3 + 2e-5 * batch for batch in batches}
    setup = {"precision": "fp32", "optimizer": "adam", "image_size": 32, "compile": False}
    steps = [
        measurement(
            number,
            kind=JobKind.STEP,
            device="rtx-3090",
            parameters={"batch_size": batch, **setup},
            repetitions_s=(step_s,) * 3,
            summary=Summary(median_s=step_s, low_s=0.98 * step_s, high_s=1.02 * step_s, is_stable=True),
        )
        for number, (batch, step_s) in enumerate(times.items())
    ]
    export_measurements(steps, path)


def _write_onnx(path: Path) -> None:
    """A product of matrices and a ReLU, with a free batch axis."""
    import onnx

    number = onnx.TensorProto.FLOAT
    ends = [
        onnx.helper.make_tensor_value_info(name, number, ["batch", size])
        for name, size in (("x", 64), ("y", 32))
    ]
    weight = onnx.helper.make_tensor("w", number, [64, 32], [0.01] * (64 * 32))
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["z"]),
        onnx.helper.make_node("Relu", ["z"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "linear", ends[:1], ends[1:], [weight])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), str(path))
