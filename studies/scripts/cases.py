"""Public training scripts, as they are, with the hand-written specification of the same step where there is one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NETWORKS = Path(__file__).parent / "networks.py"
_OWN = Path(__file__).parent / "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Facts that a person reads off a script and its arguments before it is captured; a capture is right if all are.

    Attributes:
        precision: Precision of products.
        convolutions: That of convolutions in fp32, on a device with TF32; empty where there are none.
        compile, averages: Whether it compiles, and keeps a moving average of its weights.
        steps_per_epoch, epochs: Of the job; None if it has no epochs.
        max_steps: Steps of a job without epochs.
        validation, checkpoints: How often, in words such as "every epoch", "every 500 steps"; empty for never.
    """

    precision: str = "fp32"
    convolutions: str = "tf32"
    compile: bool = False
    averages: bool = False
    steps_per_epoch: int | None = None
    epochs: int | None = None
    max_steps: int | None = None
    validation: str = ""
    checkpoints: str = ""


def _epochs(
    steps_per_epoch: int, epochs: int, validation: str = "", checkpoints: str = "", **more: Any
) -> Truth:
    return Truth(
        steps_per_epoch=steps_per_epoch, epochs=epochs, validation=validation, checkpoints=checkpoints, **more
    )


_HALF: Mapping[str, Any] = {"precision": "amp-bf16", "convolutions": ""}
_GPT: Mapping[str, Any] = {**_HALF, "compile": True}
_EPOCH, _SAVES = "every epoch", "every 500 steps"  # the default of Hugging Face's trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script.

    Attributes:
        name: Name in the table.
        command: Its command.
        folder: Folder it runs in.
        batch_size: Samples of one micro-step, as its arguments say.
        num_micro_steps: Micro-steps of a step.
        num_optimizers: Optimizers that update in a step.
        truth: The rest of what is read off the script.
        model: Hand-written specification; empty where the step cannot be expressed.
        settings: Settings of that specification.
        refused: Words of the reason, if the script must be refused.
        device: Device the predictions are for.
        measured_step_s: Step that its authors measured on that device, if known [s].
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    batch_size: int
    num_micro_steps: int = 1
    num_optimizers: int = 1
    truth: Truth = field(default_factory=Truth)
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    device: str = "a100-sxm4-40gb"
    measured_step_s: float | None = None


def cases(scripts: Path, data: Path, packages: Path | None = None) -> list[Case]:
    """All scripts of the study.

    Args:
        scripts: Folder with the public scripts.
        packages: Folder with unpacked source distributions; without it, scripts out of them are left out.
        data: Folder with the generated data.
    """
    examples, work = scripts / "pytorch-examples", data / "work"

    def case(
        name: str,
        script: Path | str,
        *words: str,
        folder: Path = work,
        launcher: tuple[str, ...] = (),
        **more: Any,
    ) -> Case:
        start = ("-m", script) if isinstance(script, str) else (str(script),)
        return Case(
            name=name, command=(*(launcher or (sys.executable,)), *start, *words), folder=folder, **more
        )

    nano, vision = scripts / "nanoGPT", scripts / "vision" / "references"
    unpacked = packages or Path()
    opacus, ignite = unpacked / "opacus-1.6.0/examples", unpacked / "pytorch_ignite-0.5.5/examples"
    preferences = (
        "--model_name_or_path", str(data / "tiny-llama"), "--dataset_name", str(data / "preferences"), "--output_dir", "out",
        "--per_device_train_batch_size", "4", "--max_length", "128",
    )  # fmt: skip
    peft = (
        "--model_name_or_path", str(data / "tiny-llama"), "--dataset_name", str(data / "chat"), "--splits", "train,test",
        "--dataset_text_field", "text", "--output_dir", "out", "--max_length", "256", "--loss_type", "nll",
    )  # fmt: skip
    found = [
        case("pytorch/examples mnist", examples / "mnist/main.py", truth=_epochs(94, 14, _EPOCH), batch_size=64,
             model=f"{_NETWORKS}:mnist", settings={"optimizer": "adadelta"}),
        case("pytorch/examples imagenet, resnet18", examples / "imagenet/main.py", "--dummy", "-a", "resnet18", "-b", "128",
             truth=_epochs(10010, 90, _EPOCH, _EPOCH), batch_size=128, model="torchvision:resnet18", settings={"optimizer": "sgd"}),
        case("pytorch/examples dcgan", examples / "dcgan/main.py", "--dataset", "fake", "--accel", truth=_epochs(16, 25, "", _EPOCH), batch_size=64, num_optimizers=2),
        case("pytorch/examples vae", examples / "vae/main.py", truth=_epochs(47, 10, _EPOCH), batch_size=128,
             model=f"{_NETWORKS}:vae", settings={"optimizer": "adam"}),
        case("pytorch/examples mnist_rnn", examples / "mnist_rnn/main.py", "--accel", truth=_epochs(94, 14, _EPOCH), batch_size=64,
             model=f"{_NETWORKS}:mnist_rnn", settings={"optimizer": "adadelta"}),
        case("pytorch/examples siamese_network", examples / "siamese_network/main.py", truth=_epochs(94, 14, _EPOCH), batch_size=64),
        case("pytorch/examples word_language_model", examples / "word_language_model/main.py", "--accel", "--data",
             str(data / "wikitext-2"), truth=_epochs(120, 40, _EPOCH, _EPOCH), batch_size=20, num_optimizers=0),
        case("nanoGPT bench.py, GPT-2 124M", nano / "bench.py", "--real_data=False", folder=nano, truth=Truth(max_steps=30, **_GPT), batch_size=12,
             model=f"{_NETWORKS}:gpt", settings={"precision": "amp-bf16", "optimizer": "adamw", "optimizer_implementation": "fused",
                                    "compile": True}),
        case("nanoGPT train.py, 4 micro-steps", nano / "train.py", f"--dataset={data / 'tokens'}", "--batch_size=12",
             "--gradient_accumulation_steps=4", "--eval_iters=1", folder=nano, batch_size=12, num_micro_steps=4,
             truth=Truth(max_steps=600_001, validation="every 2,000 steps", checkpoints="every 2,000 steps", **_GPT),
             model=f"{_NETWORKS}:gpt", settings={"precision": "amp-bf16", "optimizer": "adamw", "optimizer_implementation": "fused",
                                    "compile": True, "accumulation": 4}),
        case("timm train.py, resnet50", scripts / "timm/train.py", "--data-dir", str(data / "images"), "--model", "resnet50",
             "-b", "64", "--amp", "--opt", "sgd", "--num-classes", "2", truth=_epochs(8, 300, _EPOCH, _EPOCH, precision="amp", convolutions=""), batch_size=64,
             model="timm:resnet50", settings={"precision": "amp", "optimizer": "nesterov"}),
        case("torchvision classification, resnet50", vision / "classification/train.py", "--data-path", str(data / "images"),
             "--model", "resnet50", "-b", "32", truth=_epochs(16, 90, _EPOCH, _EPOCH), batch_size=32, model="torchvision:resnet50", settings={"optimizer": "sgd"}),
        case("trl sft", "trl.scripts.sft", "--model_name_or_path", str(data / "tiny-llama"), "--dataset_name",
             str(data / "chat"), "--output_dir", "out", "--per_device_train_batch_size", "4",
             "--gradient_accumulation_steps", "2", "--max_length", "256", "--loss_type", "nll", truth=_epochs(64, 3, "", _SAVES, **_HALF), batch_size=4, num_micro_steps=2),
        case("peft sft/train.py, Llama LoRA", scripts / "peft/train.py", *peft, "--use_peft_lora", "True", "--lora_r", "8",
             "--per_device_train_batch_size", "4", "--bf16", "True", truth=_epochs(128, 3, "", _SAVES, **_HALF), batch_size=4),
        Case(name="yolo train", command=(str(Path(sys.executable).with_name("yolo")), "train", "model=yolov8n.yaml",
             f"data={data / 'boxes' / 'boxes.yaml'}", "imgsz=320", "batch=16", "epochs=3", "workers=4"), folder=work,
             batch_size=16, refused="values"),
        case("Lightning, resnet18", _OWN / "lightning_resnet.py", truth=_epochs(8, 3, **_HALF), batch_size=32, model="torchvision:resnet18",
             settings={"optimizer": "sgd", "precision": "amp-bf16"}),
        case("accelerate, two micro-steps", _OWN / "accelerate_mlp.py", truth=_epochs(16, 3), batch_size=64, num_micro_steps=2,
             model="mlp", settings={"optimizer": "adamw", "accumulation": 2}),
        case("Keras on torch", _OWN / "keras_cnn.py", truth=_epochs(32, 3), batch_size=64),
        case("DDP tutorial, torchrun on 8", examples / "distributed/ddp-tutorial-series/multigpu_torchrun.py", "50", "10",
             truth=_epochs(8, 50, "", "every 10 epochs"), batch_size=32, launcher=("torchrun", "--standalone", "--nproc_per_node=8")),
        case("DDP tutorial, one GPU", examples / "distributed/ddp-tutorial-series/single_gpu.py", "20", "5", batch_size=32,
             truth=_epochs(64, 20, "", "every 5 epochs")),
        case("nanoGPT train.py, Shakespeare", nano / "train.py", "config/train_shakespeare_char.py", f"--dataset={data / 'tokens'}",
             "--eval_iters=1", folder=nano, batch_size=64,
             truth=Truth(max_steps=5_001, validation="every 250 steps", checkpoints="every 250 steps", **_GPT)),
        case("trl dpo, 4 micro-steps", "trl.scripts.dpo", *preferences, "--gradient_accumulation_steps", "4", "--num_train_epochs",
             "2", batch_size=4, num_micro_steps=4, truth=_epochs(32, 2, "", _SAVES, **_HALF)),
        case("trl reward", "trl.scripts.reward", *preferences, "--eval_strategy", "steps", "--eval_steps", "50", "--save_strategy",
             "epoch", "--num_train_epochs", "1", batch_size=4, truth=_epochs(128, 1, "every 50 steps", _EPOCH, **_HALF)),
        case("opacus mnist, no privacy", opacus / "mnist.py", "--disable-dp", "--data-root", str(data / "mnist"),
             batch_size=64, truth=_epochs(94, 10, "at the end", "at the end")),
        case("opacus dcgan, no privacy", opacus / "dcgan.py", "--disable-dp", "--data-root", str(data / "mnist"),
             batch_size=64, num_optimizers=2, truth=_epochs(10, 25, "", _EPOCH)),
        case("ignite mnist", ignite / "mnist/mnist.py", folder=data / "mnist", batch_size=64,
             truth=_epochs(94, 10, _EPOCH)),
        case("ignite mnist, saved", ignite / "mnist/mnist_save_resume_engine.py", "--log_dir=out",
             folder=data / "mnist", batch_size=64, truth=_epochs(94, 10, _EPOCH, _EPOCH)),
        case("ignite dcgan", ignite / "gan/dcgan.py", "--dataset", "fake", "--dataroot", ".",
             "--output-dir", "out-gan", batch_size=64, num_optimizers=2, truth=_epochs(4, 25, "", _EPOCH)),
        case("torchvision detection", vision / "detection/train.py", "--data-path", str(data), batch_size=2,
             refused="torch._six"),
        *[
            case(f"modded-nanogpt {name}", scripts / "modded-nanogpt" / name / "train_gpt2.py", batch_size=size,
                 truth=Truth(max_steps=steps, validation="every 125 steps", checkpoints="at the end", compile=True, convolutions="",
                             precision="bf16" if number == 4 else "amp-bf16"),
                 num_optimizers=number, num_micro_steps=micro, device="h100-sxm", measured_step_s=measured, folder=data / "modded",
                 launcher=("torchrun", "--standalone", "--nproc_per_node=8"))
            for name, size, micro, number, steps, measured in (
                ("2024-10-09_SOAP", 64, 1, 2, 6000, 0.36334), ("2024-10-10_Muon", 64, 1, 2, 6200, 0.21633),
                ("2024-10-14_ModernArch", 64, 1, 2, 5100, 0.17889), ("2024-12-04_ValueEmbed", 65536, 1, 4, 1530, 0.17408),
            )
        ],
    ]  # fmt: skip
    return [one for one in found if packages is not None or not one.name.startswith(("opacus", "ignite"))]
