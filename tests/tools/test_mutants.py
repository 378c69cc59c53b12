"""The engine that plants faults, on a package of one function."""

from pathlib import Path

import pytest

from tools import mutants

ENTRY = """
[[mutant]]
name = "{name}"
file = "src/steerpipe/sums.py"
find = "{find}"
replace = "{replace}"
tests = "{tests}"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "src/steerpipe/__init__.py": "",
        "src/steerpipe/sums.py": "def add(a, b):\n    return a + b\n\ndef unused():\n    return 1\n",
        "tests/test_sums.py": "from steerpipe.sums import add\n\ndef test_add():\n    assert add(2, 3) == 5\n",
        "tests/test_red.py": "def test_red():\n    assert False\n",
        "tests/mutants/.keep": "",
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n',
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def plant(
    project: Path, find: str, replace: str, tests: str = "tests/test_sums.py", name: str = "fault", file: str = "a"
) -> None:
    entry = ENTRY.format(name=name, find=find, replace=replace, tests=tests)
    (project / "tests" / "mutants" / f"{file}.toml").write_text(entry)


def test_a_fault_that_a_test_meets_is_caught(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (project / "src/steerpipe/sums.py").read_text()
    plant(project, "a + b", "a - b")
    assert mutants.main(["--workers", "1"], project) == 0
    assert "1 of 1 mutants caught" in capsys.readouterr().out
    assert (project / "src/steerpipe/sums.py").read_text() == before


def test_options_are_for_the_tests_that_they_stand_beside(project: Path) -> None:
    (project / "tests/test_more.py").write_text("def test_red():\n    assert False\n\ndef test_blue():\n    pass\n")
    entry = ENTRY.format(name="{}", find="a + b", replace="a - b", tests="{}")
    text = entry.format("one", "tests/test_sums.py -k add") + entry.format("two", "tests/test_more.py -k blue")
    (project / "tests" / "mutants" / "a.toml").write_text(text)
    planted = mutants.read_mutants(project / "tests" / "mutants")
    assert mutants.check_unchanged(planted, project, workers=1) is None


def test_a_fault_that_no_test_meets_survives(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(project, "return 1", "return 2")
    assert mutants.main(["--workers", "1"], project) == 1
    assert "SURVIVED" in capsys.readouterr().out


def test_a_fault_that_stops_pytest_itself_shows_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(project, "def add(a, b):", "import no_such_module\\ndef add(a, b):")
    assert mutants.main(["--workers", "1"], project) == 1
    assert "BROKE THE RUN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("find", "replace", "tests", "words"),
    [
        ("a * b", "a - b", "tests/test_sums.py", "stands 0 times"),
        ("return", "yield", "tests/test_sums.py", "stands 2 times"),
        ("a + b", "a + b", "tests/test_sums.py", "are the same"),
        ("a + b", "a +", "tests/test_sums.py", "invalid syntax"),
        ("a + b", "a - b", "tests/test_red.py", "do not pass on the unchanged source"),
        ("a + b", "a - b", "tests/test_absent.py", "do not pass on the unchanged source"),
    ],
)
def test_an_entry_that_proves_nothing_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], find: str, replace: str, tests: str, words: str
) -> None:
    plant(project, find, replace, tests)
    assert mutants.main(["--workers", "1"], project) == 2
    assert words in " ".join(capsys.readouterr().out.split())


def test_a_file_or_a_key_that_is_not_there_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(project, "a + b", "a - b")
    entries = project / "tests/mutants/a.toml"
    good = entries.read_text()
    entries.write_text(good.replace("sums.py", "absent.py", 1))
    assert mutants.main(["--workers", "1"], project) == 2
    assert "there is no src/steerpipe/absent.py" in capsys.readouterr().out
    entries.write_text(good.replace("replace =", "replacement ="))
    assert mutants.main(["--workers", "1"], project) == 2
    assert "an entry has" in capsys.readouterr().out


def test_only_selects_and_names_are_unique(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(project, "a + b", "a - b", name="minus")
    assert mutants.main(["--workers", "1", "--only", "absent"], project) == 2
    plant(project, "a + b", "a * b", name="minus", file="b")
    assert mutants.main(["--workers", "1"], project) == 2
    assert "two mutants are called minus" in capsys.readouterr().out


def test_every_fault_of_this_project_can_still_be_planted() -> None:
    root = Path(__file__).parents[2]
    lost = []
    for mutant in mutants.read_mutants(root / "tests" / "mutants"):
        source = (root / mutant.file).read_text()
        if source.count(mutant.find) != 1 or not mutant.file.startswith("src/"):
            lost.append(f"{mutant.name}: {mutant.file} has changed")
    assert not lost, "\n".join(lost)
