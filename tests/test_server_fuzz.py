"""Bodies made from the server's own OpenAPI description: whatever comes, no 500, and no slot is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from servers import CHATTY, LiveServer, eventually, live, with_template
from tiny_chat import make_chat

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
          "/tokenize", "/detokenize")  # fmt: skip
QUIET = settings(
    max_examples=15, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = with_template(make_chat("qwen3", tmp_path_factory.mktemp("model")), CHATTY)
    with live(folder, {"max_context": 256}, max_choices=4, served_names=("tiny",)) as running:
        yield running


@pytest.mark.parametrize("path", ROUTES)
def test_described_bodies_are_never_a_500(server: LiveServer, path: str) -> None:
    operation = schemathesis.openapi.from_url(server.url + "/openapi.json")[path]["POST"]

    @QUIET
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "tiny"  # any other is a 404
        answer = case.call(timeout=60)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    run()
    eventually(lambda: server.busy == 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("path", ROUTES[:4])
def test_one_wrong_field_in_a_good_body_is_never_a_500(server: LiveServer, path: str) -> None:
    good: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 2,
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
    }
    good |= {"input": "x", "max_output_tokens": 2}
    schema = server.get("/openapi.json").json()
    name = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition(
        "/"
    )[2]
    fields = sorted(schema["components"]["schemas"][name]["properties"])
    good = {field: value for field, value in good.items() if field in fields}

    @seed(1)
    @settings(QUIET, max_examples=40)
    @given(field=st.sampled_from(fields), value=JSON)
    def run(field: str, value: Any) -> None:
        try:
            answer = server.post(path, {**good, field: value})
        except (ValueError, UnicodeError):  # the client can't write it: NaN, half a surrogate pair
            return
        assert answer.status_code < 500, (field, value, answer.text)

    run()
    eventually(lambda: server.busy == 0)
