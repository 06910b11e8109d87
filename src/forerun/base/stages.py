"""Names of the stages of slow work, told to whoever listens: loading a framework, tracing, fitting.

A stage is a record of the logger ``forerun`` at its begin and at its end; without a handler nothing is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

LOGGER = logging.getLogger("forerun")
"""Logger of the stages; the attribute ``stage`` of a record is ``begin`` or ``end``."""


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Tells the begin and the end of a stage.

    Args:
        what: The stage in words, such as ``tracing timm:convnext_tiny``.
    """
    LOGGER.info("%s", what, extra={"stage": "begin"})
    try:
        yield
    finally:
        LOGGER.info("%s: done", what, extra={"stage": "end"})


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None] | None]:
    """A stage whose words change: gives the function that tells the new ones, or None where nobody listens.

    Args:
        what: The stage in words, until others are told.
    """
    if not LOGGER.isEnabledFor(logging.INFO):
        yield None
        return
    with stage(what), ExitStack() as part:

        def say(words: str) -> None:
            part.close()
            part.enter_context(stage(words))

        yield say
