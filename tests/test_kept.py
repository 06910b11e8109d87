"""Results that are kept for questions asked again."""

from dataclasses import replace

from forerun.kept import Kept
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
