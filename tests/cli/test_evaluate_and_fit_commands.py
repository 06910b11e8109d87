import pytest
from command_line import invoke


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluate"], "--reference"),
        (["evaluate", "rows.csv", "--reference"], "takes no RECORDS"),
        (["evaluate", "--reference", "--json"], "takes no RECORDS"),
        (["evaluate", "--reference", "--out", "no/such/folder/page.md"], "does not exist"),
        (["evaluate", "rows.csv", "--plot", "scatter.txt"], ".png"),
        (["fit"], "--out"),
        (["fit", "--out", "w.safetensors", "--model", "tree"], "expected one of ann"),
        (["fit", "--out", "w.safetensors", "--model", "ann"], "is fitted to measurements"),
        (["fit", "--out", "w.safetensors", "--hidden", "8"], "--hidden need RECORDS"),
        (["fit", "rows.csv", "--out", "w.safetensors", "--model", "ann", "--hidden", "a"], "with --hidden"),
        (["fit", "rows.csv", "--out", "w.safetensors", "--plots", "no/such/folder"], "--plots"),
        (["fit", "--out", "no/such/folder/w.safetensors"], "does not exist"),
    ],
)
def test_what_cannot_be_meant_is_status_2_before_any_work(words, expected):
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr
