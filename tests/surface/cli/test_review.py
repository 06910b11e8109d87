"""The runs of a project before and after a change, and the action that comments on a pull request with them."""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from command_line import invoke

ROOT = Path(__file__).parents[3]
RUNS = """
runs:
  wider:
    predict: train.py:model --on t4 --batch-size 64 --image-size 32 --dataset cifar10 --epochs 3 --price 50/h
    within: memory<=1GiB
  same: {predict: "cnn:depth=2 --on l4"}
"""
CODE = """
import torch
def model():
    layers = [torch.nn.Conv2d(3, WIDTH, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(900 * WIDTH, 10)]
    return torch.nn.Sequential(*layers)
"""


def project(folder, width):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(CODE.replace("WIDTH", str(width)))
    (folder / "forerun.yml").write_text(RUNS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runs: {a: {predict: [x]}}", "expected texts"),
        ("runs: {a: {predicts: x}}", "expected 'runs:'"),
        ("model: x", "got ['model']"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, text, said):
    (tmp_path / "forerun.yml").write_text(text)
    done = invoke("review", str(tmp_path / "forerun.yml"), "--before", str(tmp_path))
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


class Comments(BaseHTTPRequestHandler):
    """Comments on one pull request, as GitHub keeps them."""

    kept: list[dict] = []  # noqa: RUF012 - the server makes a handler for each request
    status = 200

    def do_GET(self):
        assert self.headers["Authorization"] == "Bearer secret"
        page = int(re.search(r"&page=(\d+)", self.path)[1])
        self.answer(self.kept[2 * (page - 1) : 2 * page])

    def do_POST(self):
        assert self.path == "/repos/me/mine/issues/7/comments"
        self.kept.append({"id": len(self.kept), **self.body()})
        self.answer(self.kept[-1])

    def do_PATCH(self):
        number = int(re.fullmatch("/repos/me/mine/issues/comments/([0-9]+)", self.path)[1])
        self.kept[number].update(self.body())
        self.answer(self.kept[number])

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, found):
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *words):
        pass


@pytest.fixture
def github():
    Comments.kept, Comments.status = (
        [{"id": 0, "body": "a"}, {"id": 1, "body": "b"}, {"id": 2, "body": "c"}],
        200,
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Comments)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def git(folder, *words):
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def steps_of_the_action(values):
    """The commands of the action with their environment; those that install are left out."""
    for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]:
        if "run" in step and step["name"] != "install":
            env = {
                name: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: values(m[1]), text)
                for name, text in step["env"].items()
            }
            yield step["name"], step["run"], env


def run_action(folder, temporary, base, github, only=None):
    """Exit status of every step, or of one after an earlier run of them, as a runner takes them."""
    output, summary = temporary / "output", temporary / "summary.md"
    known = {
        "inputs.file": "forerun.yml",
        "inputs.token": "secret",
        "github.event.pull_request.base.sha": base,
        "github.event.pull_request.number": "7",
        "github.action_path": str(ROOT),
    }

    def value(name):
        if name.startswith("steps.review.outputs."):
            return dict(line.split("=", 1) for line in output.read_text().splitlines())[
                name.rpartition(".")[2]
            ]
        return known[name]

    files = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "RUNNER_TEMP": str(temporary)}
    hub = {"GITHUB_API_URL": github, "GITHUB_REPOSITORY": "me/mine"}
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    found = {}
    for name, command, env in steps_of_the_action(value):
        if only not in (None, name):
            continue
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command],
            cwd=folder,
            env={**os.environ, **files, **hub, **path, **env},
            capture_output=True,
            text=True,
        )
        found[name] = done.returncode
        assert name == "verdict" or done.returncode == 0, done.stderr
    return found, done.stdout


def test_the_action_leaves_one_comment_and_fails_over_a_limit(tmp_path, github):
    folder, temporary = tmp_path / "project", tmp_path / "runner"
    temporary.mkdir()
    project(folder, 64)
    git(folder, "init", "--quiet")
    git(folder, "remote", "add", "origin", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "before")
    base = git(folder, "rev-parse", "HEAD")
    project(folder, 512)
    statuses, _ = run_action(folder, temporary, base, github)
    assert statuses["verdict"] == 1
    (comment,) = [kept["body"] for kept in Comments.kept if kept["body"].startswith("<!-- forerun -->")]
    assert ":x: wider breaks 'memory&lt;=1GiB'" in comment
    (row,) = [line for line in comment.splitlines() if line.startswith("| wider")]
    assert row.count(" (") == 4, row
    (same,) = [line for line in comment.splitlines() if line.startswith("| same")]
    assert "(" not in same
    assert comment.partition("\n")[2].strip() in (temporary / "summary.md").read_text()

    project(folder, 64)
    assert run_action(folder, temporary, base, github)[0]["verdict"] == 0
    assert len(Comments.kept) == 4
    assert ":x:" not in Comments.kept[3]["body"]

    Comments.status = 403
    assert run_action(folder, temporary, base, github, only="comment")[0] == {"comment": 0}
