"""``forerun compare A.json B.json``, ``models`` and ``doctor``."""

import json

from command_line import invoke


def kept(path, *words):
    path.write_text(
        invoke("predict", "cnn", *words, "--dataset", "cifar10", "--json").stdout, encoding="utf-8"
    )
    return str(path)


def test_two_kept_answers_are_compared(tmp_path):
    files = kept(tmp_path / "a.json", "--on", "t4"), kept(tmp_path / "b.json", "--on", "l4")
    page = invoke("compare", *files)
    assert page.exit_code == 0, page.stderr
    assert "step: " in page.stdout
    found = json.loads(invoke("compare", *files, "--json").stdout)
    assert found["settings"] == [{"name": "device", "before": "t4", "after": "l4", "change": None}]
    (tmp_path / "b.json").write_text("{", encoding="utf-8")
    wrong = invoke("compare", *files)
    assert wrong.exit_code
    assert "but it cannot be read" in wrong.stderr
    assert "cannot be read" in invoke("compare", str(tmp_path / "c.json"), files[1]).stderr


def test_models_by_a_word():
    assert "torchvision:resnet18" in invoke("models", "resnet18").stdout.splitlines()
    wrong = invoke("models", "resnat18")
    assert wrong.exit_code
    assert "resnet18" in wrong.stderr


def test_the_doctor_tells_the_libraries_and_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["extras"]["torch"]
    assert not found["problems"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file"))
    assert "cannot be written" in invoke("doctor").stdout
