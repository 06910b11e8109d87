"""Loading real image files: what is measured, and the loader that it predicts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measure_loader import image_files, loading_times, measure_loader
from forerun.surface.cli.main import app

NUM_FILES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    for index in range(NUM_FILES):
        place = found / f"class{index % 3}"
        place.mkdir(exist_ok=True)
        pixels = noise.integers(0, 256, (96, 128, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{index}.{'jpg' if index % 2 else 'PNG'}")
    (found / "labels.csv").write_text("not an image")
    return found


@pytest.fixture(scope="module")
def run(folder):
    return measure_loader(folder, image_size=64, num_rounds=3)


def test_images_are_found_at_any_depth_and_nothing_else(folder):
    assert len(image_files(folder, 1000)) == NUM_FILES
    some = image_files(folder, 4)
    assert len(some) == 4
    assert some[0] == image_files(folder, 1000)[0]
    assert some[-1] == image_files(folder, 1000)[-1]


def test_parts_of_a_sample_add_up(run):
    assert run.num_files == NUM_FILES
    assert run.decode_s > 0
    assert run.decode_s + run.augment_s == pytest.approx(run.sample_cost_s.value)
    assert run.sample_cost_s.low <= run.sample_cost_s.value <= run.sample_cost_s.high
    assert (run.rates, run.workers_needed) == ((), None)


def test_mean_size_is_that_of_the_files(run, folder):
    sizes = [path.stat().st_size for path in image_files(folder, 1000)]
    assert run.sample_bytes == pytest.approx(np.mean(sizes))


def test_larger_images_cost_more(folder):
    files = image_files(folder, 8)
    small, large = (
        loading_times(files, image_size=size, augmentation="none", num_rounds=4)[1:, :, 2].min(axis=0).sum()
        for size in (16, 512)
    )
    assert large > 3 * small


def test_a_real_loader_runs_beside_its_prediction(folder):
    found = measure_loader(folder, image_size=32, workers=[0, 1], batch_size=4, seconds=0.2, num_rounds=2)
    assert [rate.num_workers for rate in found.rates] == [0, 1]
    for rate in found.rates:
        assert rate.measured_samples_per_s > 0
        assert rate.predicted_samples_per_s > 0


def test_the_command_tells_the_workers_a_device_needs(folder):
    words = ["measure", "loader", str(folder), "--workers", "", "--rounds", "2", "--image-size", "32"]
    result = CliRunner().invoke(app, [*words, "--samples-per-s", "1", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["workers_needed"] == 1
    page = CliRunner().invoke(app, [*words, "--samples-per-s", "1e9"]).stdout
    assert "are more than the" in page
    assert "for a plan: --loader-ms" in page


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_size": 0}, "an image size must be at least 1 pixel"),
        ({"augmentation": "spin"}, "an augmentation is one of crop, resize, none, got 'spin'"),
        ({"num_rounds": 1}, "rounds must be at least 2"),
        ({"workers": [-1]}, "numbers of workers must be zero or more"),
        ({"batch_size": 0}, "batch size must be at least 1"),
        ({"most_files": 0}, "number of files must be at least 1"),
        ({"seconds": 0.0}, "seconds of a try must be above zero"),
        ({"samples_per_s": -5.0}, "samples per second must be above zero"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(folder, changes, words):
    with pytest.raises(InvalidSetupError, match=words):
        measure_loader(folder, **changes)


def test_no_folder_no_images_and_damaged_images_are_refused(tmp_path):
    with pytest.raises(InvalidSetupError, match="expected a folder of images"):
        measure_loader(tmp_path / "none")
    with pytest.raises(InvalidSetupError, match="found none"):
        measure_loader(tmp_path)
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    with pytest.raises(MeasurementError, match=r"broken\.jpg' is not an image that can be decoded"):
        measure_loader(tmp_path)
