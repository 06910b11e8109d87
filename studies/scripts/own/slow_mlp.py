"""A small training script with the fault that its argument names."""

import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

FAULT = sys.argv[1]
DTYPE = torch.float64 if FAULT == "float64" else torch.float32
WIDTH = 1024 if FAULT in ("float64", "thread") else 64


class Samples(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if FAULT == "loader sleeps":
            time.sleep(0.002)
        if FAULT == "preprocess in Python":
            sum((index * k) % 97 / 97 for k in range(20_000))
        return torch.zeros(WIDTH, dtype=DTYPE), index % 10


torch.set_num_threads(1)
model: Any = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10)
).to(DTYPE)
if FAULT == "compile":
    model = torch.compile(model, dynamic=False, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, (images, labels) in enumerate(DataLoader(Samples(), batch_size=128 if WIDTH > 64 else 32)):
    if FAULT == "compile":
        images, labels = images[: 32 - number], labels[: 32 - number]
    out = model(images)
    if FAULT == "item of each sample":
        hits = sum(float(out[k % len(out), 0].item()) for k in range(2000))
    if FAULT == "host":
        digits = sum(k % 7 for k in range(1_000_000))
    torch.nn.functional.cross_entropy(out, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
