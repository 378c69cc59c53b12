import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steerpipe.core.errors import ConfigError
from steerpipe.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1024", 1024),
        ("7b", 7),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("2TiB", 2**41),
        ("4k", 4096),
        ("3M", 3 * 2**20),
        ("2G", 2**31),
        ("1t", 2**40),
        ("1kB", 1000),
        ("4 GB", 4 * 10**9),
        ("2MB", 2 * 10**6),
        ("1TB", 10**12),
        ("  8 gib  ", 2**33),
    ],
)
def test_people_write_bytes_in_many_ways(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1MiB", "1.GiB", "1e3", "12 parsecs", "1 2 MiB", "0x10", "½GiB", "9" * 400, "9" * 300 + "TB"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert repr(text) in caught.value.what
    assert "512MiB" in caught.value.fix


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5 MiB"),
        (2**40 * 3, "3 TiB"),
    ],
)
def test_bytes_are_shown_with_a_binary_unit(count: int, text: str) -> None:
    assert format_bytes(count).replace(".50", ".5") == text


@example(1010 * 2**20)
@given(st.integers(0, 2**49))
def test_what_is_shown_reads_back_within_its_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=6e-3)
