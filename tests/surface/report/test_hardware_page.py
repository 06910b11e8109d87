import dataclasses
import io
import re

import pytest
from rich.console import Console

from forerun.question.devices import HostGpu, describe_host, find_device, load_catalog
from forerun.surface.report.hardware_page import device_page, device_table, host_page


def printed(page, width=140):
    file = io.StringIO()
    Console(file=file, width=width).print(page)
    return file.getvalue()


def test_table_has_a_whole_line_per_device():
    lines = printed(device_table(load_catalog().values())).splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(load_catalog())


@pytest.mark.parametrize("width", [80, 140])
def test_names_and_figures_are_never_cut_at_usual_widths(width):
    text = printed(device_table(load_catalog().values()), width)
    assert "…" not in text
    assert all(name in text for name in load_catalog())


def test_device_page_gives_published_figures_and_their_sources():
    text = printed(device_page(find_device("a100-sxm4-40gb")))
    for words in (
        "NVIDIA A100 SXM4 40GB",
        "108",
        "1,410 MHz",
        "40.0 GiB",
        "1,555 GB/s",
        "400 W",
        "312 TFLOP/s",
        "whitepaper",
    ):
        assert words in text, words


def test_every_figure_of_every_device_has_a_source_on_its_page():
    for device in load_catalog().values():
        lines = printed(device_page(device), 1000).splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("figure"))
        rows = [
            re.split(r"\s{2,}", line.strip()) for line in lines[first + 1 :] if re.search(r"\S\s{2,}\S", line)
        ]
        assert len(rows) == 8 + len(device.peak_flops_per_s), device.name
        assert all(len(row) == 3 and row[2] for row in rows), device.name


def test_host_without_gpu_says_what_here_means():
    host = dataclasses.replace(describe_host(), gpus=())
    text = printed(host_page(host))
    assert host.cpu.model in text
    assert "No NVIDIA GPU was found" in text


def test_host_page_lists_gpus_and_what_the_driver_does_not_say():
    gpu = HostGpu(
        index=0,
        uuid="GPU-1",
        name="NVIDIA GeForce RTX 3090",
        memory_bytes=24 * 1024**3,
        memory_used_bytes=1024**3,
        driver_version="550.54",
        cuda_version=None,
        power_limit_w=350.0,
        max_sm_clock_hz=None,
        max_memory_clock_hz=None,
        compute_capability="8.6",
    )
    text = printed(host_page(dataclasses.replace(describe_host(), gpus=(gpu,))))
    assert "0: NVIDIA GeForce RTX 3090, 24.0 GiB (1.00 GiB in use), driver 550.54, CUDA not reported" in text
    assert "power limit 350 W" in text
