import struct
from types import SimpleNamespace

import numpy as np
import pytest

from forerun.base.errors import FailureError, UsageError
from forerun.surface.report.figure import check_plot_path, predicted_versus_actual, throughput_and_memory

SIZES = (1, 2, 4, 8)
TIMES = np.asarray([0.010, 0.012, 0.016, 0.024])
THROUGHPUT = tuple(np.asarray(SIZES) / (TIMES * factor) for factor in (1.0, 1.2, 0.8))


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def draw_sweep(path, **changes):
    names = ("throughput_samples_per_s", "throughput_low_samples_per_s", "throughput_high_samples_per_s")
    sweep = {
        "batch_sizes": SIZES,
        **{name: rates[None, None] for name, rates in zip(names, THROUGHPUT, strict=True)},
        "peak_memory_bytes": np.asarray(SIZES)[None, None] * 2.0**30,
        "device_memory_bytes": np.asarray([6 * 2.0**30]),
    }
    found = SimpleNamespace(**{**sweep, **changes})
    throughput_and_memory(path, found, title="model on device", chosen_batch_size=4)


def texts_of(path):
    """Words of an svg whose text is kept as text."""
    import re

    return set(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_sweep_plot_is_a_png_of_a_readable_size(tmp_path):
    draw_sweep(tmp_path / "a.png")
    width, height = png_size(tmp_path / "a.png")
    assert width > 900
    assert height > 800


def test_sweep_plot_names_axes_units_band_and_limit(tmp_path):
    draw_sweep(tmp_path / "a.svg")
    expected = {
        "throughput [samples/s]",
        "memory [GiB]",
        "batch size",
        "90 % interval",
        "model on device",
        "batch 4",
    }
    assert expected | {"memory of the device, 6.0 GiB"} <= texts_of(tmp_path / "a.svg")


def test_a_device_without_a_memory_figure_has_no_limit_line(tmp_path):
    draw_sweep(tmp_path / "a.svg", device_memory_bytes=np.zeros(1))
    assert not any("memory of the device" in text for text in texts_of(tmp_path / "a.svg"))


def test_scatter_gives_rows_mape_and_groups(tmp_path):
    actual = np.asarray([0.01, 0.1, 1.0, 2.0])
    factors = np.asarray([1.1, 0.9, 1.3, 0.7])
    path = tmp_path / "s.svg"
    groups = ["t4", "t4", "l4", "l4"]
    predicted_versus_actual(
        path, title="held out", predicted_s=actual * factors, actual_s=actual, groups=groups
    )
    expected = {
        "4 rows, MAPE 20.0 %",
        "held out",
        "t4 (2)",
        "l4 (2)",
        "predicted = actual",
        "20 % above and below",
    }
    assert expected <= texts_of(path)


def test_scatter_with_very_many_groups_leaves_the_legend_to_the_lines(tmp_path):
    actual = np.linspace(0.01, 1.0, 40)
    groups = [f"device {i}" for i in range(40)]
    predicted_versus_actual(tmp_path / "s.svg", title="t", predicted_s=actual, actual_s=actual, groups=groups)
    assert not any(text.startswith("device") for text in texts_of(tmp_path / "s.svg"))


@pytest.mark.parametrize("predicted", [[], [0.0, 1.0], [float("nan"), 1.0]])
def test_scatter_refuses_what_has_no_place_on_a_logarithmic_axis(tmp_path, predicted):
    actual = np.ones(len(predicted))
    with pytest.raises(FailureError, match="above zero"):
        predicted_versus_actual(
            tmp_path / "s.png",
            title="t",
            predicted_s=np.asarray(predicted),
            actual_s=actual,
            groups=["a"] * len(actual),
        )


def test_path_is_checked_before_the_work(tmp_path):
    check_plot_path(tmp_path / "plot.PNG")
    with pytest.raises(UsageError, match=r"\.png, \.svg, \.pdf"):
        check_plot_path(tmp_path / "plot.jpeg")
    with pytest.raises(UsageError, match="does not exist"):
        check_plot_path(tmp_path / "missing" / "plot.png")


def test_a_file_that_cannot_be_written_is_a_failure_with_a_reason(tmp_path):
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(FailureError, match="cannot be written"):
        draw_sweep(tmp_path / "taken.png")
