"""Records the arguments a script knows and their values, while argparse parses them."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from forerun.profiling.hooks.recording import Recording

__all__ = ["record_arguments"]


def record_arguments(module: Any, recording: Recording) -> None:
    """Wraps ``ArgumentParser.parse_known_args``, which every way of parsing calls."""
    original = module.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        # Written before parsing, because a wrong argument ends the script there.
        recording.write("options", options=[_option(action, None) for action in _actions(self)])
        found = original(self, *args, **kwargs)
        recording.write("arguments", options=[_option(action, found[0]) for action in _actions(self)])
        return found

    module.ArgumentParser.parse_known_args = parse


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]


def _option(action: argparse.Action, values: argparse.Namespace | None) -> dict[str, Any]:
    value = action.default if values is None else getattr(values, action.dest, None)
    plain = value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
    return {"flags": list(action.option_strings), "name": action.dest, "value": plain}
