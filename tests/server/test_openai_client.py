"""The real `openai` client, sync and async, as people use it."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from steerpipe import Pipeline
from tests.server.running import LIMIT_SECONDS, Running

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_SECONDS, max_retries=0)


@pytest.fixture(scope="module")
def pipe(server: Running) -> Any:
    with Pipeline(server.folder, dtype="float32", threads=1, profile=False) as pipe:
        yield pipe


def test_models_are_listed(client: OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["tiny-moe"]
    assert client.models.retrieve("tiny-moe").id == "tiny-moe"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")


def test_a_chat_is_what_the_pipeline_answers(client: OpenAI, pipe: Pipeline) -> None:
    answer = client.chat.completions.create(model="tiny-moe", messages=MESSAGES, **GREEDY)
    own = pipe.generate_batch([MESSAGES], temperature=0, max_tokens=10, ignore_eos=True)[0]
    assert answer.choices[0].message.content == own.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(own.prompt_token_ids)
    assert answer.usage.completion_tokens == 10


def test_a_stream_is_the_same_text_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny-moe", messages=MESSAGES, **GREEDY)
    stream = client.chat.completions.create(
        model="tiny-moe", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_choices_of_a_seed_differ_from_each_other_and_come_again(client: OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny-moe", messages=MESSAGES, n=3, seed=-5, temperature=1.0, max_tokens=8
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first


def test_a_stream_of_several_choices_keeps_them_apart(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny-moe", "messages": MESSAGES, "n": 3, "seed": 7, "max_tokens": 8}
    whole = client.chat.completions.create(**asked)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny-moe", prompt="Once", **GREEDY).choices[0].text
    stop = whole[4:6]
    cut = client.completions.create(model="tiny-moe", prompt="Once", stop=[stop, "never there"], **GREEDY).choices[0]
    assert cut.text == whole[: whole.find(stop)]
    assert cut.finish_reason == "stop"


def test_log_probabilities_of_a_chat(client: OpenAI, pipe: Pipeline) -> None:
    answer = client.chat.completions.create(
        model="tiny-moe", messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    own = pipe.generate_batch([MESSAGES], temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)[0]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == pytest.approx([e.logprob for e in own.logprobs], abs=1e-5)
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * 10
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    text = answer.choices[0].message.content or ""
    assert raw.decode(errors="replace").replace("\ufffd", "") == text.replace("\ufffd", "")


def test_a_completion_repeats_its_prompt_with_log_probabilities(client: OpenAI, pipe: Pipeline) -> None:
    answer = client.completions.create(
        model="tiny-moe", prompt="Hello", echo=True, logprobs=1, max_tokens=2, temperature=0
    )
    choice = answer.choices[0]
    own = pipe.score("Hello", raw=True, logprobs=1)
    assert choice.text.startswith("Hello")
    assert choice.logprobs is not None
    found = choice.logprobs.token_logprobs or []
    assert found[0] is None
    assert found[1:5] == pytest.approx([entry.logprob for entry in own.prompt_logprobs], abs=1e-6)
    assert choice.logprobs.tokens is not None and choice.logprobs.tokens[:5] == list("Hello")
    assert choice.logprobs.text_offset is not None and choice.logprobs.text_offset[:5] == [0, 1, 2, 3, 4]


def test_a_prompt_of_token_ids_can_be_scored_without_an_answer(client: OpenAI, pipe: Pipeline) -> None:
    ids = list(pipe.encode("Score me", raw=True))
    answer = client.completions.create(model="tiny-moe", prompt=ids, echo=True, logprobs=0, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == "Score me" and choice.logprobs is not None
    own = [entry.logprob for entry in pipe.score(ids).prompt_logprobs]
    assert (choice.logprobs.token_logprobs or [])[1:] == pytest.approx(own, abs=1e-6)
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_a_streamed_echo_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny-moe", "prompt": "Stream me", "echo": True, "logprobs": 2, "max_tokens": 5, "temperature": 0,
    }  # fmt: skip
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert whole.logprobs is not None
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, field)] == getattr(whole.logprobs, field)


def test_several_prompts_are_answered_in_their_order(client: OpenAI) -> None:
    prompts = ["One", "Two", "Three"]
    together = client.completions.create(model="tiny-moe", prompt=prompts, n=1, **GREEDY)
    alone = [client.completions.create(model="tiny-moe", prompt=p, **GREEDY).choices[0].text for p in prompts]
    assert [choice.text for choice in together.choices] == alone
    ids = [[10, 11], [12, 13, 14]]
    assert len(client.completions.create(model="tiny-moe", prompt=ids, **GREEDY).choices) == 2


def test_errors_are_those_of_the_api(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny-moe'"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature") as found:
        client.chat.completions.create(model="tiny-moe", messages=MESSAGES, temperature=-1)
    assert found.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="the context holds 512") as found:
        client.completions.create(model="tiny-moe", prompt="x" * 600)
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="response_format is not supported") as found:
        client.chat.completions.create(model="tiny-moe", messages=MESSAGES, response_format={"type": "json_object"})
    assert found.value.param == "response_format"


def test_inert_fields_are_accepted(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny-moe", messages=MESSAGES, user="me", metadata={"a": "b"}, store=False, service_tier="auto",
        prompt_cache_key="k", safety_identifier="s", max_completion_tokens=2,
    )  # fmt: skip
    assert answer.usage is not None and answer.usage.completion_tokens in (1, 2)


def test_a_second_turn_finds_the_first_in_the_cache(client: OpenAI) -> None:
    first: Any = [{"role": "user", "content": "A question that is long enough to fill some cells of sixteen."}]
    answer = client.chat.completions.create(model="tiny-moe", messages=first, **GREEDY)
    second = [*first, {"role": "assistant", "content": answer.choices[0].message.content}, *MESSAGES]
    again = client.chat.completions.create(model="tiny-moe", messages=second, **GREEDY)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 64


def test_a_stream_that_is_closed_early_stops_the_engine(client: OpenAI, server: Running) -> None:
    before = server.metrics()['steerpipe_request_success_total{finished_reason="cancelled"}']
    stream = client.chat.completions.create(
        model="tiny-moe", messages=MESSAGES, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    for _, _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    while server.metrics()["steerpipe_num_requests_running"]:
        pass
    assert server.metrics()['steerpipe_request_success_total{finished_reason="cancelled"}'] == before + 1


def test_the_async_client_gets_the_same_answers(client: OpenAI, server: Running) -> None:
    async def ask() -> tuple[str | None, str]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=LIMIT_SECONDS, max_retries=0,
            http_client=httpx.AsyncClient(),
        ) as other:  # fmt: skip
            whole = await other.chat.completions.create(model="tiny-moe", messages=MESSAGES, **GREEDY)
            stream = await other.completions.create(model="tiny-moe", prompt="Once", stream=True, **GREEDY)
            pieces = [chunk.choices[0].text async for chunk in stream]
            with pytest.raises(openai.BadRequestError):
                await other.completions.create(model="tiny-moe", prompt="Once", n=0)
            return whole.choices[0].message.content, "".join(pieces)

    text, streamed = asyncio.run(ask())
    assert (
        text == client.chat.completions.create(model="tiny-moe", messages=MESSAGES, **GREEDY).choices[0].message.content
    )
    assert streamed == client.completions.create(model="tiny-moe", prompt="Once", **GREEDY).choices[0].text
