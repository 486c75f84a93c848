"""The server on a port, as a client and OpenAI's own client meet it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from generate.texts import alone
from model.kinds import build
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.generate.decoder import Decoder
from serve.serving import LIMITS, MODEL, Running, httpx, running, servers

# The server on a port, as a client meets it.


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running() as found:
        yield found


def test_a_completion_is_the_text_of_the_engine(here):
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "temperature": 0, "echo": True}
    answer = here.client.post("/v1/completions", json=body).json()
    # Another decoder: the server's thread may still be taking the text out of its own one's cache.
    [expected] = alone(Decoder.whole(build(MODEL)), [list(b"Hello")], max_new_tokens=6, temperature=0)
    assert answer["choices"][0]["text"] == ByteTokenizer().decode(expected)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")


def test_several_prompts_and_samples_are_choices_in_order(here):
    body = {"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 4, "seed": 5, "echo": True}
    answer = here.client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][0] for choice in answer["choices"]] == ["\x01", "\x01", "\x03", "\x03"]
    assert here.client.post("/v1/completions", json=body).json()["choices"] == answer["choices"]  # by the seed


def events_of(response: Any) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_has_the_same_text_in_pieces(here):
    body = {"prompt": "Hello", "max_tokens": 9, "temperature": 0, "stream": True}
    whole = here.client.post("/v1/completions", json=body | {"stream": False}).json()["choices"][0]["text"]
    with here.client.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as got:
        *chunks, usage = events_of(got)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9


def test_a_chat_streams_its_answer_too(here):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    whole = here.client.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["role"] == "assistant"
    with here.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as got:
        chunks = events_of(got)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_models_and_health(here):
    assert here.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert here.client.get("/v1/models/tiny").json()["object"] == "model"
    assert here.client.get("/health").json() == {"status": "ok", "texts": 0}


HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {"prompt": "a", "max_tokens": 51}, 400, "max_tokens 51: at most 50"),
        ("completions", {"prompt": "a" * 30, "max_tokens": 40}, 400, "30 + max_tokens 40 = 70 tokens exceed"),
        ("completions", {"prompt": "a" * 65}, 400, "the prompt has 65 tokens; at most 64"),
        ("completions", {"prompt": "a" * 6000}, 413, "more than 5,000 bytes"),
        ("completions", {"prompt": ""}, 400, "the prompt is empty"),
        ("completions", {"prompt": [300]}, 400, "tokens 300 to 300, but the model's are 0 to 255"),
        ("completions", {"prompt": {}}, 400, "prompt must be a text"),
        ("completions", {"prompt": "a", "n": 7}, 400, "7 texts in one request; at most 6"),
        ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature must be a number from 0"),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p=0.0: it must be above 0"),
        ("completions", {"prompt": "a", "stop": [""]}, 400, "stop must be"),
        ("completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs is not supported"),
        ("completions", {"prompt": "a", "logprobs": 0}, 400, "logprobs is not supported"),
        ("completions", {"prompt": "a", "max_token": 5}, 400, "did you mean"),
        ("completions", {"prompt": "a", "model": "gpt"}, 404, "no model 'gpt' here, only 'tiny'"),
        ("completions", {"prompt": "a", "model": "m" * 4000}, 404, f"no model '{'m' * 100}' here, only 'tiny'"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "are for stream: true"),
        (
            "completions",
            {"prompt": "a", "stream": True, "stream_options": {"include_more": True}},
            400,
            "include_more is not supported",
        ),
        ("chat/completions", {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, 400, "differ: give one"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}]},
            400,
            "cache of a part is not supported",
        ),
        ("chat/completions", {"messages": []}, 400, "messages must be a list of 1 to"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content must be"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "a"}]}, 400, "takes no tools"),
        ("nothing", {}, 404, "Not Found"),
        ("n" * 4000, {}, 404, f"POST /v1/{'n' * 96}: Not Found"),
    ],
)
def test_what_is_wrong_is_refused_as_openai_does(here, path: str, body: dict, status: int, message: str):
    answer = here.client.post(f"/v1/{path}", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_bodies_that_are_not_json_are_refused(here):
    assert here.client.post("/v1/completions", content=b"{}").status_code == 415
    headers = {"content-type": "application/json"}
    assert here.client.post("/v1/completions", content=b"{", headers=headers).status_code == 400
    chunks = (b"x" * 1000 for _ in range(10))  # without a length
    assert here.client.post("/v1/completions", content=chunks, headers=headers).status_code == 413


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a", "temperature": NaN}', "temperature must be a number from 0 to 100"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature must be a number from 0 to 100"),
        (b'{"prompt": "a", "n": 99999999999999999999999}', "a whole number of 23 digits"),
        (b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", "nested deeper than 64 levels"),
        (b'{"\\ud800": 1}', "half a surrogate pair"),
        (b"\xff", "can't decode byte 0xff"),
        (b"[]", "the body must be a JSON object"),
    ],
)
def test_hostile_json_gets_one_error(here, content: bytes, message: str):
    answer = here.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_connections_that_bring_no_request_are_closed(monkeypatch):
    monkeypatch.setattr(servers, "IDLE_S", 0.3)
    with running() as found:
        found.decoder.pause = 0.2
        address = found.server.servers[0].sockets[0].getsockname()
        with socket.create_connection(address, 30) as silent, socket.create_connection(address, 30) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
            assert found.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 6}).status_code == 200
            assert silent.recv(1) == slow.recv(1) == b""


def until(holds: Any) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_too_many_texts_wait_and_a_client_that_leaves_frees_its_place(here):
    here.decoder.pause = 0.1
    try:
        body = {"prompt": "a", "n": 5, "max_tokens": 50, "stream": True}
        with here.client.stream("POST", "/v1/completions", json=body) as got:
            lines = got.iter_lines()  # which closes the connection once nothing refers to it
            next(lines)
            full = here.client.post("/v1/completions", json={"prompt": "a", "n": 2})
            assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
            assert full.headers["retry-after"] == "1"
        until(lambda: here.service.texts == 0)
        with pytest.raises(httpx.ReadTimeout):
            here.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 50}, timeout=0.3)
        until(lambda: here.service.texts == 0)
        until(lambda: not here.service.thread.engine._running)
    finally:
        here.decoder.pause = 0.0


def test_a_key_is_demanded_and_chat_needs_a_template():
    with running(chat=None, key="sesame") as found:
        assert found.client.get("/health", headers={"Authorization": ""}).status_code == 200
        for wrong in ("", "Bearer", "Bearer wrong", "Basic sesame", "Bearer sésame".encode()):
            answer = found.client.get("/v1/models", headers={"Authorization": wrong})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert found.client.get("/v1/models").status_code == 200
        answer = found.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")


def test_another_sites_name_for_this_machine_is_refused(here, monkeypatch):
    """DNS rebinding: the page's own name leads to loopback."""
    monkeypatch.setattr(here.service, "loopback", True)
    for host, status in (
        ("evil.example:80", 403),
        ("localhost.evil.example", 403),
        ("LOCALHOST:1", 200),
        ("[::1]", 200),
    ):
        assert here.client.get("/v1/models", headers={"Host": host}).status_code == status
    refusal = here.client.post("/v1/completions", json={"prompt": "a"}, headers={"Host": "evil.example"}).json()
    assert "the Host 'evil.example' is not this machine's loopback" in refusal["error"]["message"]
    assert here.client.get("/v1/models").status_code == 200


def test_a_request_that_takes_too_long_ends_and_a_stop_lets_others_end():
    with running(replace(LIMITS, timeout=1)) as found:
        found.decoder.pause = 0.2
        body = {"prompt": "a", "max_tokens": 50}
        assert found.client.post("/v1/completions", json=body).status_code == 504
        with found.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as got:
            assert '"code": "timeout"' in "".join(got.iter_lines())
        found.decoder.pause, found.service.limits = 0.05, LIMITS
        body |= {"max_tokens": 8, "stream": True}
        with found.client.stream("POST", "/v1/completions", json=body) as got:
            found.server.should_exit = True
            assert events_of(got)[-1]["choices"][0]["finish_reason"] == "length"
        found.thread.join(30)
    assert found.codes == [0]


def test_an_engine_that_fails_ends_the_server_with_an_answer():
    with running() as found:
        found.decoder.fails = True
        answer = found.client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the model failed")
        found.thread.join(30)
    assert found.codes == [1]


# OpenAI's own client, where it is installed (pip install openai).


def test_openais_client_completes_chats_streams_and_understands_refusals():
    openai = pytest.importorskip("openai")
    with running(key="sesame") as found:

        def client(key: str) -> Any:
            return openai.OpenAI(base_url=f"{found.client.base_url}/v1", api_key=key, max_retries=0)

        api = client("sesame")
        assert [model.id for model in api.models.list()] == [api.models.retrieve("tiny").id] == ["tiny"]
        options = {"model": "tiny", "max_tokens": 6, "temperature": 0}
        whole = api.completions.create(prompt=["Hello", "He"], n=2, **options)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 24)
        pieces = [chunk.choices[0].text for chunk in api.completions.create(prompt="Hello", stream=True, **options)]
        assert "".join(pieces) == whole.choices[0].text
        answer = api.chat.completions.create(messages=HELLO, **options)
        usage = {"include_usage": True}
        *chunks, last = api.chat.completions.create(messages=HELLO, stream=True, stream_options=usage, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "length"
        assert last.usage == answer.usage
        with pytest.raises(openai.BadRequestError, match="the prompt has 65 tokens"):
            api.completions.create(model="tiny", prompt="a" * 65)
        with pytest.raises(openai.NotFoundError, match="no model"):
            api.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.AuthenticationError):
            client("wrong").models.list()
        found.decoder.pause = 0.1
        with api.completions.create(model="tiny", prompt="a", n=5, max_tokens=50, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError):
                api.completions.create(model="tiny", prompt="a", n=2)
