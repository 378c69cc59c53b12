"""One memory for experts and keys and values, shared in pages or divided once: hits of the same answers, with nano.

    python benchmarks/shared_pages.py

Counts only, no times: any machine will do. Fails if an answer differs. Prints one JSON object last.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from steerpipe import Pipeline
from steerpipe.transfer.counters import LadderCounters

PAGE_BYTES = 4_718_592  # of nano in float32: 128 tokens, or 42 experts
PAGES, KV_PAGES = 20, 10
TOTAL, KV = str(PAGES * PAGE_BYTES), str(KV_PAGES * PAGE_BYTES)
WAYS = {
    "shared": {"fast_memory": TOTAL, "kv_memory": "shared"},
    "apart": {"fast_memory": str((PAGES - KV_PAGES) * PAGE_BYTES), "kv_memory": KV},
}
PROMPTS = (
    "Once upon a time there was a little fox who",
    "The best way to learn a language is to",
    "Please tell me how to cook rice",
    "A letter to my old friend in the city",
)
SETTINGS: dict[str, Any] = {"raw": True, "temperature": 0.0, "max_tokens": 48}


def counts(pipe: Pipeline) -> LadderCounters:
    found = pipe.counters()
    assert found is not None, "experts come and go"
    return found


def answer(settings: dict[str, str]) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Four answers one after the other, then eight at once: their tokens, and the share of experts that were there."""
    fixed: dict[str, Any] = {"dtype": "float32", "threads": 1, "profile": False, "max_context": 512, "predict": "off"}
    with Pipeline(**fixed, **settings) as pipe:
        start = counts(pipe)
        said = [pipe.generate(prompt, **SETTINGS).token_ids for prompt in PROMPTS]
        alone = counts(pipe)
        eight = [f"{prompt} {word}" for prompt in PROMPTS for word in ("and", "but")]
        said += [each.token_ids for each in pipe.generate_batch(eight, **SETTINGS)]
        together, pages = counts(pipe) - alone, pipe.pages()
        alone = alone - start
        found = {"alone_hits": alone.hits / alone.leased, "eight_hits": together.hits / together.leased}
        return said, found | {"pages": None if pages is None else asdict(pages)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = {name: answer(settings) for name, settings in WAYS.items()}
    first, second = (said for said, _ in results.values())
    assert first == second, "an answer depends on who holds the memory"
    print(json.dumps({name: found for name, (_, found) in results.items()}))


if __name__ == "__main__":
    main()
