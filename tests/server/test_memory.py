"""A server with little memory: shared pages, and answers that do without missing experts."""

import threading
from pathlib import Path

import pytest

from tests.server.running import serving

PROMPTS = [f"{'again and ' * place}question {place}" for place in range(12)]


@pytest.fixture(scope="module")
def exact(model: Path) -> dict[str, str]:
    """Every expert resident, asked one after the other."""
    with serving(model) as server:
        return {prompt: server.complete(prompt, max_tokens=40)["choices"][0]["text"] for prompt in PROMPTS}


def test_keys_and_values_take_pages_from_the_experts_and_no_answer_changes(model: Path, exact: dict[str, str]) -> None:
    with serving(model, fast_memory="1536KiB", kv_memory="shared") as server:
        found: dict[str, str] = {}

        def ask(prompt: str) -> None:
            found[prompt] = server.complete(prompt, max_tokens=40)["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == exact
        metrics, said = server.metrics(), server.get("/props").json()
        pages = {holder: metrics[f'steerpipe_pages{{holder="{holder}"}}'] for holder in ("experts", "kv")}
        assert sum(pages.values()) == 5
        taken, returned = metrics["steerpipe_pages_taken_total"], metrics["steerpipe_pages_returned_total"]
        assert taken - returned == pages["kv"] and returned > 3
        assert metrics["steerpipe_expert_evictions_total"] > 0
        assert any(row["what"] == "experts, and keys and values" for row in said["memory"])
        assert said["settings"]["quality"] == "exact" and not any("expert_uses" in name for name in metrics)


def test_an_answer_says_how_much_of_it_was_substituted(model: Path) -> None:
    with serving(model, fast_memory="25%", quality="drop", predict="off") as server:
        quality = server.complete("a question", max_tokens=40)["quality"]
        assert 0 < quality["substituted"] <= quality["uses"]
        assert quality["share"] == pytest.approx(quality["substituted"] / quality["uses"], abs=1e-6)
        two = server.complete("a question", max_tokens=40, n=2, temperature=1, seed=1)["quality"]
        assert two["uses"] == 2 * quality["uses"]
        assert quality["quality"] == "drop" and quality["expected_nats"] is None
        assert server.get("/props").json()["settings"]["quality"] == "drop"
        metrics = server.metrics()
        uses = {how: metrics[f'steerpipe_expert_uses_total{{how="{how}"}}'] for how in ("exact", "substituted")}
        assert sum(uses.values()) == quality["uses"] + two["uses"]
        assert uses["substituted"] == quality["substituted"] + two["substituted"]
