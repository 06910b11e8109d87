import pytest
from command_line import invoke


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluate"], "missing argument 'RECORDS'"),
        (["evaluate", "rows.csv", "--reference"], "no such option: --reference"),
        (["evaluate", "rows.csv", "--precision", "fp7"], "expected one of fp32"),
        (["evaluate", "rows.csv", "--layout", "hwc"], "nchw"),
        (["evaluate", "rows.csv", "--torch-version", "two"], "looks like 2.4"),
        (["evaluate", "rows.csv", "--plot", "scatter.txt"], ".png"),
        (["evaluate", "methods", "rows.csv", "--last-layer", "5ms"], "have their own last layer"),
        (["fit", "rows.csv"], "--out"),
        (["fit", "--out", "w.safetensors"], "missing argument 'RECORDS...'"),
        (["fit", "rows.csv", "--out", "w.safetensors", "--model", "tree"], "expected one of ann"),
        (["fit", "rows.csv", "--out", "w.safetensors", "--model", "scaling"], "unknown model 'scaling'"),
        (["fit", "rows.csv", "--out", "w.safetensors", "--model", "ann", "--hidden", "a"], "with --hidden"),
        (["fit", "rows.csv", "--out", "w.safetensors", "--plots", __file__], "cannot be made"),
        (["fit", "rows.csv", "--out", "no/such/folder/w.safetensors"], "does not exist"),
    ],
)
def test_what_cannot_be_meant_is_status_2_before_any_work(words, expected):
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr
