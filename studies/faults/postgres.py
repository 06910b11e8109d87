"""A PostgreSQL server of our own in a fresh folder, which can be stopped and started."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.base.errors import FailureError


class PostgresServer:
    """A server on this machine.

    Args:
        binaries: Folder of ``initdb`` and ``pg_ctl``.
        folder: Folder of its data.
    """

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._folder = binaries, folder
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # the server refuses to run as root
            pwd.getpwnam("postgres")
            shutil.chown(folder, "postgres")
            self._as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        self._data, self._port = folder / "data", _free_port()
        self._run("initdb", "-U", "forerun", "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync")

    @property
    def url(self) -> str:
        """URL of its database."""
        return f"postgresql://forerun@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder}"
        self._run("pg_ctl", "-w", "-l", str(self._folder / "log"), "-o", f"{options} -c fsync=off", "start")

    def stop(self) -> None:
        """Stops the server at once, as a crash would."""
        self._run("pg_ctl", "-m", "immediate", "stop")

    def _run(self, program: str, *words: str) -> None:
        command = [*self._as_user, str(self._binaries / program), "-D", str(self._data), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", timeout=120)


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """A running server with an empty database.

    Raises:
        FailureError: PostgreSQL is not installed.
    """
    binaries = find_binaries()
    if binaries is None:
        raise FailureError("PostgreSQL is not installed; install it with: apt-get install postgresql")
    # Not in a folder that only its owner may enter: the server runs as a user of its own.
    folder = Path(tempfile.mkdtemp(prefix="forerun-postgres-", dir="/tmp"))
    try:
        server = PostgresServer(binaries, folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_binaries() -> Path | None:
    """Folder of PostgreSQL's programs, None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    path = shutil.which("initdb")
    return Path(path).parent if path else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
