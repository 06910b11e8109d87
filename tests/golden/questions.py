"""Questions whose answers are kept: command lines without ``forerun`` and ``--json``, and calls in Python.

They are asked in a folder with the files of ``made_files``; ``answers`` there holds the answers that are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from golden import surfaces, token_models, training_scripts

__all__ = ["CALLS", "COMMANDS", "TRIMMED"]

COMMANDS: Mapping[str, str] = {
    **token_models.COMMANDS,
    **training_scripts.COMMANDS,
    # predict: where models come from
    "predict-torchvision": "predict torchvision:resnet18 --on a100-sxm4-40gb",
    "predict-timm": "predict timm:resnet10t --on rtx-3090 --batch-size 64 --layout nhwc --precision amp"
    " --image-size 64",
    "predict-cnn": "predict cnn:depth=2,base_filters=32 --on a100-sxm4-40gb --dataset cifar10 --epochs 3"
    " --price 1.89/h",
    "predict-mnist": "predict mnist-cnn --on p100-pcie-16gb --batch-size 64 --dataset mnist --epochs 10"
    " --optimizer adam",
    "predict-pcam": "predict pcam-cnn --on v100-sxm2-16gb --batch-size 64 --dataset patchcamelyon --epochs 1",
    "predict-cifar-resnet": "predict cifar-resnet:8 --on rtx-4090 --batch-size 128 --precision tf32"
    " --optimizer momentum",
    "predict-transformers": "predict hf:gpt2.json --on l4 --batch-size 16 --precision amp-bf16"
    " --optimizer adamw --sequence-length 64",
    "predict-onnx": "predict onnx:linear.onnx --on t4 --batch-size 256",
    "predict-file": "predict model.py:make --on t4 --input-shape 3,32,32 --compile",
    "predict-keras": "predict keras:cnn:depth=2,base_filters=32 --on t4 --batch-size 64 --optimizer adam",
    "predict-keras-job": "predict keras:cnn:depth=2,base_filters=32 --on v100-sxm2-16gb --batch-size 32"
    " --optimizer adam --dataset cifar10 --epochs 3 --validate --price 2/h",
    "predict-keras-calibrated": "predict keras:cnn:depth=2,base_filters=32 --on t4 --batch-size 64"
    " --optimizer adam --calibration t4-keras.safetensors",
    "predict-keras-cpu": "predict keras:cnn:depth=2,base_filters=32 --on cpu --batch-size 64"
    " --optimizer adam",
    "predict-keras-mirrored": "predict keras:cnn:depth=2,base_filters=32 --on 1x4xv100-sxm2-16gb"
    " --strategy mirrored --batch-size 32 --optimizer adam --dataset cifar10 --epochs 3 --validate",
    # predict: setups, jobs and devices
    "predict-validation": "predict torchvision:mobilenet_v3_small --on t4 --batch-size 128 --precision amp"
    " --image-size 96 --dataset imagenet --epochs 2 --price 0.35/h --validate --startup-s 20"
    " --checkpoint-s 3",
    "predict-remainder": "predict mnist-cnn --on l4 --batch-size 48 --dataset-size 1000"
    " --validation-size 100",
    "predict-forward": "predict mnist-cnn --on t4 --phase forward",
    "predict-inference": "predict torchvision:mobilenet_v3_small --on h100-sxm --batch-size 8"
    " --precision fp16 --phase inference --image-size 96",
    "predict-bf16-missing": "predict mnist-cnn --on t4 --precision bf16 --optimizer none",
    "predict-old-torch": "predict mnist-cnn --on v100-sxm2-16gb --torch-version 1.13 --precision amp",
    "predict-calibrated": "predict mnist-cnn --on t4 --calibration t4.safetensors --batch-size 256",
    "predict-cpu": "predict mnist-cnn --on cpu --batch-size 8",
    "predict-device-file": "predict mnist-cnn --on my-card.toml --dataset mnist --epochs 1 --price 0.10/h",
    "predict-too-large": "predict torchvision:resnet18 --on t4 --batch-size 4096",
    "predict-ddp": "predict torchvision:resnet18 --on 4x8xh100-sxm --inter 8xinfiniband-hdr"
    " --batch-size 64 --dataset imagenet --epochs 90 --price 3/h",
    "predict-fsdp": "predict torchvision:resnet18 --on a100-sxm4-80gb --num-devices 4 --strategy fsdp",
    "predict-zero1": "predict torchvision:resnet18 --on 1x2xrtx-3090 --strategy zero1 --validate"
    " --dataset imagenet",
    "predict-zero2": "predict torchvision:resnet18 --on t4 --num-devices 8 --nodes 2 --inter ethernet-25g"
    " --strategy zero2",
    "predict-mirrored": "predict mnist-cnn --on 1x2xp100-pcie-16gb --strategy mirrored --batch-size 64",
    # scale
    "scale-weak": "scale torchvision:resnet18 --on 1x8xv100-sxm2-16gb --batch-size 64 --dataset imagenet"
    " --epochs 90 --price 2.5/h",
    "scale-both": "scale torchvision:resnet18 --on 4x8xa100-sxm4-80gb --inter 8xinfiniband-hdr"
    " --devices 8,16,32 --scaling both --batch-size 64",
    "scale-accumulation": "scale torchvision:resnet18 --on 1x4xrtx-3090 --devices 1,4"
    " --accumulation-steps 4 --sync-batch-norm --bucket-mb 10 --all-reduce ring --variation 0.05"
    " --layout nhwc",
    "scale-fsdp": "scale torchvision:resnet18 --on 2x4xt4 --inter ethernet-10g --devices 1,2,8"
    " --strategy fsdp",
    "scale-mirrored": "scale mnist-cnn --on 1x2xp100-pcie-16gb --devices 1,2 --strategy mirrored"
    " --batch-size 64",
    "scale-intra": "scale mnist-cnn --on t4 --devices 1:4 --intra pcie-4-x16 --scaling strong"
    " --batch-size 96",
    "scale-keras": "scale keras:cnn:depth=2,base_filters=32 --on 1x4xv100-sxm2-16gb --devices 1,2,4"
    " --strategy mirrored --batch-size 32 --optimizer adam --layout nhwc",
    "scale-servers": "scale torchvision:resnet18 --on t4 --inter ethernet-10g --workers 1,2,4,8"
    " --servers 2,4 --global-batch-size 128 --dataset cifar10 --epochs 28",
    "scale-servers-asynchronous": "scale mnist-cnn --on t4 --inter ethernet-10g --workers 1,4 --servers 1"
    " --asynchronous",
    "scale-servers-keras": "scale keras:cnn:depth=2,base_filters=32 --on t4 --inter ethernet-10g"
    " --workers 1,4 --servers 1 --asynchronous --batch-size 32 --optimizer adam --layout nhwc",
    "scale-coefficients": "scale resnet50 --coefficients optimus --asynchronous --workers 1,8,16"
    " --servers 2,4 --dataset cifar10 --epochs 28",
    "scale-fit": "scale --fit points.csv --devices 1,2,4,8,16,32",
    "scale-fit-servers": "scale --fit servers.csv --workers 2,16 --servers 2,4"
    " --speed-model optimus-synchronous",
    "scale-propose": "scale --propose 3 --workers 1:8 --servers 1:4",
    # plan
    "plan-ranges": "plan cnn:depth=2..3,base_filters=32 --on t4,l4 --batch-size 32:256 --dataset cifar10"
    " --epochs 30 --within 'cost<=1,memory<=4GB' --minimize time --points 4 --rejected 4 --price 0.5/h",
    "plan-prices": "plan mnist-cnn --on a100-80gb,l4,t4 --batch-size 64,256 --precision fp32"
    " --dataset mnist --epochs 50 --minimize cost --within 'time<=1h' --price-kind on-demand,spot"
    " --provider aws,google --points 3 --rejected 2",
    "plan-images": "plan torchvision:mobilenet_v3_small --on t4 --image-size 64,96 --layout nchw,nhwc"
    " --precision amp --batch-size 64 --dataset imagenet --price t4=0.35/h --validation-size 50000"
    " --points 4 --rejected 0",
    "plan-loader": "plan mnist-cnn --on t4,l4 --batch-size 64,512 --loader-ms 0.2 --workers 4 --cores 2"
    " --sample-kb 10 --storage-mb-s 200 --network-mb-s 100 --price 1/h --points 4 --rejected 0",
    "plan-energy": "plan mnist-cnn --on v100-sxm2-16gb,cpu --batch-size 32:1024:48 --precision fp32"
    " --dataset mnist --minimize co2 --co2 400 --power-limit 150 --price 1/h --points 3 --rejected 2",
    "plan-devices": "plan torchvision:resnet18 --on t4x4,t4,a100-sxm4-40gbx8 --batch-size 32,64"
    " --precision amp --dataset imagenet --epochs 10 --startup-s 60 --checkpoint-s 5 --price 1/h"
    " --points 4 --rejected 2",
    "plan-nobody": "plan cnn:depth=2,base_filters=32 --on t4 --batch-size 64,128 --dataset cifar10"
    " --within 'time<=1s' --price 1/h --points 2 --rejected 2",
    "plan-accuracies": "plan cnn:depth=2..3,base_filters=32 --on t4 --batch-size 64 --precision fp32"
    " --dataset cifar10 --accuracies accuracies.csv --within 'accuracy>=75%' --price 1/h --points 2"
    " --rejected 2",
    "plan-target": "plan cnn:depth=2,base_filters=32 --on t4,l4 --batch-size 64,256 --precision fp32"
    " --dataset cifar10 --target accuracy>=0.92 --curve run.csv --schedule constant --epochs 100"
    " --critical-batch-size 192 --curve-batch-size 64 --price 1/h --points 3 --rejected 2",
    "plan-history": "plan cnn:depth=2,base_filters=32 --on t4 --batch-size 64 --precision fp32"
    " --dataset cifar10 --target accuracy>=0.9 --history history --price 1/h --points 2",
    "plan-batches": "plan cnn:depth=2,base_filters=32 --on t4 --batch-size 64,256 --precision fp32"
    " --dataset cifar10 --target accuracy>=0.9 --batches epochs-by-batch.csv --price 1/h --points 2",
    "plan-transformers": "plan hf:gpt2.json --on l4 --batch-size 4,16 --precision amp-bf16"
    " --optimizer adamw --sequence-length 64 --dataset-size 10000 --compile --torch-version 2.4"
    " --price 1/h --points 2 --rejected 2",
    "plan-keras": "plan keras:cnn:depth=2,base_filters=32 --on t4,v100-sxm2-16gbx4 --batch-size 32,64"
    " --precision fp32 --optimizer adam --layout nhwc --dataset cifar10 --epochs 3 --price 1/h --points 4"
    " --rejected 2",
    "plan-job": "plan cnn:depth=2,base_filters=32 --on t4 --batch-size 64 --dataset cifar10 --epochs 3"
    " --price 1/h --format job",
    "report-job": "report answers/plan-ranges.json --format job",
    # forecast
    "forecast-alone": "forecast run.csv --target accuracy>=0.92 --epochs 60",
    "forecast-schedule": "forecast run.csv --target accuracy>=0.92 --schedule cosine:epochs=60",
    "forecast-history": "forecast run.csv --metric accuracy --history history",
    "forecast-cut": "forecast better.csv --cut 0.5 --target accuracy>=0.9",
    "forecast-devices": "forecast run.csv --target accuracy>=0.92 --epochs 50 --model cifar-resnet:8"
    " --dataset cifar10 --batch-size 128 --on t4 --on v100-sxm2-16gb --price 2/h",
    "forecast-batches": "forecast batches batches.csv --batch-size 4096 --dataset-size 50000",
    "forecast-networks": "forecast networks networks.csv --metric b0",
    "forecast-trade-off": "forecast trade-off trade-off.csv --target accuracy>=0.92",
    "forecast-evaluate": "forecast backtest stored",
    # schedule
    "schedule-points": "schedule jobs.csv --cluster 1x4xt4 --policy foresight,srtf",
    "schedule-models": "schedule models.yaml --cluster 2x4xv100-sxm2-16gb+1x2xt4 --inter ethernet-25g"
    " --policy optimus,sia --round 2min --seed 3",
    "schedule-trace": "schedule trace philly.csv --cluster 1x4xt4 --policy fifo,las",
    "schedule-unlike": "schedule jobs.csv --cluster 1x4xt4+1x2xl4+1x8xa100-sxm4-40gb --policy deadline,tetris,drf",
    "schedule-unlike-models": "schedule models.yaml --cluster 1x4xt4+1x4xl4 --inter ethernet-25g"
    " --policy foresight,pollux,normalised,equal --round 5min",
    # the rest
    "prices": "prices --on h100-sxm",
    "hardware-list": "hardware list",
    "hardware-show": "hardware show 'NVIDIA A100-SXM4-40GB'",
    "evaluate-timm": "evaluate timm.csv --on rtx-3090",
    "fit-linear": "fit grid.csv --model linear --on a100-sxm4-40gb --out linear.safetensors",
    "apply": "apply best.yaml --dry-run -- python train.py --data images --lr 0.1",
}


def _sweep() -> dict[str, Any]:
    return _axes(
        "torchvision:resnet18",
        devices=["t4", "a100-sxm4-40gb", "my-card.toml"],
        batch_sizes=[8, 64, 256],
        precisions=["fp32", "amp"],
    )


def _sweep_many() -> dict[str, Any]:
    return _axes("mnist-cnn", devices=["l4", "cpu"], batch_sizes=range(16, 656, 32), optimizer="adam")


def _sweep_keras() -> dict[str, Any]:
    return _axes(
        "keras:cnn:depth=2,base_filters=32",
        devices=["t4", "v100-sxm2-16gb", "cpu"],
        batch_sizes=[32, 64],
        optimizer="adam",
    )


def _axes(model: str, **options: Any) -> dict[str, Any]:
    import forerun

    return forerun.sweep(model, **options).as_dict()


def _trained_model() -> dict[str, Any]:
    import forerun

    result = forerun.fit_regressor(["grid.csv"], "linear", device="a100-sxm4-40gb")
    forerun.save_trained_model(result.model, "again.safetensors")
    model = forerun.load_trained_model("again.safetensors")
    config = {"depth": 3, "base_filters": 32, "batch_size": 64}
    return {
        "step_s": forerun.predict_step_time(model, config),
        "epoch_s": forerun.predict_time(model, {**config, "dataset_size": 50000}),
    }


def _time_estimator() -> dict[str, Any]:
    from types import SimpleNamespace

    import forerun

    estimate = forerun.time_estimator("mnist-cnn", dataset="mnist", epochs=3, batch_size=64)
    return {f"A100x{n}": estimate(SimpleNamespace(accelerators={"A100": n})) for n in (1, 4)}


def _module() -> dict[str, Any]:
    import torch

    import forerun

    layers = torch.nn.Flatten(), torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    found = forerun.predict(torch.nn.Sequential(*layers), device="t4", input_shape=(1, 28, 28), batch_size=16)
    return found.as_dict()


def _first_devices(answer: dict[str, Any]) -> dict[str, Any]:
    devices = answer["devices"]
    return {"devices": devices[:4], "names": [device["name"] for device in devices]}


def _first_devices_told(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "answer": _first_devices(answer["answer"])}


def _without_lists_of_libraries(answer: dict[str, Any]) -> dict[str, Any]:
    """Without the names of models of other libraries, which come with their versions."""
    own = {key: value for key, value in answer["answer"].items() if key not in ("torchvision", "timm")}
    return {**answer, "answer": own}


def _without_date(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["provenance"]["date"]
    return answer


def _without_version(answer: dict[str, Any]) -> dict[str, Any]:
    """Without the line that names the version and the day."""
    return {"lines": [line for line in answer["lines"] if "by forerun" not in line]}


def _first_of_each(answer: dict[str, Any]) -> dict[str, Any]:
    """The first rows of lists for plots and fronts, and how many there are."""
    for key in _LONG_LISTS & answer.keys():
        answer[key] = {"rows": answer[key][:3], "number": len(answer[key])}
    return answer


_LONG_LISTS = {"candidates", "front"}


def _without_this_machine(answer: dict[str, Any]) -> dict[str, Any]:
    """Without the name of the kept capture, the time of loading and the lines of other packages."""
    del answer["run"]["model"]
    own = [note for note in answer["notes"] if not re.search(r"capturing machine|, line \d", note)]
    return {**answer, "notes": own}


TRIMMED: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "hardware-list": _first_devices,
    "http-hardware": _first_devices_told,
    "http-models": _without_lists_of_libraries,
    "fit-linear": _without_date,
    "report-markdown": _without_version,
    **dict.fromkeys(token_models.SEARCHES, _first_of_each),
    **dict.fromkeys(training_scripts.COMMANDS, _without_this_machine),
}
"""What is kept of answers that no option of their command shortens, or that name the day on which they were asked."""

CALLS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "python-sweep": _sweep,
    "python-sweep-many": _sweep_many,
    "python-sweep-keras": _sweep_keras,
    "python-module": _module,
    "python-trained-model": _trained_model,
    "python-time-estimator": _time_estimator,
    **surfaces.CALLS,
}
