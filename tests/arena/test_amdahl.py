import pytest

from steerpipe.arena.amdahl import amdahl_speedup
from steerpipe.core.errors import ConfigError


@pytest.mark.parametrize(
    ("stall_share", "recall", "speedup"),
    [(0.6, 0.784, 1 / 0.5296), (0.85, 0.9, 1 / 0.235), (0.6, 0.0, 1.0), (0.0, 0.9, 1.0), (0.5, 1.0, 2.0)],
)
def test_the_papers_arithmetic(stall_share: float, recall: float, speedup: float) -> None:
    assert amdahl_speedup(stall_share, recall) == pytest.approx(speedup)


def test_the_papers_own_figure() -> None:
    assert amdahl_speedup(0.6, 0.784) == pytest.approx(1.88, abs=0.01)


@pytest.mark.parametrize(("stall_share", "recall"), [(1.2, 0.5), (0.5, -0.1), (1.0, 1.0)])
def test_what_has_no_meaning_is_refused(stall_share: float, recall: float) -> None:
    with pytest.raises(ConfigError):
        amdahl_speedup(stall_share, recall)
