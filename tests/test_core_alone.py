"""The package without its extras: it answers for common models, and names the extra that a question needs."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forerun.base.extras import EXTRA_OF_PACKAGE
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import (
    TRACE_VERSION,
    library_versions,
    shipped_archive,
    shipped_graph,
    shipped_models,
    trace,
    traced_settings,
)

CHILD = """
import json, sys
import without_extras
NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname")
seen = []
def callers():
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_globals.get("__name__", "").partition(".")[0]
        frame = frame.f_back
def watch(event, arguments):
    if event in NETWORK:
        seen.append([event, repr(arguments)])
        raise RuntimeError(f"nobody asked for {event} {arguments}")
    # A pickle from one of our own child processes is no file of a stranger.
    if event == "pickle.find_class" and "multiprocessing" not in callers() or event == "os.system":
        seen.append([event, repr(arguments)])
    if event == "subprocess.Popen" and str(arguments[0]).rpartition("/")[2] in ("sh", "bash", "cmd.exe"):
        seen.append([event, repr(arguments)])
sys.addaudithook(watch)
from typer.testing import CliRunner
from forerun.surface.cli.main import app
answers = []
for line in json.load(sys.stdin):
    result = CliRunner().invoke(app, line.split())
    answers.append([result.exit_code, result.stdout, result.stderr, repr(result.exception)])
json.dump({"answers": answers, "modules": sorted(sys.modules), "seen": seen}, sys.__stdout__)
"""

R50 = "torchvision:resnet50"
ANSWERED = [
    "--help",
    "--version --verbose",
    "plan --help",
    "tune --help",
    "hardware list",
    f"predict {R50} --on a100-sxm4-40gb --batch-size 256 --precision amp --dataset imagenet --epochs 90 --json",
    f"predict {R50} --on 1x8xh100-sxm --image-size 224 --precision bf16 --layout nhwc --optimizer adamw",
    "predict resnet50 --on t4",
    f"scale {R50} --on v100-sxm2-16gb --devices 1,2,4,8",
    "predict llama-3.1-8b --on h200-sxm --batch-size 1 --precision bf16 --optimizer adamw",
    "predict llama-3.1-8b --lora 16 --quantize nf4 --recompute full --sequence-length 4096 --on rtx-4090",
    "predict meta-llama/Llama-3.1-8B --on t4 --sequence-length 2048",
    f"plan {R50} --on t4,l4 --batch-size 32,64 --precision amp --dataset imagenet --within cost<=100000",
]
REFUSED = {
    f"predict {R50} --on t4 --image-size 160": "'forerun[torchvision]'",
    "predict timm:convnextv2_tiny --on t4": "'forerun[timm]'",
    f"predict {R50} --on t4 --dataset imagenet --plot sweep.png": "'forerun[plot]'",
    "records list": "'forerun[records]'",
    "measure grid --dataset digits": "'forerun[records]'",
    "calibrate": "'forerun[torch]'",
    "serve": "'forerun[web]'",
    "mcp": "'forerun[mcp]'",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Answers of commands in a process that finds no optional package, and the modules it loaded."""
    lines = [*ANSWERED, *REFUSED]
    found = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(lines),
        cwd=tmp_path_factory.mktemp("alone"),
        env={
            "PATH": "",
            "PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path]),
            "FORERUN_CACHE": "cache",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    kept = json.loads(found.stdout)
    return dict(zip(lines, kept["answers"], strict=True)), kept["modules"], kept["seen"]


@pytest.mark.parametrize("line", ANSWERED)
def test_the_core_answers(alone, line):
    status, answer, errors, exception = alone[0][line]
    assert (status, bool(answer.strip())) == (0, True), f"{errors}\n{exception}"


@pytest.mark.parametrize("line", REFUSED)
def test_a_missing_extra_is_named(alone, line):
    status, _, errors, exception = alone[0][line]
    assert status == 2, f"{errors}\n{exception}"
    assert REFUSED[line] in exception or REFUSED[line] in errors


def test_no_optional_package_is_loaded(alone):
    assert set(alone[1]) & set(EXTRA_OF_PACKAGE) == set()


def test_nothing_goes_to_the_network_and_neither_a_pickle_nor_a_shell_is_used(alone):
    assert alone[2] == []


def test_an_answer_says_which_libraries_its_graph_is_of(alone):
    (line,) = (line for line in ANSWERED if line.endswith("--json"))
    assert any("traced with torch" in note for note in json.loads(alone[0][line][1])["notes"])


def test_the_extras_that_messages_and_the_documentation_name_exist():
    root = Path(__file__).parents[1]
    extras = set(tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    text = (root / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(EXTRA_OF_PACKAGE.values()) <= extras
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) <= extras


@pytest.mark.parametrize("model", ["torchvision:resnet18", "cnn:depth=2,base_filters=32"])
def test_shipped_graphs_are_those_that_are_traced_today(model):
    request, setup = ModelRequest(model=model), TrainingSetup(precision="amp", optimizer="adamw")
    kept = shipped_graph(request, traced_settings(setup), TRACE_VERSION)
    assert kept is not None, "make the graphs anew: python -m studies shipped-graphs"
    if kept.versions != library_versions(model):
        pytest.skip(f"the shipped graphs are of {kept.versions}")
    fresh = trace(request, setup, use_cache=False)
    assert kept.ops.flops.tolist() == fresh.ops.flops.tolist()
    assert kept.ops.kernel_names == fresh.ops.kernel_names
    assert kept.memory.size_bytes.tolist() == fresh.memory.size_bytes.tolist()
    assert kept.num_parameters == fresh.num_parameters


def test_every_model_that_is_said_to_come_with_the_package_does():
    known = shipped_models()
    assert {"torchvision:resnet50", "llama-3.1-8b"} <= set(known)
    assert [model for model in known if not shipped_archive(model).exists()] == []
    total = sum(shipped_archive(model).stat().st_size for model in known)
    assert total < 5_000_000, f"the graphs take {total:,} bytes of the package"
