"""OpenAI's own client, where it is installed (pip install openai)."""

from __future__ import annotations

from typing import Any

import pytest

from serve.serving import running

openai = pytest.importorskip("openai")
HELLO = [{"role": "user", "content": "Hello"}]


def test_openais_client_completes_chats_streams_and_understands_refusals():
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
