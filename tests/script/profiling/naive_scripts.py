"""Training scripts as users write them, and images for them; shared by the tests and the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

NAIVE_SCRIPT = '''
"""Written without thought: batch 8, no workers, single precision, JPEGs decoded in the main process."""
import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--img-size", type=int, default=64)
args = parser.parse_args()
torch.manual_seed(0)


def folder(part):
    steps = [transforms.Resize((args.img_size, args.img_size)), transforms.ToTensor()]
    return datasets.ImageFolder(f"{args.data}/{part}", transforms.Compose(steps))


train = DataLoader(folder("seg_train"), batch_size=args.batch_size, shuffle=True)
test = DataLoader(folder("seg_test"), batch_size=args.batch_size)
def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU())


layers = block(3, 16), block(16, 32), block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 6)
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
loss_of = nn.CrossEntropyLoss()
for epoch in range(args.epochs):
    begin = time.perf_counter()
    model.train()
    for images, labels in train:
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test:
            right += (model(images).argmax(1) == labels).sum().item()
    print(f"epoch {epoch + 1} loss={loss.item():.4f} val_acc={right / len(test.dataset):.4f}", flush=True)
'''

CLASSES = ("buildings", "forest", "glacier", "mountain", "sea", "street")


def make_image_folder(
    root: Path, *, num_train: int, num_test: int, size: tuple[int, int] = (160, 120), seed: int = 0
) -> Path:
    """JPEGs in the layout of Intel's images: six classes that differ in texture and colour, under noise."""
    numbers = np.random.default_rng(seed)
    for part, count in (("seg_train", num_train), ("seg_test", num_test)):
        for index in range(count):
            label = index % len(CLASSES)
            path = root / part / CLASSES[label] / f"{index:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(_picture(numbers, label, size)).save(path, quality=88)
    return root


def naive_study(
    folder: Path, *, num_train: int = 1500, num_test: int = 300, size: tuple[int, int] = (160, 120)
) -> tuple[Path, tuple[str, ...]]:
    """The script and its images in a folder, made once; the script's file and its command."""
    script = folder / "train.py"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_image_folder(folder / "data", num_train=num_train, num_test=num_test, size=size)
        script.write_text(NAIVE_SCRIPT.lstrip(), encoding="utf-8")
    return script, (sys.executable, str(script), "--data", str(folder / "data"))


def _picture(numbers: np.random.Generator, label: int, size: tuple[int, int]) -> np.ndarray:
    """Stripes whose direction and width are the class, in random phase and colour, under noise."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width] / height
    angle = np.pi * (label % 3) / 3 + numbers.normal(0, 0.1)
    waves = (3 if label < 3 else 7) * (1 + numbers.normal(0, 0.08))
    wave = np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)) + numbers.uniform(0, 6.3))
    colour = numbers.uniform(0.4, 1.0, 3)
    picture = 128 + 70 * wave[..., None] * colour + numbers.normal(0, 25, (height, width, 3))
    return np.clip(picture, 0, 255).astype(np.uint8)
