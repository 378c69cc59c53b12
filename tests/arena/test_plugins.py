from pathlib import Path

import pytest

from steerpipe.arena.plugins import load_plugin
from steerpipe.core.errors import ConfigError
from steerpipe.train.material import Material
from tests.arena.traces import draw, packed

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "write_a_predictor.py"


@pytest.fixture(scope="module")
def material() -> Material:
    return Material(packed(draw()), 6, 50)


def test_the_example_is_under_sixty_lines_and_learns(material: Material) -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
    for spec in (str(EXAMPLE), f"{EXAMPLE}:Followers"):
        predictor = load_plugin(spec, material)
        assert predictor.name == "followers"
        assert predictor.cost().parameters == 4 * 12 * 12


def test_a_class_of_a_package_is_found_by_name(material: Material) -> None:
    assert load_plugin("tests.arena.traces:Successor", material).name == "successor"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere.py", "does not exist"),
        ("no.such.module:Class", "cannot be imported"),
        ("tests.arena.traces:Nobody", "no Nobody in it"),
        ("tests.arena.test_causality", "has 2 predictors"),
        ("tests.arena.traces:GEOMETRY", "is no class"),
        ("tests.arena.test_plugins:Empty", "has no name, horizons, probabilities, cost"),
    ],
)
def test_what_is_no_predictor_is_refused_with_a_reason(spec: str, said: str, material: Material) -> None:
    with pytest.raises(ConfigError, match=said):
        load_plugin(spec, material)


class Empty:
    pass
