from pathlib import Path

import pytest

from steerpipe.arena.plugins import load_plugin
from steerpipe.core.errors import ConfigError
from steerpipe.train.material import Material
from tests.arena.traces import Successor, draw, packed

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
        ("tests.arena.test_causality", "has 4 predictors"),
        ("tests.arena.traces:GEOMETRY", "is no class"),
        ("tests.arena.test_plugins:Empty", "has no name, horizons, probabilities, cost"),
        ("tests.arena.test_plugins:CannotBeMade", "raised ZeroDivisionError: division by zero"),
        ("tests.arena.test_plugins:LooksBack", "not layers ahead"),
    ],
)
def test_what_is_no_predictor_is_refused_with_a_reason(spec: str, said: str, material: Material) -> None:
    with pytest.raises(ConfigError, match=said):
        load_plugin(spec, material)


def test_a_file_that_raises_is_named_with_what_it_raised(tmp_path: Path, material: Material) -> None:
    (tmp_path / "half.py").write_text("class Half(\n")
    with pytest.raises(ConfigError, match=r"half\.py raised SyntaxError"):
        load_plugin(str(tmp_path / "half.py"), material)


class Empty:
    pass


class CannotBeMade:
    def __init__(self) -> None:
        raise ZeroDivisionError("division by zero")


class LooksBack(Successor):
    horizons = (-1,)  # type: ignore[assignment]  # a wrong one
