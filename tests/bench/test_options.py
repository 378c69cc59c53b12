"""What `bench decode` may be asked for."""

from typing import Any

import pytest

from steerpipe.bench.options import DecodeOptions, parse_options
from steerpipe.core.errors import ConfigError
from steerpipe.store.formats import ExpertFormat

WORDS: dict[str, Any] = {"formats": "bf16", "residency": "100", "context": "128", "batch": "1"}


def test_lists_are_divided_by_commas() -> None:
    options = parse_options(formats="bf16, int4", residency="100,50%,0", context="128,4k", batch="1,8", tokens=4)
    assert options.formats == (ExpertFormat.BFLOAT16, ExpertFormat.INT4)
    assert options.residencies == (100.0, 50.0, 0.0)
    assert options.contexts == (128, 4096)
    assert options.batches == (1, 8)
    assert options.longest == 4096 + 32 + 4 + 1


def test_defaults_are_those_of_the_words() -> None:
    assert parse_options(**WORDS) == DecodeOptions()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"formats": "bf17"}, "bf17"),
        ({"formats": "native"}, "no checkpoint"),
        ({"residency": "101"}, "residency is 101"),
        ({"residency": "-1"}, "residency is -1"),
        ({"residency": "nan"}, "residency is nan"),
        ({"residency": "half"}, "half"),
        ({"context": "4096,"}, "--context"),
        ({"context": "999999"}, "context is"),
        ({"batch": "0"}, "batch is 0"),
        ({"batch": "17"}, "batch is 17"),
        ({"shape": "huge"}, "'huge' is not a shape"),
        ({"device": "tpu"}, "'tpu' is not a device"),
        ({"policy": "belady"}, "'belady' is not a policy"),
        ({"dtype": "float16"}, "'float16' is not a dtype"),
        ({"tokens": 0}, "tokens is 0"),
        ({"repeats": 0}, "repeat is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"prefill": -1}, "prefill is -1"),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_options(**(WORDS | words))
