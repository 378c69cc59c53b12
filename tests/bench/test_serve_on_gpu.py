"""`benchmarks/serve_on_gpu.py`, on the CPU: the figures that it tells are counted, and everybody is answered."""

from pathlib import Path

from benchmarks.serve_on_gpu import engine, measure
from steerpipe.tiny import write_tiny


def test_every_answer_is_that_of_alone_and_nothing_is_left(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "tiny")
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "profile": False, "max_batch": 8}
    with engine(str(tmp_path / "tiny"), settings) as own:
        found = measure(own, answers=9, tokens=8)
    assert found["same_tokens_as_alone"] == 9 and found["left_blocks"] == 0
    assert [each["answers"] for each in found["mixed"]] == [12, 12, 12]
    assert all(each["typed"] == each["left"] == each["drafts left"] == 6 for each in found["mixed"])
