"""Limits of control groups, read from real files in both layouts."""

import pytest

from forerun.question.devices.here import container_limits


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


def membership(tmp_path, text):
    path = tmp_path / "membership"
    path.write_text(text, encoding="utf-8")
    return path


def test_version_2_reads_quota_and_memory(tmp_path):
    write(tmp_path / "fs" / "job", cpu__max="150000 100000\n", memory__max="2147483648\n")
    limits = container_limits(membership(tmp_path, "0::/job\n"), tmp_path / "fs")
    assert limits.num_cores == 1.5
    assert limits.memory_bytes == 2 * 1024**3


def test_version_2_takes_the_tightest_ancestor(tmp_path):
    write(tmp_path / "fs" / "a" / "b", cpu__max="400000 100000\n", memory__max="max\n")
    write(tmp_path / "fs" / "a", cpu__max="200000 100000\n", memory__max="1000000\n")
    limits = container_limits(membership(tmp_path, "0::/a/b\n"), tmp_path / "fs")
    assert limits.num_cores == 2.0
    assert limits.memory_bytes == 1_000_000


def test_a_container_sees_its_group_as_the_root(tmp_path):
    write(tmp_path / "fs", cpu__max="100000 100000\n", memory__max="5000\n")
    limits = container_limits(membership(tmp_path, "0::/not/visible/here\n"), tmp_path / "fs")
    assert (limits.num_cores, limits.memory_bytes) == (1.0, 5000)


def test_version_1_reads_quota_and_memory(tmp_path):
    write(
        tmp_path / "fs" / "cpu,cpuacct" / "job", cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n"
    )
    write(tmp_path / "fs" / "memory" / "job", memory__limit_in_bytes="3000\n")
    groups = membership(tmp_path, "5:cpu,cpuacct:/job\n4:memory:/job\n")
    limits = container_limits(groups, tmp_path / "fs")
    assert (limits.num_cores, limits.memory_bytes) == (2.5, 3000)


def test_no_limit_is_none_in_both_versions(tmp_path):
    write(tmp_path / "fs" / "job", cpu__max="max 100000\n", memory__max="max\n")
    write(tmp_path / "fs" / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    write(tmp_path / "fs" / "memory", memory__limit_in_bytes="9223372036854771712\n")
    groups = membership(tmp_path, "0::/job\n2:cpu:/\n3:memory:/\n")
    limits = container_limits(groups, tmp_path / "fs")
    assert (limits.num_cores, limits.memory_bytes) == (None, None)


@pytest.mark.parametrize("text", ["", "nonsense\n", "0:/\n", "::::\n"])
def test_systems_without_control_groups_have_no_limits(tmp_path, text):
    limits = container_limits(membership(tmp_path, text), tmp_path / "absent")
    assert (limits.num_cores, limits.memory_bytes) == (None, None)


def test_an_absent_membership_file_means_no_limits(tmp_path):
    limits = container_limits(tmp_path / "absent", tmp_path)
    assert (limits.num_cores, limits.memory_bytes) == (None, None)


@pytest.mark.parametrize("damaged", ["0 0", "100000", "x y", "100000 0", "1 2 3"])
def test_damaged_quotas_are_ignored(tmp_path, damaged):
    write(tmp_path / "fs", cpu__max=damaged)
    assert container_limits(membership(tmp_path, "0::/\n"), tmp_path / "fs").num_cores is None
