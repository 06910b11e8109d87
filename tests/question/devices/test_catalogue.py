"""The shipped figures: complete, sourced, plausible, as the vendors print them; and every name that finds them.

This machine, and the device that ``here`` means.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forerun.question.devices
from forerun.base.errors import CatalogError, UnknownDeviceError
from forerun.question.devices import (
    Device,
    DeviceKind,
    Host,
    HostGpu,
    NumberFormat,
    describe_host,
    find_device,
    load_catalog,
)
from forerun.question.devices.catalogue import (
    POWER_EXPONENT,
    _catalogue,
    cpu_device,
    cpu_flops_per_clock,
    gpu_device,
    index_by_key,
    matching_devices,
    name_key,
    name_tokens,
    normalise_name,
    power_share,
    same_die,
    sustained_clock_share,
)
from forerun.question.devices.here import HostCpu, list_gpus, visible_gpus

CATALOG = load_catalog()
DEVICES = tuple(CATALOG.values())
GPUS = tuple(device for device in DEVICES if device.kind is DeviceKind.GPU)
TENSOR_FORMATS = (
    NumberFormat.TF32,
    NumberFormat.FP16,
    NumberFormat.FP16_ACC16,
    NumberFormat.BF16,
    NumberFormat.FP8,
)

# Multiply-add lanes in fp32 per unit (SM, CU or core): NVIDIA's architecture whitepapers of each generation;
# AMD's CDNA 3, CDNA 4 and RDNA 3 issue two per lane of 64.
LANES_PER_UNIT = {
    "kepler": 192,
    "maxwell": 128,
    "volta": 64,
    "turing": 64,
    "ada": 128,
    "hopper": 128,
    "blackwell": 128,
    "gcn5": 64,
    "cdna1": 64,
    "cdna2": 64,
    "cdna3": 128,
    "cdna4": 128,
    "rdna3": 128,
    "apple-g13": 128,
    "apple-g14": 128,
    "apple-g15": 128,
    "apple-g16": 128,
}
# Dense FLOP per clock and SM of the matrix units in fp16, at full rate: the same whitepapers; Hopper's matrix
# rates are printed at a lower clock than the boost clock (1830 and 1620 MHz of 1980 and 1755).
MATRIX_FP16_PER_CLOCK = {"volta": 1024, "turing": 1024, "ada": 1024, "hopper": 4096}
# Datasheet ranges [bytes/s] over all bus widths in use.
BANDWIDTH_RANGES = {
    "GDDR5": (80e9, 350e9),
    "GDDR5X": (320e9, 550e9),
    "GDDR6": (190e9, 970e9),
    "GDDR6X": (500e9, 1010e9),
    "GDDR7": (440e9, 1800e9),
    "HBM": (600e9, 1000e9),
    "HBM2": (540e9, 1610e9),
    "HBM2e": (800e9, 3300e9),
    "HBM3": (1600e9, 5400e9),
    "HBM3e": (4000e9, 8100e9),
    "LPDDR4X": (60e9, 70e9),
    "LPDDR5": (90e9, 820e9),
    "LPDDR5X": (110e9, 560e9),
    "DDR4": (50e9, 210e9),
    "DDR5": (70e9, 620e9),
}


def lanes_per_unit(device: Device) -> int:
    if device.architecture == "pascal":
        return 64 if device.name.startswith("p100") else 128
    if device.architecture == "ampere":
        return 64 if device.name.startswith(("a100", "a800", "a30")) else 128
    return LANES_PER_UNIT[device.architecture]


def full_matrix_rate(device: Device) -> int:
    if device.architecture == "ampere":
        return 2048 if device.name.startswith(("a100", "a800", "a30")) else 1024
    if device.architecture == "blackwell":
        return 8192 if device.memory_type == "HBM3e" else 1024
    return MATRIX_FP16_PER_CLOCK[device.architecture]


def ids(device: Device) -> str:
    return device.name


def test_the_catalogue_is_wide():
    assert len(CATALOG) >= 75
    assert {device.vendor for device in DEVICES} >= {
        "nvidia",
        "amd",
        "apple",
        "aws",
        "google",
        "intel",
        "any",
    }


@pytest.mark.parametrize("device", DEVICES, ids=ids)
def test_every_figure_has_a_source(device):
    figures = {
        "num_compute_units",
        "boost_clock_hz",
        "l2_cache_bytes",
        "memory_bytes",
        "memory_bandwidth_bytes_per_s",
        "memory_type",
        "bus",
        "power_limit_w",
        "release",
        "peak_flops_per_s",
    }
    assert set(device.sources) == figures
    assert all(len(source) > 10 for source in device.sources.values())


@pytest.mark.parametrize("device", DEVICES, ids=ids)
def test_release_is_a_month_of_this_trade(device):
    year, month = map(int, device.release.split("-"))
    assert date(2013, 1, 1) <= date(year, month, 1) <= date(2026, 12, 1)


@pytest.mark.parametrize("device", DEVICES, ids=ids)
def test_bandwidth_fits_the_memory_type(device):
    low, high = BANDWIDTH_RANGES[device.memory_type]
    assert low <= device.memory_bandwidth_bytes_per_s <= high


@pytest.mark.parametrize("device", DEVICES, ids=ids)
def test_clock_power_memory_and_cache_are_in_human_range(device):
    assert 0.5e9 <= device.boost_clock_hz <= 5e9
    assert 30 <= device.power_limit_w <= 1500
    assert 2 * 1024**3 <= device.memory_bytes <= 512 * 1024**3
    assert 1024**2 <= device.l2_cache_bytes <= 400 * 1024**2


@pytest.mark.parametrize("device", GPUS, ids=ids)
def test_ridge_points_are_in_range(device):
    """FLOP per byte where compute and memory take equally long, for the formats training uses."""
    ridge_fp32 = device.peak_flops_per_s[NumberFormat.FP32] / device.memory_bandwidth_bytes_per_s
    ridge_fp16 = device.peak_flops_per_s[NumberFormat.FP16] / device.memory_bandwidth_bytes_per_s
    assert 8 <= ridge_fp32 <= 120
    assert ridge_fp32 <= ridge_fp16 <= 470


@pytest.mark.parametrize("device", GPUS, ids=ids)
def test_fp32_peak_is_lanes_times_clock(device):
    expected = device.num_compute_units * lanes_per_unit(device) * 2 * device.boost_clock_hz
    assert device.peak_flops_per_s[NumberFormat.FP32] == pytest.approx(expected, rel=0.03)


TENSOR_GPUS = tuple(gpu for gpu in GPUS if NumberFormat.FP16_ACC16 in gpu.peak_flops_per_s)


@pytest.mark.parametrize("device", TENSOR_GPUS, ids=ids)
def test_matrix_peak_is_dense(device):
    """The largest fp16 rate is the dense rate of the silicon; a rate with sparsity would be twice as high."""
    full = device.num_compute_units * full_matrix_rate(device) * device.boost_clock_hz
    if device.name in {"a10g", "l20", "l40"}:
        full /= 2  # the datasheets of these print half of what the silicon of their siblings does
    if device.name == "h20":
        full = 148e12  # held at a quarter of the silicon by the datasheet
    rel = 0.09 if device.architecture in {"hopper", "blackwell"} else 0.05
    if device.name == "h100-nvl" or device.name == "h200-nvl":
        rel = 0.14  # 835 TFLOP/s hold at 1545 of 1785 MHz
    assert device.peak_flops_per_s[NumberFormat.FP16_ACC16] == pytest.approx(full, rel=rel)


@pytest.mark.parametrize("device", TENSOR_GPUS, ids=ids)
def test_consumer_boards_halve_the_rate_with_fp32_accumulation(device):
    peaks = device.peak_flops_per_s
    ratio = peaks[NumberFormat.FP16_ACC16] / peaks[NumberFormat.FP16]
    halved = device.segment in {"geforce", "laptop"}
    assert ratio == pytest.approx(2.0 if halved else 1.0, rel=1e-3)


@pytest.mark.parametrize("device", DEVICES, ids=ids)
def test_formats_are_ordered(device):
    peaks = device.peak_flops_per_s
    fp16 = peaks.get(NumberFormat.FP16, peaks[NumberFormat.FP32])
    assert fp16 >= peaks[NumberFormat.FP32]
    assert peaks.get(NumberFormat.TF32, 0) <= fp16
    assert peaks.get(NumberFormat.FP16_ACC16, fp16) >= fp16
    if NumberFormat.FP16 in peaks:
        assert peaks.get(NumberFormat.BF16, 0) <= fp16
    assert peaks.get(NumberFormat.FP8, fp16) >= fp16
    assert peaks.get(NumberFormat.FP64, 0) <= peaks[NumberFormat.FP32]


@pytest.mark.parametrize("device", [gpu for gpu in GPUS if gpu.vendor == "nvidia"], ids=ids)
def test_formats_appear_with_their_generation(device):
    peaks = device.peak_flops_per_s
    since_ampere = device.architecture in {"ampere", "ada", "hopper", "blackwell"}
    assert (NumberFormat.TF32 in peaks) is since_ampere
    assert (NumberFormat.BF16 in peaks) is since_ampere
    assert (NumberFormat.FP8 in peaks) is (device.architecture in {"ada", "hopper", "blackwell"})
    no_halves = device.architecture in {"kepler", "maxwell"}
    unpublished = device.architecture == "blackwell" and device.memory_type == "HBM3e"
    assert (NumberFormat.FP16_VECTOR in peaks) is not (no_halves or unpublished)


# TFLOP/s fp32, dense fp16 with fp32 accumulation, GB/s, GB, W as the vendor prints them.
PUBLISHED = {
    "p100-sxm2": (10.6, 21.2, 732, 16, 300),  # NVIDIA Tesla P100 whitepaper, 2016
    "v100-sxm2-16gb": (15.7, 125, 900, 16, 300),  # NVIDIA V100 datasheet, 2020
    "t4": (8.1, 65, 320, 16, 70),  # NVIDIA T4 datasheet, 2019
    "rtx-2080-ti": (13.4, 53.8, 616, 11, 250),  # NVIDIA Turing whitepaper, 2018, reference board
    "a100-sxm4-80gb": (19.5, 312, 2039, 80, 400),  # NVIDIA A100 datasheet, 2021
    "a800-sxm4-80gb": (19.5, 312, 2039, 80, 400),  # NVIDIA A800 datasheet, 2022
    "a800-pcie-80gb": (19.5, 312, 1935, 80, 300),  # NVIDIA A800 datasheet, 2022
    "rtx-3090": (35.6, 71, 936, 24, 350),  # NVIDIA Ampere GA102 whitepaper, 2021
    "a10": (31.2, 125, 600, 24, 150),  # NVIDIA A10 datasheet, 2021
    "a40": (37.4, 149.7, 696, 48, 300),  # NVIDIA A40 datasheet, 2021
    "l4": (30.3, 121, 300, 24, 72),  # NVIDIA L4 datasheet, 2023, half of 242 with sparsity
    "l20": (59.8, 119.5, 864, 48, 275),  # NVIDIA L20 datasheet, 2023
    "rtx-4090d": (73.5, 147.1, 1008, 24, 425),  # 114 of the 128 units of an RTX 4090
    "rtx-4090": (82.6, 165.2, 1008, 24, 450),  # NVIDIA Ada whitepaper, 2023
    "rtx-6000-ada": (91.1, 364.2, 960, 48, 300),  # NVIDIA Ada professional whitepaper, 2023
    "h100-sxm": (66.9, 989.4, 3352, 80, 700),  # NVIDIA H100 whitepaper, 2023
    "h100-pcie": (51.2, 756, 2039, 80, 350),  # NVIDIA H100 whitepaper, 2023
    "h800-sxm": (66.9, 989.4, 3352, 80, 700),  # NVIDIA H800 datasheet, 2023
    "h20": (39.5, 148, 4000, 96, 400),  # NVIDIA HGX H20 datasheet, 2023; fp32 by its units and clock
    "rtx-5090": (104.8, 209.5, 1792, 32, 575),  # NVIDIA RTX Blackwell whitepaper, 2025
    "b200": (75, 2250, 7700, 180, 1000),  # NVIDIA HGX B200 specifications, 2025, an eighth of the board
    "mi100": (23.1, 184.6, 1228.8, 32, 300),  # AMD Instinct MI100 datasheet, 2020
    "mi300x": (163.4, 1307.4, 5300, 192, 750),  # AMD Instinct MI300X datasheet, 2023
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values(name):
    device = CATALOG[name]
    fp32_tflops, fp16_tflops, bandwidth_gb_s, memory_gb, power_w = PUBLISHED[name]
    assert device.peak_flops_per_s[NumberFormat.FP32] == pytest.approx(fp32_tflops * 1e12, rel=0.01)
    assert device.peak_flops_per_s[NumberFormat.FP16] == pytest.approx(fp16_tflops * 1e12, rel=0.01)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(bandwidth_gb_s * 1e9, rel=0.01)
    assert device.memory_bytes == memory_gb * 1024**3
    assert device.power_limit_w == power_w


def test_pascal_half_precision_is_what_frameworks_reach():
    """GP10x multiplies halves at 1/64 of fp32; frameworks compute in fp32 instead. GP100 doubles."""
    gtx, p100 = CATALOG["gtx-1080-ti"].peak_flops_per_s, CATALOG["p100-pcie-16gb"].peak_flops_per_s
    assert gtx[NumberFormat.FP16] == gtx[NumberFormat.FP32]
    assert gtx[NumberFormat.FP16_VECTOR] == pytest.approx(gtx[NumberFormat.FP32] / 64, rel=1e-3)
    assert p100[NumberFormat.FP16] == pytest.approx(2 * p100[NumberFormat.FP32], rel=1e-3)


@pytest.mark.parametrize("name", ["k80", "m60", "a16", "mi250", "mi250x", "gb200"])
def test_parts_of_a_board_say_so(name):
    assert "ne of" in CATALOG[name].title or "one GPU" in CATALOG[name].title
    assert CATALOG[name].notes


# As the drivers print them (NVML and rocm-smi), or as tables of measurements do.
SPELLINGS = {
    "NVIDIA A100-SXM4-40GB": "a100-sxm4-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-SXM4-80GB (400W)": "a100-sxm4-80gb",
    "A100 SXM 40GB": "a100-sxm4-40gb",
    "NVIDIA A100 - PCIe - 80 GB": "a100-pcie-80gb",
    "NVIDIA A800-SXM4-80GB": "a800-sxm4-80gb",
    "NVIDIA A800 80GB PCIe": "a800-pcie-80gb",
    "NVIDIA L20": "l20",
    "NVIDIA GeForce RTX 4090 D": "rtx-4090d",
    "rtx4090d": "rtx-4090d",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "RTX-3090": "rtx-3090",
    "rtx3090": "rtx-3090",
    "4090": "rtx-4090",
    "Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "V100 DGXS 16GB": "v100-sxm2-16gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "Tesla T4": "t4",
    "Tesla K80": "k80",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "TITAN X (Pascal)": "titan-x-pascal",
    "GeForce GTX TITAN X": "titan-x-maxwell",
    "GeForce RTX 2060 with Max-Q Design": "rtx-2060-max-q",
    "NVIDIA GeForce RTX 3080 Laptop GPU": "rtx-3080-laptop",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx-pro-6000-max-q",
    "RTX-PRO-6000-Max-Q": "rtx-pro-6000-max-q",
    "AMD Instinct MI300X": "mi300x",
    "Radeon Pro VII": "radeon-pro-vii",
    "Apple M3 Max": "apple-m3-max",
    "TPU 5p": "tpu-v5p",
    "CPU-i9-10940X": "i9-10940x",
    # With a memory that the catalogue's own name lacks.
    "NVIDIA A10G (24 GB)": "a10g",
    "RTX 4090 24GB": "rtx-4090",
    "A100-SXM 80G": "a100-sxm4-80gb",
    "GeForce RTX\N{TRADE MARK SIGN} 4060 Ti 8 GB": "rtx-4060-ti-8gb",
}
# Left unresolved on purpose: several devices at once, a whole system, or hardware outside the catalogue.
NOT_ONE_DEVICE = {
    *("A100", "A100 40GB", "A100 80GB", "a100_40gb", "a100_80gb", "h100_80gb", "NVIDIA A100"),
    *("P100", "NVIDIA P100", "V100", "V100 16GB", "V100 32GB", "NVIDIA V100", "Nvidia Tesla V100"),
    *("RTX PRO 6000 Blackwell", "TPU", "TPU (generation not stated)"),
    *(
        "2x Xeon E5-2630 v3 (CPU)",
        "CPU only",
        "N/A",
        "NA",
        "2x GTX 1080",
        "2x K80",
        "2-3x K80",
        "3x K80 (6 dies)",
    ),
    *("8x M40", "8x H200", "8x H100 80GB HBM3", "tpuv2-8", "tpuv2-512", "tpuv3-8", "tpuv3-32", "tpuv3-512"),
    *(
        "Gaudi",
        "Gaudi 2",
        "Graphcore IPU",
        "Ascend 910",
        "Graphcore Bow IPU",
        "Graphcore IPU GC200",
        "Habana Gaudi",
    ),
    *(
        "Habana Gaudi HL-205",
        "Habana Gaudi2",
        "Intel Gaudi2",
        "Intel(R) Gaudi(R) 2 AI Accelerator",
        "Ascend910",
    ),
    *("Ascend 910 Premium A", "Ascend 910 Pro A"),
    # Variants with a power limit or memory of their own.
    *("NVIDIA H100-SXM5-96GB", "Tesla V100-SXM3-H-32GB", "NVIDIA A100-SXM-80GB CTS"),
}
TABLES = {
    "timm_train": ("gpu",),
    "timm_infer": ("device",),
    "timm_history": ("gpu",),
    "gpu_benchmarks": ("gpu",),
    "dle_training": ("gpu_name",),
    "neusight_ops": ("gpu",),
    "neusight_e2e": ("gpu",),
    "neusight_memory_fit": ("gpu",),
    "neusight_trace_ops": ("gpu",),
    "justus_layers": ("gpu",),
    "justus_e2e": ("gpu",),
    "iit_layers": ("gpu",),
    "iit_e2e": ("gpu",),
    "zeus_epoch_time_power": ("gpu",),
    "gavel_throughputs": ("gpu",),
    "adaptdl_step_times": ("gpu",),
    "mlperf_training": ("accelerator", "accelerator_model_name"),
    "llm_training_throughput": ("gpu",),
    "learning_curves": ("hardware",),
    "accuracy_time_tables": ("gpu",),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_in_use_are_understood(spelling):
    assert find_device(spelling).name == SPELLINGS[spelling]


@pytest.mark.parametrize("device", load_catalog().values(), ids=lambda device: device.name)
def test_every_name_of_every_device_finds_it(device):
    for spelling in (device.name, device.title, *device.aliases):
        assert find_device(spelling) is device
        assert find_device(f"  {spelling.upper()} ") is device


def test_two_devices_never_share_a_name():
    with pytest.raises(CatalogError, match="names both rtx-3090 and another"):
        index_by_key({"rtx-3090": ["RTX 3090"], "another": ["NVIDIA GeForce RTX 3090"]})


def test_the_names_that_are_looked_up_are_those_of_the_entries():
    for name, entry in _catalogue().entries.items():
        device = load_catalog()[name]
        assert entry.spellings == (device.name, device.title, *device.aliases)


@pytest.mark.parametrize("name", ["\N{CYRILLIC SMALL LETTER TE}4", "4", "x", "RTX 4090 16GB", "A100 3g.20gb"])
def test_a_letter_a_digit_or_a_foreign_memory_names_no_device(name):
    with pytest.raises(
        UnknownDeviceError, match=r"hardware list. shows all names|did you mean|part of a GPU"
    ):
        find_device(name)


def test_several_devices_where_one_is_asked_for_name_the_verb_that_takes_them():
    with pytest.raises(UnknownDeviceError, match="compare several with 'forerun plan'"):
        find_device("t4,l4")


@pytest.mark.parametrize("name", ["rtx-2080-max-q", "3080 Ti Super", "h100 foo"])
def test_a_name_that_only_nearly_fits_is_refused_with_its_neighbours(name):
    with pytest.raises(UnknownDeviceError, match=r"got .* did you mean"):
        find_device(name)


def test_an_ambiguous_name_lists_the_candidates():
    with pytest.raises(UnknownDeviceError, match="more than one device") as caught:
        find_device("a100")
    for name in ("a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm4-40gb", "a100-sxm4-80gb"):
        assert name in str(caught.value)
    assert "a10g" not in str(caught.value)


@pytest.mark.parametrize("name", ["A100 80GB", "V100", "P100", "rtx 6000", "RTX 4060 Ti", "TITAN X"])
def test_names_of_several_boards_are_never_guessed(name):
    with pytest.raises(UnknownDeviceError, match="more than one device"):
        find_device(name)


@pytest.mark.parametrize(
    ("name", "board"), [("h100", "h100-sxm"), ("A100 80GB", "a100-sxm4-80gb"), ("P100", "p100-sxm2")]
)
def test_the_only_sxm_board_of_a_name_is_taken_and_said(name, board, caplog):
    assert find_device(name, prefer_sxm=True).name == board
    assert f"'{name}' is taken as {board}, the SXM board" in caplog.text


def test_an_unknown_name_lists_near_matches():
    with pytest.raises(UnknownDeviceError, match="got 'rtx 3900'; did you mean rtx-3090"):
        find_device("rtx 3900")


@pytest.mark.parametrize("name", ["", "  ", "nvidia", "tesla", "quantum annealer", "-", "(400W)", "☃"])
def test_names_that_say_nothing_are_unknown(name):
    with pytest.raises(UnknownDeviceError, match="expected a device"):
        find_device(name)


def test_an_absent_file_is_an_unknown_device(tmp_path):
    with pytest.raises(UnknownDeviceError, match="there is none; check the path"):
        find_device(str(tmp_path / "absent.toml"))


def test_a_file_is_found_by_its_path(tmp_path):
    shipped = Path(sys.modules["forerun.question.devices.catalogue"].__file__).parent / "catalog" / "cpu.toml"
    first = (
        shipped.read_text(encoding="utf-8").split("[[device]]")[1].replace('name = "cpu"', 'name = "my-host"')
    )
    path = tmp_path / "host.toml"
    path.write_text(f"[[device]]{first}", encoding="utf-8")
    assert find_device(str(path)).name == "my-host"


@given(st.text(max_size=60))
def test_normalising_twice_changes_nothing(name):
    once = normalise_name(name)
    assert normalise_name(once) == once


@given(st.sampled_from(sorted(load_catalog())), st.sampled_from([" ", "_", "-", "/", " - "]))
def test_separators_and_vendor_words_do_not_matter(name, separator):
    spelling = "NVIDIA " + separator.join(name.split("-"))
    assert name_key(spelling) == name_key(name)
    assert find_device(spelling).name == name


@given(st.text(max_size=40))
def test_any_text_finds_devices_that_have_all_its_words(name):
    for device in matching_devices(name):
        spellings = (device.name, device.title, *device.aliases)
        words = set(name_tokens(name))
        assert any(words <= set(name_tokens(s)) or name_key(name) == name_key(s) for s in spellings)


def test_naming_a_device_imports_nothing_heavy():
    script = (
        "import sys; from forerun.question.devices import find_device; find_device('rtx-3090'); "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'psutil', 'pynvml', 'pandas') if m in sys.modules])"
    )
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.reference
@pytest.mark.parametrize("table", TABLES)
def test_the_names_of_the_reference_tables_are_understood(table):
    default = Path(__file__).parents[3].parent / "shared" / "data"
    path = Path(os.environ.get("FORERUN_REFERENCE_DATA", default)) / f"{table}.parquet"
    if not path.is_file():
        pytest.skip(f"the reference table {table} is not here; set FORERUN_REFERENCE_DATA to its folder")
    import pandas as pd

    frame = pd.read_parquet(path, columns=list(TABLES[table]))
    names = {str(name) for column in frame for name in frame[column].dropna().unique()}
    unresolved = set()
    for name in names:
        try:
            find_device(name)
        except UnknownDeviceError:
            unresolved.add(name)
    assert unresolved == names & NOT_ONE_DEVICE


@pytest.mark.parametrize(
    ("limited", "free"), [("t4", "rtx-2080-ti"), ("p4", "p100-pcie-16gb"), ("l4", "rtx-4090")]
)
def test_small_cards_cannot_hold_the_clock_their_siblings_hold(limited, free):
    assert power_share(find_device(limited)) < 0.65
    assert sustained_clock_share(find_device(limited)) < 0.75 * sustained_clock_share(find_device(free))


def test_more_power_never_lowers_the_clock_and_never_raises_it_over_the_boost_clock():
    device = find_device("rtx-pro-6000-max-q")
    shares = [sustained_clock_share(replace(device, power_limit_w=watts)) for watts in (150, 300, 600, 5000)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(shares[1] * 0.5**POWER_EXPONENT)
    assert shares[-1] == 1.0


def test_every_device_has_a_positive_share_and_cpus_have_one():
    for device in load_catalog().values():
        assert 0.2 < sustained_clock_share(device) <= 1.0
        if device.kind is not DeviceKind.GPU:
            assert power_share(device) == 1.0


def test_an_architecture_nobody_catalogued_is_not_judged():
    unknown = replace(find_device("t4"), architecture="new")
    assert power_share(unknown) == 1.0


def test_boards_of_one_die_clock_and_power_compute_alike():
    assert "h100-sxm" in same_die(find_device("h200-sxm"))
    assert "a100-sxm4-40gb" in same_die(find_device("a100-sxm4-80gb"))
    assert "a100-pcie-80gb" not in same_die(find_device("a100-sxm4-80gb"))


GIB = 1024**3


def gpu(name="NVIDIA GeForce RTX 3090", memory_gib=24.0, index=0):
    return HostGpu(
        index=index,
        uuid=f"GPU-{index}abc",
        name=name,
        memory_bytes=int(memory_gib * GIB),
        memory_used_bytes=0,
        driver_version="570.1",
        cuda_version="12.8",
        power_limit_w=None,
        max_sm_clock_hz=None,
        max_memory_clock_hz=None,
        compute_capability=None,
    )


def host(
    num_usable_cores=8.0, physical=32, logical=64, clock_hz=3e9, features=("avx2", "fma"), model="Intel Xeon"
):
    cpu = HostCpu(
        model=model,
        features=features,
        num_physical_cores=physical,
        num_logical_cores=logical,
        num_allowed_cores=logical,
        clock_hz=clock_hz,
        last_level_cache_bytes=None,
    )
    return Host(
        cpu=cpu,
        num_usable_cores=num_usable_cores,
        memory_total_bytes=64 * GIB,
        memory_available_bytes=60 * GIB,
        memory_limit_bytes=8 * GIB,
        swap_total_bytes=0,
        disk_free_bytes=GIB,
        gpus=(),
        operating_system="Linux",
        python_version="3.12.0",
        torch_version=None,
    )


def test_this_machine_is_described():
    here = describe_host()
    assert 0 < here.num_usable_cores <= here.cpu.num_logical_cores
    assert here.cpu.num_physical_cores <= here.cpu.num_logical_cores
    assert here.cpu.num_allowed_cores <= (os.cpu_count() or 1)
    assert 0 < here.memory_usable_bytes <= here.memory_total_bytes
    assert here.memory_available_bytes <= here.memory_total_bytes
    assert here.disk_free_bytes > 0
    assert here.cpu.model
    assert here.torch_version == metadata.version("torch")


def test_a_host_survives_json():
    here = replace(describe_host(), gpus=(gpu(),))
    plain = json.loads(json.dumps(here.as_dict(), allow_nan=False))
    assert plain["memory_total_bytes"] == here.memory_total_bytes
    assert plain["cpu"]["features"] == list(here.cpu.features)
    assert plain["gpus"][0]["name"] == "NVIDIA GeForce RTX 3090"


def test_here_is_a_device_that_can_be_asked():
    device = find_device("here")
    assert device.peak_flops_per_s[NumberFormat.FP32] > 0
    assert device.memory_bytes > 0
    if not visible_gpus(list_gpus()):
        assert device.kind is DeviceKind.CPU
        assert device.num_compute_units <= max(1, os.cpu_count() or 1)


def test_the_driver_name_and_memory_choose_the_board():
    assert gpu_device(gpu()) is load_catalog()["rtx-3090"]
    assert gpu_device(gpu("NVIDIA GeForce RTX 4060 Ti", 16.0)).name == "rtx-4060-ti-16gb"
    assert gpu_device(gpu("NVIDIA GeForce RTX 4060 Ti", 8.0)).name == "rtx-4060-ti-8gb"


def test_error_correction_does_not_make_another_board():
    """A T4 reports 15360 of 16384 MiB."""
    assert gpu_device(gpu("Tesla T4", 15.0)) is load_catalog()["t4"]


def test_memory_unlike_the_entry_is_taken_from_the_driver():
    device = gpu_device(gpu("NVIDIA GeForce RTX 3080 Laptop GPU", 8.0))
    assert device.name == "rtx-3080-laptop"
    assert device.memory_bytes == 8 * GIB
    assert "driver" in device.sources["memory_bytes"]


def test_an_unknown_board_is_named():
    with pytest.raises(UnknownDeviceError, match=r"got 'NVIDIA Foo 9000'.*describe it in a TOML file"):
        gpu_device(gpu("NVIDIA Foo 9000"))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,9,0", [1]),
        ("GPU-2abc", [2]),
        ("GPU-", []),
    ],
)
def test_visible_gpus_follow_cuda(setting, expected):
    gpus = [gpu(index=index) for index in range(3)]
    assert [one.index for one in visible_gpus(gpus, setting)] == expected


def test_all_gpus_are_visible_without_a_setting(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(visible_gpus([gpu(), gpu(index=1)])) == 2


def test_a_cpu_counts_cores_once_and_takes_the_limit_of_the_container():
    device = cpu_device(host(num_usable_cores=8.0))
    assert device.num_compute_units == 4  # eight threads, two per core
    assert device.memory_bytes == 8 * GIB
    assert device.peak_flops_per_s[NumberFormat.FP32] == pytest.approx(4 * 32 * 3e9)
    assert set(device.sources) == set(load_catalog()["cpu"].sources)


@given(st.floats(0.1, 64), st.floats(0.1, 64))
def test_more_cores_never_make_a_slower_cpu(first, second):
    few, many = (cpu_device(host(num_usable_cores=cores)) for cores in sorted((first, second)))
    assert few.num_compute_units <= many.num_compute_units
    assert few.peak_flops_per_s[NumberFormat.FP32] <= many.peak_flops_per_s[NumberFormat.FP32]
    assert few.memory_bandwidth_bytes_per_s <= many.memory_bandwidth_bytes_per_s


def test_a_clock_the_system_hides_is_that_of_the_class():
    device = cpu_device(host(clock_hz=None))
    assert device.boost_clock_hz == load_catalog()["cpu"].boost_clock_hz
    assert "not reported" in device.sources["boost_clock_hz"]


@pytest.mark.parametrize(
    ("model", "features", "fp32", "bf16"),
    [
        ("Intel Xeon", ("avx2", "fma", "avx512f"), 64, None),
        ("Intel Xeon", ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"), 64, 2048),
        ("AMD EPYC 9654", ("avx2", "fma", "avx512f", "avx512_bf16"), 32, 64),
        ("AMD EPYC 7742", ("avx2", "fma"), 32, None),
        ("Neoverse-N1", ("asimd",), 16, None),
    ],
)
def test_vector_extensions_set_the_rate(model, features, fp32, bf16):
    rates = cpu_flops_per_clock(host(model=model, features=features).cpu)
    assert rates[NumberFormat.FP32] == fp32
    assert rates[NumberFormat.FP64] == fp32 / 2
    assert rates.get(NumberFormat.BF16) == bf16


def test_the_public_names_load():
    for name in forerun.question.devices.__all__:
        assert getattr(forerun.question.devices, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = forerun.question.devices.nothing


@pytest.mark.parametrize("name", ["a100-mig-3g.20gb", "A100 1g.5gb"])
def test_a_part_of_a_gpu_is_told_how_it_is_described(name):
    with pytest.raises(UnknownDeviceError, match=r"part of a GPU .* TOML file"):
        find_device(name)
