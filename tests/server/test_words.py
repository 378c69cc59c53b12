"""The pure parts: lists of fields, thinking, tokens as text, Prometheus' format."""

import json
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from pydantic import BaseModel

from steerpipe.core.events import FinishReason, Timings, TokenEvent, TokenLogprob
from steerpipe.core.ids import SequenceId
from steerpipe.core.quality import AnswerQuality, Substituted
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.server import fields
from steerpipe.server.asking import Asked
from steerpipe.server.chat import ChatWriter
from steerpipe.server.exposition import Histogram, counter, expose, histogram
from steerpipe.server.faults import ApiError, to_json
from steerpipe.server.messages import Ended, Ticket
from steerpipe.server.outcomes import Outcome, figures_json
from steerpipe.server.pieces import TokenTexts
from steerpipe.server.schema import ChatRequest, CompletionRequest
from steerpipe.server.think import CLOSE, OPEN, Split, ThinkSplitter
from tests.engine import tiny_tokenizers


@pytest.mark.parametrize(
    ("theirs", "ours", "neutral", "inert"),
    [
        (ChatParams, ChatRequest, fields.NEUTRAL_CHAT, fields.INERT_CHAT),
        (CompletionParams, CompletionRequest, fields.NEUTRAL_COMPLETION, fields.INERT_COMPLETION),
    ],
)
def test_every_field_of_the_openai_client_is_in_exactly_one_list(
    theirs: type, ours: type[BaseModel], neutral: dict[str, tuple[object, ...]], inert: frozenset[str]
) -> None:
    for name in typing.get_type_hints(theirs):
        assert [name in ours.model_fields, name in neutral, name in inert].count(True) == 1, name


def test_a_field_that_would_change_the_output_passes_with_a_neutral_value_only() -> None:
    def kept(**raw: object) -> dict[str, object]:
        return fields.applied_fields(raw, ChatRequest, neutral=fields.NEUTRAL_CHAT, inert=fields.INERT_CHAT)

    assert kept(tools=[], response_format={"type": "text"}, logit_bias=None, user="x", top_k=3) == {"top_k": 3}
    for raw in ({"tools": [1]}, {"reasoning_effort": "low"}, {"logit_bias": {"1": 5}}, {"tool_choice": "required"}):
        with pytest.raises(ApiError, match=f"{next(iter(raw))} is not supported") as found:
            kept(**raw)
        assert found.value.code == "unsupported_parameter"
    with pytest.raises(ApiError, match="did you mean presence_penalty"):
        kept(presence_penality=1)


def split(pieces: list[str], *, inside: bool = False) -> Split:
    splitter = ThinkSplitter(inside=inside)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return Split("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("plain", False, Split("", "plain")),
        ("<think>\nhm\n</think>\n\nyes", False, Split("hm", "yes")),
        ("\n <think>hm</think>yes", False, Split("hm", "yes")),
        ("say <think>no</think>", False, Split("", "say <think>no</think>")),
        ("hm\n</think>\nyes </think>", True, Split("hm", "yes </think>")),
        ("<think>never closed\n\n", False, Split("never closed\n\n", "")),
        ("<think></think>", False, Split("", "")),
        ("<thin", False, Split("", "<thin")),
        ("  ", False, Split("", "  ")),
        ("a < b", False, Split("", "a < b")),
    ],
)
def test_thinking_is_told_apart_from_speaking(text: str, inside: bool, expected: Split) -> None:
    assert split([text], inside=inside) == expected


@given(
    st.lists(st.sampled_from([OPEN, CLOSE, "\n", "<", "</", "think", ">", "a", " "]), max_size=12).map("".join),
    st.lists(st.integers(1, 5), min_size=1),
    st.booleans(),
)
def test_where_a_text_is_cut_into_pieces_changes_nothing(text: str, sizes: list[int], inside: bool) -> None:
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    assert split(pieces, inside=inside) == split([text], inside=inside)


def thinking(pieces: list[str]) -> Outcome:
    """An answer of these pieces, one token each."""
    last = len(pieces) - 1
    events = [
        TokenEvent(SequenceId(0), place, piece, FinishReason.STOP if place == last else None)
        for place, piece in enumerate(pieces)
    ]
    timings = Timings(prompt_n=3, prompt_ms=1.0, predicted_n=len(pieces), predicted_ms=2.0)
    return Outcome(events, ended=Ended(Ticket(0), FinishReason.STOP, timings, None, None))


def test_a_chat_tells_thinking_apart_whole_and_in_chunks(tmp_path: Path) -> None:
    outcome = thinking(["<thi", "nk>\nhm", " hm\n</th", "ink>\n\n", "yes", " <b>", ""])
    asked = Asked((Request((1, 2, 3), SamplingSettings()),), choices=1)

    def writer() -> ChatWriter:
        return ChatWriter(asked, TokenTexts(byte_codec(tmp_path)), frozenset(), {"id": "x"})

    whole = writer().whole([outcome])
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm hm", "yes <b>")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    streaming = writer()
    chunks = [chunk for event in outcome.tokens for chunk in streaming.token(0, event)]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes <b>"
    assert not any("think" in str(delta) for delta in deltas)


def test_what_choices_went_without_is_told_in_the_form_of_generate() -> None:
    outcome = thinking(["a"])
    assert outcome.ended is not None and figures_json([outcome])["quality"] is None
    outcome.ended = replace(outcome.ended, quality=AnswerQuality("fast", Substituted(8, 4, 1, 0.25), calibrated=True))
    told = {"quality": "fast", "uses": 16, "substituted": 8, "patched": 2, "computed": 0, "share": 0.5}
    assert figures_json([outcome, outcome])["quality"] == told | {"expected_nats": 0.5}


def byte_codec(folder: Path) -> TextCodec:
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), folder)
    return TextCodec.load(folder)


def test_a_token_that_is_part_of_a_character_is_shown_as_bytes(tmp_path: Path) -> None:
    codec = byte_codec(tmp_path)
    ids = codec.encode("é a", add_special=False)
    texts = TokenTexts(codec)
    assert b"".join(codec.token_bytes(i) for i in ids) == "é a".encode()
    labels = [texts.label(i) for i in ids]
    assert "".join(label for label in labels if not label.startswith("bytes:")).strip()
    entry = texts.chat_entry(TokenLogprob(ids[0], -1.0), [])
    assert bytes(entry["bytes"]) == codec.token_bytes(ids[0])


def test_two_tokens_of_the_same_text_are_shown_once_with_the_likelier(tmp_path: Path) -> None:
    codec = byte_codec(tmp_path)
    token = codec.encode("a", add_special=False)[0]
    found = TokenTexts(codec).likeliest(TokenLogprob(token, -3.0), [TokenLogprob(token, -1.0)])
    assert found == {"a": -1.0}


def test_half_a_character_survives_as_json() -> None:
    assert json.loads(to_json({"a": "x\ud800é"})) == {"a": "x\ud800é"}


def test_the_exposition_is_prometheus_text() -> None:
    values = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        values.observe(value)
    text = expose([counter("a_total", "Help.", {'x"\n': 2.5}, "label"), histogram("b", "More.", values)])
    assert text.splitlines() == [
        "# HELP a_total Help.",
        "# TYPE a_total counter",
        'a_total{label="x\\"\\n"} 2.5',
        "# HELP b More.",
        "# TYPE b histogram",
        'b_bucket{le="0.1"} 2',
        'b_bucket{le="1"} 3',
        'b_bucket{le="+Inf"} 4',
        "b_sum 7.65",
        "b_count 4",
    ]
