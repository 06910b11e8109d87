"""The shipped figures: complete, sourced, plausible, and equal to what the vendors print."""

from datetime import date

import pytest

from forerun.hardware import Device, DeviceKind, NumberFormat, load_catalog

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
        return 64 if device.name.startswith(("a100", "a30")) else 128
    return LANES_PER_UNIT[device.architecture]


def full_matrix_rate(device: Device) -> int:
    if device.architecture == "ampere":
        return 2048 if device.name.startswith(("a100", "a30")) else 1024
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
    if device.name in {"a10g", "l40"}:
        full /= 2  # the datasheets of these two print half of what the silicon of their siblings does
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
    "rtx-3090": (35.6, 71, 936, 24, 350),  # NVIDIA Ampere GA102 whitepaper, 2021
    "a10": (31.2, 125, 600, 24, 150),  # NVIDIA A10 datasheet, 2021
    "a40": (37.4, 149.7, 696, 48, 300),  # NVIDIA A40 datasheet, 2021
    "l4": (30.3, 121, 300, 24, 72),  # NVIDIA L4 datasheet, 2023, half of 242 with sparsity
    "rtx-4090": (82.6, 165.2, 1008, 24, 450),  # NVIDIA Ada whitepaper, 2023
    "rtx-6000-ada": (91.1, 364.2, 960, 48, 300),  # NVIDIA Ada professional whitepaper, 2023
    "h100-sxm": (66.9, 989.4, 3352, 80, 700),  # NVIDIA H100 whitepaper, 2023
    "h100-pcie": (51.2, 756, 2039, 80, 350),  # NVIDIA H100 whitepaper, 2023
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
