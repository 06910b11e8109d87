"""Questions made from the OpenAPI document: whatever is asked, the answer is one of those it describes."""

from __future__ import annotations

import json

import pytest
import requests
from hypothesis import HealthCheck, settings
from served import serving

from forerun.surface.web.app import make_app

schemathesis = pytest.importorskip("schemathesis")

NAMES = {"model": ["cnn:depth=2,base_filters=32", "mnist-cnn"], "device": ["t4", "a100-sxm4-40gb", "cpu"]}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    # Tracing is bounded: a made-up network that is too large ends in the child.
    with serving(tmp_path_factory.mktemp("served") / "log", "--limit-s", "20") as found:
        yield found


DOCUMENT = make_app().openapi()
made_up = schemathesis.openapi.from_dict(DOCUMENT)


def test_the_document_is_the_one_that_is_served(address):
    assert requests.get(f"{address}/openapi.json").json() == DOCUMENT


def _refusal_of_a_name():
    # A name that fits the document's form may still be no model: 400 is an answer to a well-formed question.
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    return positive_data_acceptance


@made_up.exclude(path="/models").parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_made_up_questions_have_answers_that_the_document_describes(case, address):
    response = case.call(base_url=address, timeout=120)
    assert response.status_code < 500, response.text
    assert "Traceback" not in response.text
    case.validate_response(response, excluded_checks=[_refusal_of_a_name()])
    if response.status_code >= 400:
        assert list(json.loads(response.text)) == ["error"]


@made_up.include(path=["/predict", "/scale"]).parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_made_up_figures_of_real_models_have_answers(case, address):
    # What is outside the document's form is refused before a model is looked for, which the test above asks.
    if not isinstance(case.body, dict) or case.meta.generation.mode.is_negative:
        return
    number = len(json.dumps(case.body, default=str))
    chosen = {key: names[number % len(names)] for key, names in NAMES.items()}
    body = json.dumps({**case.body, **chosen}, default=str)
    # There are hundreds; httpx would read all certificates for each.
    response = requests.post(
        f"{address}{case.path}", data=body, headers={"content-type": "application/json"}, timeout=120
    )
    assert response.status_code < 500, response.text
    if response.status_code == 200:
        answer = response.json()
        points = answer["points"] if case.path == "/scale" else [answer]
        assert all(point["step_time_s"]["value"] > 0 for point in points)
