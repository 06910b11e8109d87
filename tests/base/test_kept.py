"""Results that are kept for questions asked again."""

from dataclasses import replace

from forerun.base.kept import Kept, KeptBytes
from memory_streams import graph_of, training_stream


def test_a_result_is_made_once_for_its_parts_and_values():
    graph = graph_of(training_stream(momentum=True))
    kept: Kept[int] = Kept(2)
    calls = []

    def make():
        calls.append(None)
        return len(calls)

    assert [kept.get((graph,), (1,), make) for _ in range(3)] == [1, 1, 1]
    assert kept.get((graph,), (2,), make) == 2
    # An equal graph that is another object is another graph.
    assert kept.get((replace(graph),), (1,), make) == 3
    # That was one too many: all were forgotten, and are made again.
    assert kept.get((graph,), (1,), make) == 4


def test_results_go_by_their_size_and_their_last_use():
    kept: KeptBytes[str] = KeptBytes(100)
    for name in "abcd":
        kept.keep(name, name, 25)
    assert kept.find("a") == "a"
    kept.keep("e", "e", 20)  # too much: the one asked for longest ago goes
    assert [kept.find(name) for name in "abcde"] == ["a", None, "c", "d", "e"]
    assert kept.size_bytes == 95
    kept.keep("large", "large", 26)  # would push out all the others
    assert kept.find("large") is None
    kept.keep("a", "anew", 10)
    assert (kept.find("a"), kept.size_bytes, len(kept)) == ("anew", 80, 4)
