"""Checkpoints of captured scripts: saved, loaded wherever the script wants them, and gone with the capture."""

import sys

import torch

from forerun.script.capture_script import capture

SCRIPT = """
import torch, safetensors.torch
import torch.distributed.checkpoint as dcp

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())

def step():
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "on_host": torch.arange(3)}
torch.save(state, "last.pt")
places = ["cuda", torch.device("cuda:0"), {"cuda:0": "cuda:0"}, lambda storage, place: storage.cuda(), None]
for place in places:
    found = torch.load("last.pt", map_location=place)
    assert found["model"]["weight"].device.type == "cuda", place
    assert found["epoch"] == 3
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
on_host = torch.load("last.pt", map_location="cpu", weights_only=True)
assert on_host["model"]["weight"].device.type == "cpu"
assert on_host["on_host"].tolist() == [0, 1, 2]
assert torch.load("earlier.pt", map_location="cuda")["bias"].is_cuda

safetensors.torch.save_file(model.state_dict(), "model.safetensors")
model.load_state_dict(safetensors.torch.load_file("model.safetensors", device="cuda"))
dcp.save({"model": model.state_dict(), "epoch": 5}, checkpoint_id="sharded")
resumed = {"model": model.state_dict(), "epoch": 0}
dcp.load(resumed, checkpoint_id="sharded")
assert resumed["epoch"] == 5
for _ in range(4):
    step()
"""


def test_checkpoints_come_back_where_the_script_wants_them(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    torch.save({"bias": torch.ones(2)}, tmp_path / "earlier.pt")
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    found = capture([sys.executable, "script.py"], timeout_s=240)
    assert found.facts.batch_size == 4
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
