"""Answers remembered for a graph."""

from dataclasses import replace

from memory_streams import graph_of, training_stream

from forerun.costs.per_graph import PerGraph


def test_an_answer_is_found_once_for_a_graph_and_a_key():
    graph = graph_of(training_stream(momentum=True))
    kept: PerGraph[int] = PerGraph(2)
    calls = []

    def find():
        calls.append(None)
        return len(calls)

    assert [kept.get(graph, 1, find) for _ in range(3)] == [1, 1, 1]
    assert kept.get(graph, 2, find) == 2
    # An equal graph that is another object is another graph.
    assert kept.get(replace(graph), 1, find) == 3
    # That was one too many: all were forgotten, and are found again.
    assert kept.get(graph, 1, find) == 4
