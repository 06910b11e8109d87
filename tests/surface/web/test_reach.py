"""What a question over MCP or HTTP may reach."""

import os
import time

import pytest

from forerun.base.errors import UsageError
from forerun.question.options import RunOptions
from forerun.question.settings import declared
from forerun.search.options import PlanOptions
from forerun.surface.web import reach
from forerun.surface.web.questions import check_model_name
from forerun.surface.web.reach import MOST_VALUES, Captures, Reach, config_file, joined, kept_config


@pytest.fixture
def folders(tmp_path):
    for name in ("work", "code", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text("raise SystemExit('run')\n", encoding="utf-8")
        (tmp_path / name / "gpt.json").write_text("{}", encoding="utf-8")
    (tmp_path / "work" / "link.json").symlink_to(tmp_path / "other" / "gpt.json")
    return tmp_path


def check(reach, options=RunOptions, **arguments):
    reach.check(arguments, declared(options))


def test_no_code_runs_without_a_folder_for_it(folders):
    for name in ("net.py:make", str(folders / "code" / "net.py:make"), "x/net.py", " net.py:make "):
        with pytest.raises(UsageError, match="--allow-code DIR"):
            check(Reach(files=folders), model=name)


def test_code_runs_inside_its_folder_alone(folders):
    reach = Reach(files=folders, code=folders / "code")
    check(reach, model=f"{folders}/code/net.py:make")
    for outside in (f"{folders}/other/net.py:make", f"{folders}/code/../other/net.py:make"):
        with pytest.raises(UsageError, match="outside the folder of --allow-code"):
            check(reach, model=outside)
    assert check_model_name(f"{folders}/code/net.py:make", reach).endswith("net.py:make")
    with pytest.raises(UsageError, match="--allow-code"):
        check_model_name(f"{folders}/code/net.py:make")


@pytest.mark.parametrize(
    "question",
    [
        {"model": "hf:{}/gpt.json"},
        {"model": "hf:{}/nothing.json"},
        {"model": "onnx:{}/net.onnx"},
        {"model": "capture:{}/step.npz"},
        {"model": "cnn", "device": "2x8x{}/gpu.toml"},
        {"first": {"model": "hf:{}/gpt.json"}, "second": {}},
        {"models": "cnn;hf:{}/gpt.json"},
    ],
)
def test_a_file_outside_is_refused_alike_whether_it_is_there_or_not(folders, question):
    def at(value):
        return (
            {k: at(v) for k, v in value.items()}
            if isinstance(value, dict)
            else value.format(folders / "other")
        )

    reach = Reach(files=folders / "work")
    with pytest.raises(UsageError, match="lies outside the working folder"):
        check(reach, PlanOptions, **at(question))
    with pytest.raises(UsageError, match="lies outside the working folder"):
        check(reach, model=f"hf:{folders}/work/link.json")
    check(reach, model=f"hf:{folders}/work/gpt.json", device="4x8xh100-sxm")


def test_long_lists_and_texts_are_refused():
    with pytest.raises(UsageError, match=f"at most {MOST_VALUES:,} values"):
        check(Reach(), num_devices=list(range(200_000)))
    with pytest.raises(UsageError, match="characters"):
        check(Reach(), model="x" * 100_000)


def test_a_name_is_given_once():
    assert joined({"model": "cnn", "device": None}, {"device": "t4"}) == {"model": "cnn", "device": "t4"}
    with pytest.raises(UsageError, match="'device' is an argument"):
        joined({"model": "cnn", "device": "t4"}, {"device": "l4"})


def test_pasted_configurations_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(reach, "MOST_CONFIGS", 3)
    names = [kept_config({"model_type": "gpt2", "n_layer": number}) for number in range(1, 8)]
    assert len(list((tmp_path / "configs").iterdir())) == 3
    assert config_file(names[-1]).startswith("hf:")
    with pytest.raises(UsageError, match="paste it once more"):
        config_file(names[0])


def test_captures_are_bounded_and_go_with_time_and_with_the_server(monkeypatch):
    monkeypatch.setattr(reach, "_MOST_CAPTURES", 3)
    captures = Captures()
    names = [captures.keep(bytes([number])) for number in range(5)]
    files = [captures.file(name) for name in names[-3:]]
    for gone in names[:2]:
        with pytest.raises(UsageError, match="send the file once more"):
            captures.file(gone)
    assert captures.public(f"'{files[0]}' and capture:{files[0]}") == f"'{names[2]}' and {names[2]}"
    os.utime(files[0], (0, time.time() - 3601))
    captures.forget()
    assert [path.exists() for path in files] == [False, True, True]
    captures.close()
    assert not files[1].parent.exists()
