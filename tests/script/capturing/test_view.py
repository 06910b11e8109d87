"""Whatever a script does to files, the user's files stay as they are: contents, times, owners and links."""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import file_actions
import pytest

SOURCE = Path(__file__).parents[3] / "src"
USER = 4321
NOT_SEEN_BY_LANDLOCK = {"child_change_mode", "libc_change_mode"}
NOT_SEEN_BY_PYTHON = {
    "libc_change_mode", "libc_open", "libc_rename", "libc_truncate", "libc_unlink", "hdf5", "parquet", "tensors",
}  # fmt: skip
REDIRECTED = (
    "overwrite", "write_new", "append", "read_and_write", "exclusive", "open_with_flags", "numpy_mapped", "numpy_files",
    "make_folders", "path_replace_own", "mapped", "fifo",
)  # fmt: skip


def state(tree):
    """Each path beneath a folder, with all that can be changed of it but the time of the last reading."""
    found = {}
    for path in (tree, *sorted(tree.rglob("*"))):
        status = path.lstat()
        text = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        attributes = [] if path.is_symlink() else os.listxattr(path)
        found[str(path)] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_size, status.st_mtime_ns,
            status.st_ctime_ns, hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest(),
            attributes,
        )  # fmt: skip
    return found


@pytest.fixture
def place():
    """A folder that another user can reach, with code for that user: the checkout may lie in a private folder."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        code = Path(folder, "code")
        for path in (each for kind in ("py", "pyi", "toml") for each in SOURCE.rglob(f"*.{kind}")):
            copy = code / path.relative_to(SOURCE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        shutil.copyfile(file_actions.__file__, code / "file_actions.py")
        yield Path(folder)


def python(user):
    """An interpreter that a user can run."""
    if user is None:
        return sys.executable
    if os.geteuid():
        pytest.skip("only root can become another user")
    for path in (sys.executable, "/usr/bin/python3"):
        code = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        with contextlib.suppress(OSError):
            if subprocess.run(code, user=user, group=user, extra_groups=()).returncode == 0:
                return path
    pytest.skip("another user has no Python")


def act(place, access, *, user=None, kernel="new"):
    """What came of each way to change a file, and the changed paths."""
    tree, request = place / "tree", place / "scratch" / "0"
    tree.mkdir()
    (request.parent / "tmp").mkdir(parents=True)
    request.mkdir()
    file_actions.make_tree(tree)
    if user is not None:
        for path in (place, *place.rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)
    before = state(tree)
    code = [python(user), str(place / "code" / "file_actions.py"), str(tree), str(request), access, kernel]
    environment = {
        **os.environ, "TMPDIR": str(request.parent / "tmp"), "PYTHONPATH": str(place / "code"),
        "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(place),
    }  # fmt: skip
    ended = subprocess.run(
        code,
        env=environment,
        capture_output=True,
        text=True,
        user=user,
        group=user,
        extra_groups=None if user is None else (),
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    after = state(tree)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    guarded = (request / "guarded").read_text() if (request / "guarded").exists() else ""
    return json.loads(ended.stdout), changed, guarded


@pytest.mark.parametrize("user", [None, USER])
def test_a_view_lets_everything_be_done_and_nothing_be_changed(place, user):
    said, changed, guarded = act(place, "view", user=user)
    if guarded:
        pytest.skip(f"no copy-on-write view here: {guarded}")
    assert {name: text for name, text in said.items() if text not in ("done", "not installed")} == {}
    assert changed == set()


@pytest.mark.parametrize("user", [None, USER])
def test_a_guard_redirects_what_python_writes_and_refuses_the_rest(place, user):
    said, changed, guarded = act(place, "guard", user=user)
    assert guarded == "it was not asked for"
    assert {Path(path).relative_to(place / "tree").parts[0] for path in changed} <= NOT_SEEN_BY_LANDLOCK
    assert {name for name in REDIRECTED if said[name] not in ("done", "not installed")} == set()
    refused = {name for name, text in said.items() if text not in ("done", "not installed")}
    assert {"os_replace", "remove_tree", "change_mode", "hard_link", "child_remove", "database"} <= refused
    assert "--unsafe-files" in said["os_replace"]


def test_a_guard_on_an_older_kernel_sees_what_goes_through_python(place):
    said, changed, _ = act(place, "guard", kernel="old")
    assert {Path(path).relative_to(place / "tree").parts[0] for path in changed} <= NOT_SEEN_BY_PYTHON
    assert "--unsafe-files" in said["child_remove"]
    assert "--unsafe-files" in said["database"]
    assert "--unsafe-files" in said["child_spawned"]


def test_upper_layers_are_removed_by_the_user_who_made_them(place):
    user = None if os.geteuid() else USER
    act(place, "view", user=user)
    code = f"import shutil; shutil.rmtree({str(place / 'scratch')!r})"
    subprocess.run(
        [python(user), "-c", code],
        user=user,
        group=user,
        extra_groups=None if user is None else (),
        check=True,
    )


def isolated(code, scratch, access="view"):
    """The output of code that runs isolated."""
    (scratch / "0").mkdir(parents=True)
    link = scratch.parent / "link"  # a temporary folder may be a link
    link.symlink_to(scratch)
    request = link / "0"
    start = (
        "from pathlib import Path; from forerun.script.capturing.isolation import isolate\n"
        f"isolate(Path({str(request)!r}), {access!r})\n"
    )
    command = [sys.executable, "-c", start + code]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_the_loopback_is_the_only_network(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as outside:
        code = f"""
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
    print("near")
try:
    socket.create_connection(("198.51.100.1", 80), timeout=5)
except OSError as error:
    print(error)
try:
    socket.create_connection(("127.0.0.1", {outside.getsockname()[1]})).close()
except ConnectionRefusedError:
    print("another loopback")
"""
        said = isolated(code, tmp_path / "scratch").splitlines()
    assert said[0] == "near"
    assert said[1].endswith("a capture has no network: load what it needs before")
    assert said[2:] == ["another loopback"] or (tmp_path / "scratch/0/guarded").exists()


def test_the_scratch_folder_is_the_real_one(tmp_path):
    isolated(f"Path({str(tmp_path / 'scratch' / 'result')!r}).write_text('kept')", tmp_path / "scratch")
    assert (tmp_path / "scratch" / "result").read_text() == "kept"


def test_files_are_the_users_own_if_asked_for(tmp_path):
    isolated(f"Path({str(tmp_path / 'result')!r}).write_text('kept')", tmp_path / "scratch", "unsafe")
    assert (tmp_path / "result").read_text() == "kept"


def test_shared_memory_is_empty_and_not_the_users(tmp_path):
    name = f"/dev/shm/forerun-test-{os.getpid()}"
    said = isolated(f"import os; print(os.listdir('/dev/shm')); Path({name!r}).touch()", tmp_path / "scratch")
    if not (tmp_path / "scratch/0/guarded").exists():
        assert said == "[]\n"
        assert not Path(name).exists()
    Path(name).unlink(missing_ok=True)
