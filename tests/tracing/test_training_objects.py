"""Models as people have them: modules with batches of any structure, LightningModules, Trainers and Keras models."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import forerun
from forerun.base.errors import InvalidSetupError
from forerun.tracing.models.training_objects import WithBatch, as_module


class Recommender(nn.Module):
    """Dense and categorical features in one nested batch."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16) for _ in range(2))
        self.top = nn.Linear(13 + 32, 1)

    def forward(self, batch):
        found = [table(ids) for table, ids in zip(self.tables, batch["sparse"], strict=True)]
        return self.top(torch.cat([batch["dense"], *found], dim=1))


def nested(size):
    return {"dense": torch.randn(size, 13), "sparse": [torch.randint(1000, (size, 5)) for _ in range(2)]}


def test_a_nested_batch_is_one_argument_and_says_the_batch_size():
    found = forerun.predict(Recommender(), device="l4", inputs=nested(64), optimizer="adam")
    assert found.batch_size_per_device == 64
    assert found.model == "Recommender"
    other = forerun.predict(Recommender(), device="l4", inputs=nested(8), batch_size=64, optimizer="adam")
    assert other.step_time_s == found.step_time_s


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, pair, scale=1.0):
        return scale * (self.layer(pair.left) - self.layer(pair.right))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, values, mask):
        return self.layer(values) * mask


def test_batches_are_given_by_name_by_position_and_as_a_named_tuple():
    values, mask = torch.randn(16, 8), torch.ones(16, 1)
    answers = [
        forerun.predict(Named(), device="l4", inputs=given).num_parameters
        for given in ({"values": values, "mask": mask}, (values, mask), [values, mask])
    ]
    assert answers == [36, 36, 36]
    assert forerun.predict(Siamese(), device="l4", inputs=Pair(values, values)).batch_size_per_device == 16


def test_the_first_batch_of_a_loader_counts():
    data = torch.utils.data.TensorDataset(torch.randn(40, 8), torch.ones(40, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=20)
    assert forerun.predict(Named(), device="l4", inputs=loader).batch_size_per_device == 20


def test_inputs_without_a_module_are_refused():
    with pytest.raises(InvalidSetupError, match="inputs belong to a module; give input_shape"):
        forerun.predict("torchvision:resnet18", device="l4", inputs=torch.randn(2, 3, 224, 224))
    with pytest.raises(InvalidSetupError, match="inputs belong to a module of PyTorch, got a float"):
        as_module(1.0, torch.randn(2, 3), {})


def test_a_lightning_module_is_predicted_with_its_own_training_step():
    lightning = pytest.importorskip("lightning", reason="lightning is in the group dev")

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = nn.Linear(8, 2)

        def training_step(self, batch, batch_idx):
            values, labels = batch
            loss = nn.functional.cross_entropy(self.network(values), labels)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return {"optimizer": torch.optim.AdamW(self.parameters())}

    batch = [torch.randn(32, 8), torch.randint(2, (32,))]
    found = forerun.predict(Net(), device="l4", inputs=batch)
    assert (found.optimizer, found.batch_size_per_device, found.model) == ("adamw", 32, "Net")
    assert not any("no loss" in note for note in found.notes)  # its step returns the loss
    assert forerun.predict(Net(), device="l4", inputs=batch, optimizer="sgd").optimizer == "sgd"
    with pytest.raises(InvalidSetupError, match="give inputs=next"):
        forerun.predict(Net(), device="l4")


def test_a_trainer_says_its_settings(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra hf")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=128, n_positions=32)
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(48)]
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_train_epochs=3, use_cpu=True, report_to=[],
        ),
        train_dataset=rows,
    )  # fmt: skip
    found = forerun.predict(trainer, device="l4")
    assert (found.batch_size_per_device, found.optimizer, found.num_steps) == (4, "adamw", 18)
    assert found.tokens_per_s is not None


def test_a_module_with_its_batch_is_called_like_the_module():
    assert WithBatch(Named(), None)(torch.randn(2, 8), torch.ones(2, 1)).shape == (2, 4)
