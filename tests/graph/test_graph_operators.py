"""The JSON format of operator graphs."""

from __future__ import annotations

import graph_models
import pytest

from phalanx.errors import JobError, NotFoundError
from phalanx.graph.operators import parse_graph, read_graph

X = {"name": "x", "kind": "input", "shape": [4, 6]}


@pytest.mark.parametrize(
    ("operators", "said"),
    [
        ([X, X], "'x' stands twice"),
        ([{**X, "shap": [1]}], "unknown key 'shap'; did you mean shape?"),
        ([X, {"name": "y", "einsum": "ab->a", "inputs": ["z"]}], "its input 'z' is no operator"),
        ([X, {"name": "y", "einsum": "abc->a", "inputs": ["x"]}], "abc names 3 dimensions, its input 'x' has 2"),
        ([X, {"name": "y", "einsum": "ab->ac", "inputs": ["x"]}], "the size of c is not known: state it in 'sizes'"),
        ([X, {"name": "y", "einsum": "aa->a", "inputs": ["x"]}], "aa names a letter twice"),
        ([X, {"name": "y", "einsum": "ab,ab->a", "inputs": ["x"]}], "has 2 inputs, 'inputs' names 1"),
        ([X, {"name": "y", "einsum": "a-b", "inputs": ["x"]}], "is not of the form"),
        ([X, {"name": "y", "einsum": "ab->a", "inputs": ["x"], "whole": "q"}], "whole names 'q', which einsum lacks"),
        (
            [X, {"name": "y", "einsum": "a(bc)->abc", "inputs": ["x"], "sizes": {"b": 4, "c": 2}}],
            "b=4 × c=2 = 8, the dimension of 'x' is 6",
        ),
        (
            [{"name": "y", "einsum": "a->a", "inputs": ["z"]}, {"name": "z", "einsum": "a->a", "inputs": ["y"]}],
            "in a circle: y -> z -> y",
        ),
        ([X, {"name": "y", "einsum": "ab->a", "inputs": ["x"], "flops": -1}], "'flops' must be a number of at least 0"),
        ([{"name": "x", "kind": "input"}], "an input has a shape"),
        ([X], "no operator computes anything"),
        ([{**X, "dtype": []}], "dtype [] is none of fp64"),
    ],
)
def test_a_wrong_graph_is_refused_in_words(operators, said):
    problems = parse_graph({"format": "phalanx-graph-1", "operators": operators})[1]
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize("document", [None, [], {}, {"format": "x"}, {"format": "phalanx-graph-1", "operators": [3]}])
def test_what_is_no_graph_is_refused(document):
    assert parse_graph(document)[1]


def test_a_file_that_is_no_json_is_refused_with_its_line(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text('{"format":\n oops}')
    with pytest.raises(JobError, match="cannot be read as JSON: line 2"):
        read_graph(path)
    with pytest.raises(NotFoundError):
        read_graph(tmp_path / "none.json")


def test_a_graph_is_written_as_it_is_read():
    graph, problems = parse_graph(graph_models.gpt(2, b=8))
    again, more = parse_graph(graph.as_json())
    assert not problems
    assert not more
    assert again.operators == graph.operators
    assert again.as_json() == graph.as_json()
