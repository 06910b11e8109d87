"""The process that builds and traces a Keras model: a request on stdin, the graph to a file, an error on stdout."""

from __future__ import annotations

import contextlib
import sys

from forerun.errors import ForerunError
from forerun.tracing.keras_request import KerasRequest, error_text

__all__ = ["main"]


def main() -> int:
    """Answers the request on stdin; 0 if the graph was written, 1 with the error on the last line of stdout."""
    request = KerasRequest.from_json(sys.stdin.read())
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's file prints
            _answer(request)
    except ForerunError as error:
        print(error_text(error))
        return 1
    return 0


def _answer(request: KerasRequest) -> None:
    from pathlib import Path

    from forerun.tracing.keras_build import build_keras
    from forerun.tracing.keras_step import trace_built_keras
    from forerun.workload.graph_file import write_graph

    setup = request.training_setup()
    model = build_keras(request, setup)
    write_graph(trace_built_keras(model, setup), Path(request.graph_file))


if __name__ == "__main__":
    sys.exit(main())
