"""A real PostgreSQL server for the tests: made in a fresh folder, ended with the session."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forerun.base.errors import FailureError
from studies.faults import stores


@contextmanager
def running_server() -> Iterator[str]:
    """URL of an empty database; skips where PostgreSQL is not installed."""
    try:
        with stores.running_server() as server:
            yield server.url
    except FailureError as error:
        pytest.skip(str(error))
