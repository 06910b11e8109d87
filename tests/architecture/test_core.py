"""The core answers with every satellite and adapter absent."""

import json
import subprocess
import sys
from pathlib import Path

CHILD = """
import json, sys
import without_rooms
from typer.testing import CliRunner
from forerun.surface.cli.main import app
answers = []
for line in json.load(sys.stdin):
    result = CliRunner().invoke(app, line.split())
    answers.append([result.exit_code, result.stdout, result.stderr])
rooms = sorted({name.split(".")[1] for name in sys.modules if name.startswith("forerun.")})
json.dump({"answers": answers, "rooms": rooms}, sys.__stdout__)
"""

R50 = "torchvision:resnet50"
ANSWERED = [
    "--help",
    "hardware list",
    "prices",
    f"predict {R50} --on a100-sxm4-40gb --batch-size 256 --precision amp --dataset imagenet --epochs 90",
    "predict cnn:depth=2,base_filters=32 --on t4",
    f"plan {R50} --on t4,l4 --batch-size 32,64 --precision amp --dataset imagenet",
    f"scale {R50} --on v100-sxm2-16gb --devices 1,2,4",
    "layouts llama-3.1-8b --on 2x8xh100-sxm --inter 8xinfiniband-ndr --precision amp-bf16 --global-batch 256",
    "advise cnn:depth=2,base_filters=32 --on t4",
]
REFUSED = ["predict onnx:model.onnx --on t4", "forecast run.csv"]


def test_the_core_answers_with_every_satellite_and_adapter_absent(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([*ANSWERED, *REFUSED]),
        cwd=tmp_path,
        env={
            "PATH": "",
            "PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path]),
            "FORERUN_CACHE": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    kept = json.loads(found.stdout)
    assert not {"evidence", "script", "jobs", "adapters"} & set(kept["rooms"])
    answers = dict(zip([*ANSWERED, *REFUSED], kept["answers"], strict=True))
    for line in ANSWERED:
        status, answer, errors = answers[line]
        assert (status, bool(answer.strip())) == (0, True), f"{line}: {errors}"
    for line in REFUSED:
        status, _, errors = answers[line]
        assert status != 0, line
        assert "internal error" not in errors, errors
