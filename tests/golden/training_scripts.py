"""Training scripts whose steps are captured: a plain loop, a loader, two optimizers, micro-steps and a Trainer."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COMMANDS", "SCRIPTS"]

PLAIN = """
import torch
from torch import nn

network = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
for step in range(100):
    images = torch.randn(64, 1, 28, 28, device="cuda")
    loss = nn.functional.cross_entropy(network(images), torch.randint(0, 10, (64,), device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

LOADER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
network = nn.Sequential(*layers, nn.Linear(16, 10)).cuda()
optimizer = torch.optim.Adam(network.parameters())
data = TensorDataset(torch.zeros(640, 3, 32, 32), torch.zeros(640, dtype=torch.long))
for epoch in range(4):
    for images, labels in DataLoader(data, batch_size=32, shuffle=True):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(images.cuda()), labels.cuda()).backward()
        optimizer.step()
"""

ADVERSARIES = """
import torch
from torch import nn

judge, maker = nn.Linear(64, 1).cuda(), nn.Linear(16, 64).cuda()
first, second = torch.optim.Adam(judge.parameters()), torch.optim.RMSprop(maker.parameters())
for step in range(50):
    made = maker(torch.randn(32, 16, device="cuda"))
    for loss, optimizer in ((-judge(made.detach()).mean(), first), (judge(made).mean(), second)):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""

MICRO_STEPS = """
import torch
from torch import nn

network = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.AdamW(network.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(40):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = network(torch.randn(16, 256, device="cuda")).square().mean() / 4
    scaler.scale(loss).backward()
    if step % 4 == 3:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

network = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=500))
tokens = torch.arange(32)
data = [{"input_ids": tokens, "labels": tokens}] * 256
arguments = TrainingArguments("out", per_device_train_batch_size=8, num_train_epochs=2, bf16=True, report_to=[])
Trainer(model=network, args=arguments, train_dataset=data).train()
"""

SCRIPTS: Mapping[str, str] = {
    "plain.py": PLAIN,
    "loader.py": LOADER,
    "adversaries.py": ADVERSARIES,
    "micro_steps.py": MICRO_STEPS,
    "trainer.py": TRAINER,
}

# The time of loading a sample is given: measured, it would be that of this machine.
COMMANDS: Mapping[str, str] = {
    "capture-plain": "predict --on t4 -- python plain.py",
    "capture-loader": "predict --on a100-sxm4-40gb --loader-ms 0.1 --price 1/h -- python loader.py",
    "capture-adversaries": "predict --on v100-sxm2-16gb -- python adversaries.py",
    "capture-micro-steps": "predict --on 4xl4 -- python micro_steps.py",
    "capture-trainer": "predict --on h100-sxm --loader-ms 0.01 -- python trainer.py",
}
