import io
import re

import pytest
from estimate_cases import BARE, FULL, changed
from rich.console import Console

from forerun.prediction.estimate import BreakdownPart, LayerTime
from forerun.surface.report.page import estimate_page


def printed(estimate, width=80, **options):
    file = io.StringIO()
    Console(file=file, width=width, **options).print(estimate_page(estimate))
    return file.getvalue()


def test_headline_gives_every_quantity_with_its_interval():
    text = printed(FULL)
    for line in (
        r"step +45\.2 ms +39\.1 to 52\.0 ms",
        r"throughput +708 samples/s +615 to 818 samples/s",
        r"epoch \(40,037 steps\) +30\.2 min +26\.1 to 34\.8 min",
        r"job +45\.3 h +39\.1 to 52\.. h",
        r"cost of the job +\$85\.60 +\$74\.00 to \$98\.70",
        r"energy of the job +11\.2 kWh +2\.78 to 17\.2 kWh",
    ):
        assert re.search(line, text), line
    assert "90 % interval" in text


def test_page_names_model_device_setup_bound_layers_provenance_and_notes():
    text = " ".join(printed(FULL).split())
    for words in (
        "torchvision:resnet50 on NVIDIA A100 SXM4 40GB",
        "batch 32, fp32, nchw, eager, training step, sgd",
        "25.6 M parameters, 24.5 GFLOP a sample",
        "4.00 GiB (3.80 to 4.40 GiB) of 40.0 GiB: fits; largest batch 391 (350 to 410)",
        "bound by compute",
        "layer1.0.conv2 3.10 ms 6.9 %",
        "Rests on interpolated",
        "the last step of an epoch has 15 samples",
    ):
        assert words in text, words


def test_what_is_not_known_is_left_out_rather_than_shown_as_zero():
    text = printed(BARE)
    for word in ("epoch", "job", "cost of", "energy", "Memory", "Most expensive layers", "Notes", "None"):
        assert word not in text, word
    assert "datasheet only" in text


def test_energy_of_a_single_step_is_called_that():
    assert "energy of the step" in printed(changed(epoch_time_s=None, job_time_s=None))
    assert "energy of the epoch" in printed(changed(job_time_s=None))


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 96, 200])
@pytest.mark.parametrize("estimate", [FULL, BARE])
def test_no_line_is_wider_than_the_terminal(estimate, width):
    assert max(len(line) for line in printed(estimate, width).splitlines()) <= width


def test_narrow_terminals_keep_all_figures_and_drop_the_bars():
    text = printed(FULL, 50)
    assert "█" not in text
    assert "30.0 ms" in text
    assert "66 %" in text


def test_colour_only_on_a_terminal_and_the_text_is_the_same():
    plain = printed(FULL)
    coloured = printed(FULL, force_terminal=True, color_system="standard")
    assert "\x1b" not in plain
    assert "\x1b" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_names_in_square_brackets_are_text_and_no_markup():
    estimate = changed(top_layers=(LayerTime("[bold]blocks[0]", 0.001, 0.02),), notes=("shape [3, 224] [/]",))
    text = printed(estimate)
    assert "[bold]blocks[0]" in text
    assert "shape [3, 224] [/]" in text


def test_memory_beyond_the_card_shows_by_how_much():
    estimate = changed(device_memory_bytes=2.0 * 1024**3, fits="no")
    text = printed(estimate)
    assert "does not fit" in text
    assert re.search(r"more than there is +!+ +2\.00 GiB +50 %", text)
    assert not re.search(r"^ +free ", text, re.MULTILINE)


def test_free_memory_and_parts_add_up_to_the_card():
    shares = re.findall(r"GiB +([\d.]+) %", printed(FULL).partition("Memory")[2].partition("Step")[0])
    mebibytes = re.findall(r"MiB +([\d.]+) %", printed(FULL))
    assert sum(map(float, shares + mebibytes)) == pytest.approx(100, abs=0.5)


def test_unsupported_operations_are_named():
    assert "aten::strange" in printed(changed(unsupported_ops=("aten::strange",)))


def test_a_breakdown_of_one_part_is_the_whole_step():
    text = printed(changed(breakdown=(BreakdownPart("convolution", 0.0452),)))
    assert re.search(r"convolution +█+ +45\.2 ms +100 %", text)


def test_several_devices_are_counted_in_the_title():
    assert "on 8 x NVIDIA A100" in printed(changed(num_devices=8))
