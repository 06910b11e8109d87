"""Hand-written specifications of the examples' networks, as a user would write them for ``forerun predict``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses


def mnist() -> dict[str, Any]:
    """The network of pytorch/examples mnist."""
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    )  # fmt: skip
    return {
        "module": network,
        "input_shape": (1, 28, 28),
        "target": torch.zeros(4, dtype=torch.long),
        "loss": F.nll_loss,
    }


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(28, 64, batch_first=True)
        self.batchnorm = nn.BatchNorm1d(64)
        self.dropout1, self.dropout2 = nn.Dropout2d(0.25), nn.Dropout2d(0.5)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output, _ = self.rnn(images.reshape(-1, 28, 28))
        x = F.relu(self.fc1(self.dropout1(self.batchnorm(output[:, -1, :]))))
        return F.log_softmax(self.fc2(self.dropout2(x)), 1)


def mnist_rnn() -> dict[str, Any]:
    """The network of pytorch/examples mnist_rnn."""
    return {
        "module": _Recurrent(),
        "input_shape": (1, 28, 28),
        "target": torch.zeros(4, dtype=torch.long),
        "loss": F.nll_loss,
    }


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.view(-1, 784)
        hidden = F.relu(self.fc1(x))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        deviation = torch.exp(0.5 * log_variance)
        code = mean + torch.randn_like(deviation) * deviation
        output = torch.sigmoid(self.fc4(F.relu(self.fc3(code))))
        likelihood = F.binary_cross_entropy(output, x, reduction="sum")
        return likelihood - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


def vae() -> dict[str, Any]:
    """The network of pytorch/examples vae, with its loss."""
    return {"module": _Vae(), "input_shape": (1, 28, 28), "loss": lambda loss: loss}


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attend, self.project = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.widen, self.narrow = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.attend(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).contiguous().view(batch, length, width))
        widened: torch.Tensor = self.narrow(F.gelu(self.widen(self.norm2(x))))
        return x + widened


class _Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50304, 768), nn.Embedding(1024, 768)
        self.blocks = nn.Sequential(*(_Block(768, 12) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(768, bias=False), nn.Linear(768, 50304, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.view(-1))
        self.logits = (
            logits  # the script's variable holds them until the forward pass of the next step is over
        )
        return loss


def gpt() -> dict[str, Any]:
    """GPT-2 124M as nanoGPT has it, without biases, with its loss."""
    return {
        "module": _Gpt(),
        "example_batch": torch.zeros((2, 1024), dtype=torch.long),
        "loss": lambda loss: loss,
    }
