"""Synthetic images, and what is said where CIFAR-10 cannot be had."""

import pickle

import numpy as np
import pytest

from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measurement.datasets import (
    check_dataset,
    dataset_folder,
    image_batches,
    load_images,
    synthetic_images,
)


def test_synthetic_images_have_the_shapes_of_cifar10():
    train = load_images("synthetic", train=True, num_images=100)
    assert train.images.shape == (100, 3, 32, 32)
    assert train.images.dtype == np.uint8
    assert set(train.labels) <= set(range(10))
    assert len(load_images("synthetic", train=False)) == 10_000


def test_a_seed_gives_its_images_and_the_parts_differ():
    shape = (3, 8, 8)
    first, again = (synthetic_images(50, shape=shape, seed=3) for _ in range(2))
    assert np.array_equal(first.images, again.images)
    other_part = synthetic_images(50, shape=shape, seed=3, part=1)
    assert not np.array_equal(first.images, other_part.images)
    assert not np.array_equal(first.images, synthetic_images(50, shape=shape, seed=4).images)


def test_the_class_can_be_seen_in_the_mean_of_unseen_images_only():
    train, test = (synthetic_images(4000, shape=(3, 8, 8), part=part) for part in (0, 1))
    means = np.stack([train.images[train.labels == c].mean(0) for c in range(10)])
    scores = np.einsum("nchw,kchw->nk", test.images - test.images.mean(0), means - means.mean(0))
    scores -= 0.5 * ((means - means.mean(0)) ** 2).sum((1, 2, 3))
    assert (scores.argmax(1) == test.labels).mean() > 0.6


def test_batches_hold_each_image_once_between_minus_and_plus_one_half():
    found = synthetic_images(10, shape=(1, 4, 4), num_classes=3)
    batches = list(image_batches(found, 4, shuffle=True, seed=1))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    images = np.concatenate([images.numpy() for images, _ in batches])
    assert images.shape == (10, 1, 4, 4)
    assert np.sort(images.ravel()) == pytest.approx(np.sort(found.images.ravel() / 255 - 0.5), abs=1e-6)


def test_cifar10_is_read_from_the_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_DATASETS", str(tmp_path))
    monkeypatch.setattr("torchvision.datasets.CIFAR10._check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"):
        rows = np.arange(2 * 3072, dtype=np.int64).reshape(2, 3072) % 251
        (folder / name).write_bytes(pickle.dumps({"data": rows.astype(np.uint8), "labels": [3, 7]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    found = load_images("cifar10", train=True, num_images=5)
    assert dataset_folder() == tmp_path
    assert found.images.shape == (5, 3, 32, 32)
    assert found.images[0, 0, 0, :4].tolist() == [0, 1, 2, 3]  # the file holds red first, row by row
    assert found.labels.tolist() == [3, 7, 3, 7, 3]


def test_without_a_network_the_message_names_the_synthetic_images(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_DATASETS", str(tmp_path))
    # No name resolves, as on a machine without a network.
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(MeasurementError, match="--dataset synthetic"):
        check_dataset("cifar10")


def test_unknown_datasets_and_sizes_are_refused():
    with pytest.raises(InvalidSetupError, match="did you mean cifar10"):
        check_dataset("cifar100")
    with pytest.raises(InvalidSetupError, match="32 pixels, got image size 64"):
        check_dataset("cifar10", image_size=64)
    check_dataset("synthetic", image_size=64)


def test_mnist_is_read_from_the_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_DATASETS", str(tmp_path))
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images = np.arange(6 * 28 * 28, dtype=np.int64).reshape(6, 28, 28) % 251
    for part in ("train", "t10k"):
        header = np.asarray([0x803, 6, 28, 28], dtype=">i4").tobytes()
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.astype(np.uint8).tobytes())
        header = np.asarray([0x801, 6], dtype=">i4").tobytes()
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes([5, 0, 4, 1, 9, 2]))
    found = load_images("mnist", train=True, num_images=4, image_size=28, num_channels=1)
    assert found.images.shape == (4, 1, 28, 28)
    assert found.labels.tolist() == [5, 0, 4, 1]
    with pytest.raises(InvalidSetupError, match="mnist has images of 28 pixels"):
        check_dataset("mnist", 32)


def test_patchcamelyon_is_read_as_far_as_it_is_wanted(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    monkeypatch.setenv("FORERUN_DATASETS", str(tmp_path))
    (tmp_path / "pcam").mkdir()
    for name, shape in (("x", (5, 96, 96, 3)), ("y", (5, 1, 1, 1))):
        with h5py.File(tmp_path / "pcam" / f"camelyonpatch_level_2_split_train_{name}.h5", "w") as file:
            file[name] = np.ones(shape, dtype=np.uint8)
    found = load_images("pcam", train=True, num_images=3, image_size=96)
    assert found.images.shape == (3, 3, 96, 96)
    assert found.labels.tolist() == [1, 1, 1]
