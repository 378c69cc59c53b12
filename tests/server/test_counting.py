"""`/metrics` equals what the clients counted; concurrent clients get what each gets alone."""

import json
import threading
from collections import Counter
from typing import Any

import pytest

from tests.server.running import LIMIT_SECONDS, Running, serving
from tests.support.tiny import FAMILIES, tiny

PROMPTS = [f"{'Tell me more. ' * place} Prompt number {place}" for place in range(8)]


def in_parallel(server: Running, prompts: list[str], **fields: Any) -> list[dict[str, Any]]:
    """All at once, from one thread each."""
    found: dict[int, dict[str, Any]] = {}
    barrier = threading.Barrier(len(prompts))

    def ask(place: int) -> None:
        barrier.wait()
        found[place] = server.complete(prompts[place], **fields)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return [found[place] for place in range(len(prompts))]


def test_eight_clients_at_once_get_the_tokens_that_each_gets_alone(server: Running) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "logprobs": 2}
    together = in_parallel(server, PROMPTS, **fields)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        alone = server.complete(prompt, **fields)["choices"][0]
        assert answer["choices"][0] == alone, "text and log probabilities, to the last bit"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_clients_of_every_family_get_the_tokens_that_each_gets_alone(family: str) -> None:
    with serving(tiny(family).folder) as server:
        together = in_parallel(server, PROMPTS, max_tokens=40)
        assert [answer["choices"] for answer in together] == [
            server.complete(prompt, max_tokens=40)["choices"] for prompt in PROMPTS
        ]


def test_the_counters_are_what_clients_counted(server: Running) -> None:
    before = server.metrics()
    answers = in_parallel(server, PROMPTS[:6], max_tokens=7, n=2)
    with server.client() as client, client.stream(
        "POST", "/v1/completions",
        json={"prompt": "Streamed", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}},
    ) as stream:  # fmt: skip
        last = [line for line in stream.iter_lines() if line][-2]
    answers.append(json.loads(last.removeprefix("data: ")) | {"choices": [{"finish_reason": None}]})
    refused = server.post("/v1/completions", {"prompt": ""})
    after = server.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    usages = [answer["usage"] for answer in answers]
    assert grown("steerpipe_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("steerpipe_generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown("steerpipe_prefix_cache_hits_total") == cached
    reasons = Counter(choice["finish_reason"] for answer in answers for choice in answer["choices"])
    ended = {r: grown(f'steerpipe_request_success_total{{finished_reason="{r}"}}') for r in ("stop", "length")}
    assert sum(ended.values()) == 13 and ended["length"] - reasons["length"] in (0, 1)  # the streamed one is either
    assert refused.status_code == 400
    assert grown('steerpipe_http_responses_total{status="400"}') == 1
    assert grown("steerpipe_time_to_first_token_seconds_count") == 13
    assert grown("steerpipe_e2e_request_latency_seconds_count") == 7


def test_the_tiers_of_the_experts_are_counted_as_the_answers_say(server: Running) -> None:
    before = server.metrics()
    answer = server.complete("Count my experts", max_tokens=6)
    after = server.metrics()
    for outcome, field in (("hit", "hits"), ("late", "late"), ("miss", "misses")):
        name = f'steerpipe_expert_leases_total{{outcome="{outcome}"}}'
        assert after[name] - before[name] == answer["experts"][field]
    assert after['steerpipe_expert_read_bytes_total{reason="demand"}'] > 0
    assert after['steerpipe_memory_bytes{what="expert slots (RAM)"}'] > 0
    assert after["steerpipe_scheduler_overhead_seconds_count"] == after["steerpipe_engine_steps_total"]


def test_the_server_describes_itself(server: Running) -> None:
    props = server.get("/props").json()
    assert props["max_context"] == 512 and props["vocab"] == 260 and props["has_chat_template"]
    assert str(server.folder.parent) not in server.get("/props").text, "no path of the machine"
    described = server.get("/openapi.json").json()
    assert "ChatRequest" in described["components"]["schemas"]
    assert set(described["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/metrics", "/health"}
