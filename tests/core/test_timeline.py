"""A timeline is what was recorded, in a form that trace viewers read."""

import json
import threading
from pathlib import Path

import pytest

from steerpipe.core.errors import CapacityError
from steerpipe.core.timeline import Span, Timeline, overlap_seconds
from steerpipe.core.whole_file import check_place


def test_spans_come_in_order_and_by_lane() -> None:
    timeline = Timeline()
    timeline.span("copy", "b", 2.0, 3.0)
    timeline.span("compute", "a", 1.0, 2.5)
    assert [span.name for span in timeline.spans()] == ["a", "b"]
    assert timeline.spans("copy") == [Span("copy", "b", 2.0, 3.0)]


def test_the_newest_are_kept_and_the_others_counted() -> None:
    timeline = Timeline(most=2)
    for number in range(5):
        timeline.span("x", str(number), number, number + 1)
    assert [span.name for span in timeline.spans()] == ["3", "4"] and timeline.dropped == 3
    assert timeline.as_trace()["otherData"] == {"dropped_spans": 3}


def test_a_file_has_a_row_per_lane_and_microseconds_from_the_start(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.span("stream 1", "expert 4", 10.001, 10.002)
    timeline.span("stream 0", "layer 2", 10.0, 10.0015)
    timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert rows == {"stream 0": 0, "stream 1": 1}
    spans = [(event["name"], event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [("layer 2", 0, 0.0, 1500.0), ("expert 4", 1, 1000.0, 1000.0)]
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_a_place_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("kept")
    for place in (tmp_path / "none" / "x", file / "x", tmp_path, Path("."), Path("/dev/null"), tmp_path / ("x" * 250)):
        for ask in (Timeline().write, lambda place: check_place(place, "the timeline")):
            with pytest.raises(CapacityError, match=r"^the timeline cannot be written to .*: \w"):
                ask(place)
    check_place(file, "the timeline")
    check_place(tmp_path / "new", "the timeline")
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and file.read_text() == "kept"


def test_overlap_is_the_time_when_both_are_busy() -> None:
    compute = [Span("c", "", 0.0, 2.0), Span("c", "", 3.0, 4.0)]
    copies = [Span("l", "", 1.0, 3.5), Span("l", "", 3.75, 9.0)]
    assert overlap_seconds(compute, copies) == overlap_seconds(copies, compute) == pytest.approx(1.0 + 0.5 + 0.25)
    assert overlap_seconds(compute, []) == 0.0


def test_threads_lose_nothing() -> None:
    timeline = Timeline()

    def record() -> None:
        for number in range(500):
            timeline.span("x", "", number, number + 1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.spans()) == 2000
