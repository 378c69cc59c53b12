"""Settings from the environment come in through one door."""

import ast
from pathlib import Path

import steerpipe

PACKAGE = Path(steerpipe.__file__).parent
DOORS = {"core/config.py", "core/cpu.py"}


def reads_environment(source: str) -> bool:
    attributes = (node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return any(name in ("environ", "getenv", "environb", "putenv") for name in attributes)


def test_only_the_doors_touch_the_environment() -> None:
    files = {str(file.relative_to(PACKAGE)): file.read_text() for file in PACKAGE.rglob("*.py")}
    assert {name for name, source in files.items() if reads_environment(source)} == DOORS
