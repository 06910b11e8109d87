"""A real PostgreSQL server for the tests: made in a fresh folder, ended with the session."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def find_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    if found:
        return found[-1].parent
    path = shutil.which("initdb")
    return Path(path).parent if path else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server() -> Iterator[str]:
    """URL of an empty database; skips where PostgreSQL is not installed."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    # Not under pytest's folder, which only its owner may enter: the server runs as a user of its own.
    folder = Path(tempfile.mkdtemp(prefix="forerun-postgres-"))
    as_user: list[str] = []
    if os.geteuid() == 0:
        pwd.getpwnam("postgres")
        shutil.chown(folder, "postgres")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    data, port = folder / "data", free_port()

    def run(*command: str) -> None:
        subprocess.run([*as_user, *command], check=True, stdout=subprocess.DEVNULL, cwd="/", timeout=120)

    try:
        run(
            str(binaries / "initdb"), "-D", str(data), "-U", "forerun", "--auth=trust", "-E", "UTF8",
            "--locale=C", "--no-sync",
        )  # fmt: skip
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
        run(
            str(binaries / "pg_ctl"), "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start"
        )
        try:
            yield f"postgresql://forerun@127.0.0.1:{port}/postgres"
        finally:
            run(str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
