"""Ways of scripts to change files, each in a folder of its own; run as a script behind the isolation.

``python file_actions.py TREE REQUEST ACCESS [KERNEL]`` prints a line of JSON: what came of each way. KERNEL "old" is
one without Landlock.
"""

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ACTIONS = {}


def action(function):
    ACTIONS[function.__name__] = function
    return function


def make_tree(tree):
    """A folder for each way, with a file, a hard link, a symbolic link, a folder and a database."""
    for name in ACTIONS:
        folder = tree / name
        (folder / "sub").mkdir(parents=True)
        for file in ("a", "b", "sub/c"):
            (folder / file).write_text(f"the user's {file}")
        (folder / "link").symlink_to("a")
        (folder / "hard").hardlink_to(folder / "b")
        with contextlib.closing(sqlite3.connect(folder / "db")) as database:
            database.execute("create table t (x)")


def same(path, text):
    assert Path(path).read_text() == text, Path(path).read_text()


def gone(*paths):
    assert not [path for path in paths if os.path.lexists(path)]


@action
def os_replace():
    os.replace("a", "b")
    same("b", "the user's a")
    gone("a")


@action
def os_rename_to_new():
    os.rename("a", "new")
    same("new", "the user's a")
    gone("a")


@action
def path_rename():
    Path("a").rename("b")
    same("b", "the user's a")


@action
def path_replace_own():
    Path("new").write_text("mine")
    Path("new").replace("a")
    same("a", "mine")


@action
def rename_folder():
    os.rename("sub", "moved")
    same("moved/c", "the user's sub/c")
    gone("sub")


@action
def replace_folder_with_empty():
    os.mkdir("empty")
    os.replace("sub", "empty")
    same("empty/c", "the user's sub/c")


@action
def move_file():
    shutil.move("a", "sub/a")
    same("sub/a", "the user's a")


@action
def move_folder():
    shutil.move("sub", "other")
    same("other/c", "the user's sub/c")


@action
def move_to_temporary():
    with tempfile.TemporaryDirectory() as folder:
        shutil.move("a", f"{folder}/a")
        same(f"{folder}/a", "the user's a")
    gone("a")


@action
def replace_from_temporary():
    handle, name = tempfile.mkstemp()
    os.write(handle, b"mine")
    os.close(handle)
    os.replace(name, "a")
    same("a", "mine")


@action
def rename_by_folder_descriptor():
    folder = os.open(".", os.O_RDONLY)
    os.rename("a", "b", src_dir_fd=folder, dst_dir_fd=folder)
    same("b", "the user's a")


@action
def overwrite():
    Path("a").write_text("mine")
    same("a", "mine")


@action
def write_new():
    Path("new").write_text("mine")
    same("new", "mine")
    assert "new" in os.listdir()


@action
def append():
    with open("a", "a") as file:
        file.write("+")
    same("a", "the user's a+")


@action
def read_and_write():
    with open("a", "r+b") as file:
        file.write(b"THE")
    same("a", "THE user's a")


@action
def write_through_a_link():
    Path("link").write_text("mine")
    same("link", "mine")


@action
def write_through_a_hard_link():
    Path("hard").write_text("mine")
    same("hard", "mine")


@action
def exclusive():
    with open("new", "x") as file:
        file.write("mine")
    same("new", "mine")


@action
def open_with_flags():
    handle = os.open("a", os.O_WRONLY | os.O_TRUNC)
    os.write(handle, b"mine")
    os.close(handle)
    same("a", "mine")


@action
def open_by_folder_descriptor():
    folder = os.open(".", os.O_RDONLY)
    handle = os.open("a", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)
    os.write(handle, b"mine")
    os.close(handle)
    same("a", "mine")


@action
def positioned_write():
    handle = os.open("a", os.O_RDWR)
    os.pwrite(handle, b"THE", 0)
    os.close(handle)
    same("a", "THE user's a")


@action
def send_file():
    source, target = os.open("a", os.O_RDONLY), os.open("b", os.O_WRONLY | os.O_TRUNC)
    os.sendfile(target, source, 0, 100)
    same("b", "the user's a")


@action
def copy_file_range():
    source, target = os.open("a", os.O_RDONLY), os.open("b", os.O_WRONLY | os.O_TRUNC)
    os.copy_file_range(source, target, 100)
    same("b", "the user's a")


@action
def mapped():
    with open("a", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:3] = b"THE"
    same("a", "THE user's a")


@action
def numpy_mapped():
    import numpy as np

    np.memmap("new", mode="w+", shape=8, dtype=np.uint8)[:] = 7
    assert Path("new").read_bytes() == bytes([7] * 8)
    np.memmap("a", mode="r+", dtype=np.uint8)[:3] = 65
    same("a", "AAA user's a")


@action
def truncate():
    os.truncate("a", 3)
    same("a", "the")


@action
def truncate_descriptor():
    handle = os.open("a", os.O_RDWR)
    os.ftruncate(handle, 3)
    same("a", "the")


@action
def remove():
    os.remove("a")
    gone("a")


@action
def unlink_links():
    Path("link").unlink()
    Path("hard").unlink()
    gone("link", "hard")
    same("a", "the user's a")


@action
def unlink_by_folder_descriptor():
    os.unlink("a", dir_fd=os.open(".", os.O_RDONLY))
    gone("a")


@action
def remove_tree():
    shutil.rmtree("sub")
    gone("sub")


@action
def remove_tree_and_make_it_again():
    shutil.rmtree("sub")
    os.makedirs("sub/deep")
    assert os.listdir("sub") == ["deep"]


@action
def remove_folder():
    os.remove("sub/c")
    os.rmdir("sub")
    gone("sub")


@action
def make_folders():
    os.makedirs("x/y/z")
    Path("x/y/z/f").write_text("mine")
    same("x/y/z/f", "mine")


@action
def symbolic_link():
    os.symlink("a", "new")
    same("new", "the user's a")


@action
def symbolic_link_then_write():
    Path("out").mkdir()
    os.symlink(os.path.abspath("a"), "out/latest")
    Path("out/latest").write_text("mine")
    same("out/latest", "mine")


@action
def hard_link():
    os.link("a", "new")
    same("new", "the user's a")


@action
def hard_link_then_write():
    os.link("a", "new")
    Path("new").write_text("mine")
    same("a", "mine")


@action
def change_mode():
    os.chmod("a", 0o600)
    assert stat.S_IMODE(os.stat("a").st_mode) == 0o600


@action
def change_mode_of_descriptor():
    os.fchmod(os.open("a", os.O_RDONLY), 0o600)
    assert stat.S_IMODE(os.stat("a").st_mode) == 0o600


@action
def change_owner():
    os.chown("a", os.getuid(), os.getgid())


@action
def change_times():
    os.utime("a", (1, 2))
    assert os.stat("a").st_mtime == 2


@action
def touch():
    Path("a").touch()
    Path("new").touch()
    assert Path("new").exists()


@action
def attribute():
    os.setxattr("a", "user.mine", b"1")
    assert os.getxattr("a", "user.mine") == b"1"


@action
def fifo():
    os.mkfifo("pipe")
    reader = threading.Thread(target=lambda: Path("pipe").read_text())
    reader.start()
    Path("pipe").write_text("mine")
    reader.join()


@action
def change_folder():
    os.chdir("sub")
    Path("c").write_text("mine")
    os.remove("../b")
    same("c", "mine")
    gone("../b")


@action
def change_folder_by_descriptor():
    os.fchdir(os.open("sub", os.O_RDONLY))
    os.remove("c")
    gone("c")


@action
def temporary_file_here():
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as file:
        file.write(b"mine")
    os.replace(file.name, "a")
    same("a", "mine")


@action
def temporary_folder_here():
    with tempfile.TemporaryDirectory(dir=".") as folder:
        Path(folder, "f").write_text("mine")


@action
def child_remove():
    subprocess.run(["rm", "a"], check=True, stderr=subprocess.DEVNULL)
    gone("a")


@action
def child_shell():
    subprocess.run("echo mine > a && mv b c && rm -r sub", shell=True, check=True, stderr=subprocess.DEVNULL)
    same("a", "mine\n")
    gone("b", "sub")


@action
def child_system():
    assert os.system("echo mine 2>/dev/null > new") == 0
    same("new", "mine\n")


@action
def child_python():
    code = "import os; os.replace('a', 'b')"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, stderr=subprocess.DEVNULL)
    same("b", "the user's a")


@action
def child_forked():
    child = os.fork()
    if not child:
        with contextlib.suppress(OSError):
            os.remove("a")
        os._exit(0)
    os.waitpid(child, 0)


@action
def child_spawned():
    import multiprocessing

    process = multiprocessing.get_context("spawn").Process(target=os.remove, args=(os.path.abspath("a"),))
    process.start()
    process.join()
    assert process.exitcode == 0
    gone("a")


@action
def database():
    with contextlib.closing(sqlite3.connect("db")) as found:
        found.execute("insert into t values (1)")
        found.commit()
    with contextlib.closing(sqlite3.connect("db")) as found:
        assert found.execute("select * from t").fetchall() == [(1,)]


@action
def new_database():
    with contextlib.closing(sqlite3.connect("new.db")) as found:
        found.execute("create table t (x)")
        found.commit()
    assert Path("new.db").exists()


@action
def libc_rename():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.rename(b"a", b"b"):
        raise PermissionError(ctypes.get_errno(), "rename")
    same("b", "the user's a")


@action
def libc_unlink():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unlink(b"a"):
        raise PermissionError(ctypes.get_errno(), "unlink")
    gone("a")


@action
def libc_open():
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.open(b"a", os.O_WRONLY | os.O_TRUNC)
    if handle < 0:
        raise PermissionError(ctypes.get_errno(), "open")
    libc.write(handle, b"mine", 4)
    same("a", "mine")


@action
def libc_truncate():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.truncate(b"a", ctypes.c_long(3)):
        raise PermissionError(ctypes.get_errno(), "truncate")
    same("a", "the")


@action
def libc_change_mode():
    ctypes.CDLL(None).chmod(b"a", 0o600)
    assert stat.S_IMODE(os.stat("a").st_mode) == 0o600


@action
def child_change_mode():
    subprocess.run(["chmod", "600", "a"], check=True)
    assert stat.S_IMODE(os.stat("a").st_mode) == 0o600


@action
def numpy_files():
    import numpy as np

    np.save("new.npy", np.ones(3))
    np.savez("new.npz", x=np.ones(3))
    assert np.load("new.npy").sum() == np.load("new.npz")["x"].sum() == 3


@action
def hdf5():
    import h5py

    with h5py.File("new.h5", "w") as file:
        file["x"] = [1, 2]
    with h5py.File("new.h5") as file:
        assert list(file["x"]) == [1, 2]


@action
def parquet():
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1, 2]}), "new.parquet")
    assert pq.read_table("new.parquet").num_rows == 2


@action
def tensors():
    import numpy as np
    from safetensors.numpy import load_file, save_file

    save_file({"x": np.ones(3, dtype=np.float32)}, "a")
    assert load_file("a")["x"].sum() == 3


def run(tree, request, access, kernel="new"):
    from forerun.script.capturing import isolation as guard
    from forerun.script.capturing.isolation import isolate

    if kernel == "old":
        guard._restrict_writing = lambda folders: False
    os.chdir(tree)
    isolate(request, access)
    said = {}
    for name, function in ACTIONS.items():
        os.chdir(tree / name)
        try:
            function()
        except ImportError:
            said[name] = "not installed"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "done"
    print(json.dumps(said))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
