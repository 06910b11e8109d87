"""Trains SqueezeNet 1.1 on images: ``python -m studies.scenarios.training --data FOLDER``.

A training script as a user would write it, so that scenarios tune it as they tune any other. Source of the network:
Iandola et al. 2016, arXiv:1602.07360, version 1.1 of torchvision.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import UsageError

IMAGE_SIZE = 160
"""Default height and width of the task's images [pixels]."""

MODEL = "torchvision:squeezenet1_1"
"""The task's network, as predictions name it."""

# Mean and deviation of ImageNet, as the weights expect them.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--image-size", type=int, default=IMAGE_SIZE)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--weights", choices=("imagenet", "none"), default="imagenet")
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    parser.add_argument("--cosine", action="store_true")
    parser.add_argument("--cache", action="store_true", help="keep decoded and resized images in memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    """Trains, prints a line per epoch, and writes metrics, model and TensorBoard events to ``--out``."""
    import torch

    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test = (_loader(options, part, device.type) for part in ("seg_train", "seg_test"))
    classes = train.dataset.classes
    # Classes are numbered by their folders: another set would number them otherwise.
    if test.dataset.classes != classes:
        raise ValueError(f"expected the classes {', '.join(classes)} in seg_test, got {test.dataset.classes}")
    model = _model(options.weights, len(classes)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp == "fp16" and device.type == "cuda")
    schedule = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(train))
        if options.cosine
        else None
    )
    history = []
    for epoch in range(options.epochs):
        begin_s = time.perf_counter()
        row: dict[str, float] = {"epoch": epoch + 1}
        row.update(_epoch(torch, model, train, options, device, (optimizer, scaler, schedule)))
        row["train_s"] = time.perf_counter() - begin_s
        row.update(_epoch(torch, model, test, options, device, None))
        history.append(row)
        print(" ".join(f"{name}={value:.5g}" for name, value in row.items()), flush=True)
    if options.out is not None:
        _write(options.out, history)
        _save(options, model, classes)


def _model(weights: str, num_classes: int) -> Any:
    import torch
    from torchvision.models import SqueezeNet1_1_Weights, squeezenet1_1

    model = squeezenet1_1(weights=SqueezeNet1_1_Weights.IMAGENET1K_V1 if weights == "imagenet" else None)
    model.classifier[1] = torch.nn.Conv2d(512, num_classes, kernel_size=1)
    return model


def _loader(options: argparse.Namespace, part: str, device: str) -> Any:
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets.folder import ImageFolder, default_loader

    is_train = part == "seg_train"
    size = options.image_size
    steps = [transforms.Resize((size, size))]
    if is_train:
        steps.append(transforms.RandomHorizontalFlip())
    steps += [transforms.ToTensor(), transforms.Normalize(_MEAN, _DEVIATION)]
    read = functools.cache(functools.partial(_resized_image, size=size)) if options.cache else default_loader
    images = ImageFolder(str(part_folder(options.data, part)), transforms.Compose(steps), loader=read)
    return DataLoader(
        images,
        batch_size=options.batch_size,
        shuffle=is_train,
        num_workers=options.workers,
        pin_memory=device == "cuda" and options.workers > 0,
    )


def part_folder(data: Path, part: str) -> Path:
    """Folder of the classes of a part; Kaggle's archive has another of the same name around."""
    inner = data / part / part
    return inner if inner.is_dir() else data / part


def _resized_image(path: str, size: int) -> Any:
    """An image as it is kept in memory."""
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)


def _epoch(
    torch: Any, model: Any, loader: Any, options: argparse.Namespace, device: Any, training: Any
) -> dict[str, float]:
    """One pass over a part of the data; with an optimizer, a training pass."""
    name = "test" if training is None else "train"
    model.train(training is not None)
    right = seen = 0
    total = 0.0
    with torch.set_grad_enabled(training is not None):
        for batch in loader:
            images, labels = (part.to(device, non_blocking=True) for part in batch)
            dtype = torch.float16 if options.amp == "fp16" else torch.bfloat16
            with torch.autocast(device.type, dtype=dtype, enabled=options.amp != "off"):
                scores = model(images)
                loss = torch.nn.functional.cross_entropy(scores.float(), labels)
            if training is not None:
                _update(loss, *training)
            total += loss.item() * len(labels)
            right += int((scores.argmax(1) == labels).sum())
            seen += len(labels)
    return {f"{name}_loss": total / seen, f"{name}_acc": right / seen}


def _update(loss: Any, optimizer: Any, scaler: Any, schedule: Any) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if schedule is not None:
        schedule.step()


def _write(folder: Path, history: list[dict[str, float]]) -> None:
    """Writes a row per epoch as JSON and, with TensorBoard installed, as events."""
    folder.mkdir(parents=True, exist_ok=True)
    # JSON has no number for a loss that is not finite.
    plain = [
        {name: value if math.isfinite(value) else None for name, value in row.items()} for row in history
    ]
    (folder / "metrics.json").write_text(json.dumps(plain, indent=2, allow_nan=False), encoding="utf-8")
    # With this empty module TensorBoard does without TensorFlow, whose import takes seconds.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("note: tensorboard is not installed, no events are written", file=sys.stderr)
        return
    for earlier in (folder / "events").glob("events.out.tfevents.*"):
        earlier.unlink()  # a viewer would draw the curves of two runs as one
    with SummaryWriter(str(folder / "events")) as writer:
        for row in history:
            for name in ("train_loss", "train_acc", "test_loss", "test_acc", "train_s"):
                writer.add_scalar(name, row[name], int(row["epoch"]))


def _save(options: argparse.Namespace, model: Any, classes: list[str]) -> None:
    from safetensors.torch import save_file

    weights = {name: value.contiguous().cpu() for name, value in model.state_dict().items()}
    about = {"classes": json.dumps(classes), "image_size": str(options.image_size)}
    save_file(weights, options.out / "model.safetensors", metadata=about)


_NOISE = 22.0
_QUALITY = 88
_TEST_SHARE = 6  # training images per test image

# Colours of the upper and the lower part, and the waves over the width and the height. Neighbours share a colour or a
# texture, so neither alone identifies a class; a mirrored image keeps its class.
_LOOKS = {
    "buildings": ((150, 165, 185), (125, 120, 115), 7, 5),
    "forest": ((95, 125, 90), (80, 105, 70), 10, 0),
    "glacier": ((165, 185, 205), (185, 200, 210), 2, 3),
    "mountain": ((155, 175, 200), (110, 115, 100), 3, 0),
    "sea": ((160, 180, 205), (85, 115, 140), 0, 9),
    "street": ((145, 150, 160), (105, 105, 105), 4, 0),
}
CLASSES = tuple(_LOOKS)


def generate_images(
    folder: Path, *, num_images: int, size: tuple[int, int] = (150, 150), seed: int = 0
) -> None:
    """Writes JPEGs to ``seg_train`` and, a sixth as many, to ``seg_test``, evenly over six classes.

    Each picture has its class's colours above and below a horizon and its waves, in random place, phase, strength and
    brightness, under noise. The pictures need the time and memory of photographs, but are easier to learn.

    Args:
        folder: Folder for the images, which must not hold any yet.
        num_images: Number of training images, six or more.
        size: Width and height of an image, 150 for Intel's [pixels].
        seed: Seed of the random pictures.

    Raises:
        UsageError: The folder has images, or there are fewer images than classes.
    """
    if num_images < len(CLASSES):
        raise UsageError(f"expected {len(CLASSES)} images or more, one per class, got {num_images}")
    if any((folder / part).exists() for part in ("seg_train", "seg_test")):
        raise UsageError(
            f"expected no images in '{folder}' yet, got seg_train or seg_test; give another folder"
        )
    from PIL import Image

    numbers = np.random.default_rng(seed)
    num_test = max(len(CLASSES), num_images // _TEST_SHARE)
    for part, count in (("seg_train", num_images), ("seg_test", num_test)):
        for index in range(count):
            name = CLASSES[index % len(CLASSES)]
            path = folder / part / name / f"{index:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(_picture(numbers, name, size)).save(path, quality=_QUALITY)


def _picture(numbers: np.random.Generator, name: str, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """One picture of a class as an array, (height, width, 3)."""
    width, height = size
    upper, lower, across, down = _LOOKS[name]
    y, x = (grid[..., None] for grid in np.mgrid[0:height, 0:width] / max(width, height))
    picture = np.where(y < numbers.uniform(0.3, 0.6), np.array(upper, float), np.array(lower, float))
    for position, waves in ((x, across), (y, down)):
        if waves:
            phase, stretch = numbers.uniform(0, 2 * np.pi), numbers.normal(1.0, 0.1)
            picture = picture + numbers.uniform(15, 45) * np.sin(
                2 * np.pi * waves * stretch * position + phase
            )
    picture = picture * numbers.uniform(0.7, 1.2) + numbers.normal(0, _NOISE, (height, width, 3))
    return np.clip(picture, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    main(_arguments())
