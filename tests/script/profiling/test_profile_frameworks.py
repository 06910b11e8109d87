"""Training loops that are not the script's own: torchrun, Lightning, the Trainer of Hugging Face."""

import json
import sys
from pathlib import Path

import pytest
from command_line_of_tests import run_here

# Time spent in the dataset is counted by itself: with no workers the loader's wait is this and little more.
DATA = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    spent = []
    def __len__(self): return 48
    def __getitem__(self, index):
        begin = time.monotonic()
        time.sleep(0.005)
        self.spent.append(time.monotonic() - begin)
        return self.item(index)
    def item(self, index): return torch.ones(4), index % 2
"""

TORCHRUN = (
    DATA
    + """
import torch.distributed as dist
from torch.utils.data import DistributedSampler
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = Slow()
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
for epoch in range(2):
    for images, labels in loader:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
if dist.get_rank() == 0:
    print("SPENT", sum(data.spent) / len(data.spent))
dist.destroy_process_group()
"""
)

LIGHTNING = (
    DATA
    + """
import lightning.pytorch as lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, index):
        self.log("val_loss", self.training_step(batch, index))
    def on_train_batch_end(self, outputs, batch, index): time.sleep(0.02)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
data = Slow()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", accumulate_grad_batches=3, **quiet)
trainer.fit(Module(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(Slow(), batch_size=8))
print("SPENT", sum(data.spent) / len(data.spent))
"""
)

TRAINER = (
    DATA
    + """
import tempfile
from transformers import Trainer, TrainerCallback, TrainingArguments
class Named(Slow):
    def item(self, index): return {"pixels": torch.ones(4), "labels": index % 2}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, pixels, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layer(pixels), labels)}
class Sleep(TrainerCallback):
    def on_step_end(self, *args, **kwargs): time.sleep(0.02)
data = Named()
with tempfile.TemporaryDirectory() as folder:
    quiet = dict(report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True)
    sizes = dict(per_device_train_batch_size=4, num_train_epochs=2)
    options = TrainingArguments(folder, optim="sgd", use_cpu=True, **sizes, **quiet)
    Trainer(Model(), options, train_dataset=data, callbacks=[Sleep()]).train()
print("SPENT", sum(data.spent) / len(data.spent))
"""
)


def profiled(tmp_path: Path, text: str, *launcher: str, options: tuple[str, ...] = ("--window", "0")) -> dict:
    path = tmp_path / "train.py"
    path.write_text(text)
    done = run_here("profile", "--json", *options, "--", sys.executable, *launcher, str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "stderr": done.stderr}


def check(answer: dict, *, num_steps: int, samples_per_step: int, by_hand_s: float) -> None:
    """What holds for any loop that sleeps 20 ms a step beside its loader."""
    assert answer["outcome"] == "done"
    assert answer["num_steps"] == num_steps
    assert answer["batch_size"] == samples_per_step
    assert answer["loader_wait_s"] == pytest.approx(by_hand_s, rel=0.15)
    assert answer["loader"]["num_workers"] == 0
    assert answer["optimizer"]["name"] == "SGD"
    assert sum(answer["phases_s"].values()) == pytest.approx(answer["wall_s"], rel=0.03)
    parts = answer["parts"]
    assert parts["input_wait_s"] == pytest.approx(answer["loader_wait_s"])
    assert parts["kernels_s"] + parts["host_s"] > 0.02
    assert sum(parts[name] for name in parts if name != "step_s") == pytest.approx(answer["step_time_s"])


def sample_s(answer: dict) -> float:
    return float(answer["stderr"].split("SPENT")[1].split()[0])


TORCH_RUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def test_torchrun_has_the_parts_of_one_rank_and_the_speed_of_all(tmp_path):
    answer = profiled(tmp_path, TORCHRUN, *TORCH_RUN, "2")
    check(answer, num_steps=12, samples_per_step=4, by_hand_s=4 * sample_s(answer))
    assert answer["num_ranks"] == 2
    assert answer["steps_per_epoch"] == 6
    assert answer["throughput_samples_per_s"] == pytest.approx(8 / answer["step_time_s"])
    assert "2 processes train; parts are those of rank 0" in answer["notes"]


def test_torchrun_is_stopped_after_the_steps_asked_for(tmp_path):
    # torchrun ends with a failure of its own when a rank is stopped, also when it is the only one.
    text = TORCHRUN.replace("range(2)", "range(100)")
    answer = profiled(tmp_path, text, *TORCH_RUN, "1", options=("--steps", "8"))
    assert answer["outcome"] == "stopped"
    assert answer["num_steps"] == 8
    assert answer["has_window"]


def test_lightning_counts_optimizer_steps_and_not_validation(tmp_path):
    pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
    answer = profiled(tmp_path, LIGHTNING)
    # Three batches are accumulated to a step.
    check(answer, num_steps=8, samples_per_step=12, by_hand_s=12 * sample_s(answer))
    assert answer["steps_per_epoch"] == 4
    # Validation waits for 48 samples of 5 ms an epoch, and belongs to no step.
    assert answer["phases_s"]["between"] > 0.4


def test_the_trainer_of_hugging_face_asks_for_its_batches_ahead(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed, which the Trainer needs")
    answer = profiled(tmp_path, TRAINER)
    check(answer, num_steps=24, samples_per_step=4, by_hand_s=4 * sample_s(answer))
    assert answer["steps_per_epoch"] == 12
