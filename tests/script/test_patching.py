"""Patches surround what they are put around, and tell what they see."""

import argparse
from types import SimpleNamespace

from forerun.script.patching import follow_arguments, surround


class Loader:
    def batch(self, size):
        """One batch."""
        return list(range(size))


def test_a_function_is_surrounded_once_for_each_hook_and_keeps_its_words():
    class Mine(Loader):
        pass

    seen = []

    @surround(Mine, "batch")
    def first(batch, loader, size):
        seen.append("first")
        return batch(loader, size)

    @surround(Mine, "batch")
    def second(batch, loader, size):
        seen.append("second")
        return batch(loader, size + 1)

    assert Mine().batch(2) == [0, 1, 2]
    assert seen == ["second", "first"]
    assert Mine.batch.__doc__ == "One batch."
    assert Loader().batch(1) == [0]


def test_arguments_are_told_before_and_after_parsing():
    class Parser(argparse.ArgumentParser):
        pass

    known, parsed = [], []
    follow_arguments(SimpleNamespace(ArgumentParser=Parser), parsed=parsed.extend, known=known.extend)
    parser = Parser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", default=[1])
    parser.parse_args(["--epochs", "5"])
    assert [(option["name"], option["value"]) for option in known] == [("epochs", 3), ("sizes", "[1]")]
    assert [(option["name"], option["value"]) for option in parsed] == [("epochs", 5), ("sizes", "[1]")]
    assert parsed[0]["flags"] == ["--epochs"]
