"""The trace that ships: small, whole, of the embedded model, and made of our own prompts."""

import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np

from steerpipe.core.config import EngineConfig
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.runtime.models import EMBEDDED
from steerpipe.store.reader import open_pack
from steerpipe.trace.collect import trace_options
from steerpipe.trace.engine import EngineTracer
from steerpipe.trace.models import pack_identity
from steerpipe.trace.prompts import FilePrompt
from steerpipe.trace.reader import TraceReader
from steerpipe.trace.tracing import EncodedPrompt

EXAMPLES = Path(__file__).parents[2] / "examples" / "traces"
TRACE = EXAMPLES / "nano-50k"


def test_it_has_fifty_thousand_tokens_in_at_most_3_6_megabytes() -> None:
    reader = TraceReader(TRACE)
    assert reader.tokens >= 50_000
    assert sum(file.stat().st_size for file in TRACE.iterdir()) <= 3_600_000
    assert sum(len(each.tokens) for each in reader) == reader.tokens, "every section has its checksum"


def test_it_was_made_by_the_embedded_model_from_the_prompts_beside_it() -> None:
    reader, codec = TraceReader(TRACE), TextCodec.load(EMBEDDED)
    assert reader.header.model == pack_identity(open_pack(EMBEDDED))
    lines: Callable[[], list[dict[str, str]]] = runpy.run_path(str(EXAMPLES / "make_prompts.py"))["lines"]
    given = {
        line["id"]: FilePrompt(line["id"], "", line.get("prompt", line.get("text", "")), "text" in line).encode(
            codec, raw=False
        )
        for line in lines()
    }
    assert set(reader.prompts) == given.keys()
    for each in reader:
        assert tuple(each.tokens[: each.prompt_tokens].tolist()) == given[each.prompt]


def test_the_embedded_model_still_routes_so(tmp_path: Path) -> None:
    """One prompt, read instead of answered: the classes of a product differ in its last bits, so a rank may move."""
    shortest = min(TraceReader(TRACE), key=lambda each: len(each.tokens))
    with EngineTracer(None, EngineConfig(dtype="float32", threads=1, cache_dir=str(tmp_path))) as tracer:
        options = trace_options(tracer.model, window=None, generate=0)
        ((found,),) = tracer.trace([EncodedPrompt("", tuple(shortest.tokens.tolist()))], options)
    assert np.mean(found.experts == shortest.experts) > 0.999
