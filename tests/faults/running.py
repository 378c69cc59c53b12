"""The command line in this process: what a person sees, without the seconds that a new process takes."""

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from steerpipe.cli import app


def generate(model: Path | str, *options: str, stdin: str | bytes | None = None) -> Result:
    """`steerpipe generate`, greedy and short unless the options say otherwise."""
    defaults = ("-p", "Hi there", "--temperature", "0", "--max-tokens", "4", "--threads", "1", "--dtype", "float32")
    return CliRunner().invoke(app, ["generate", str(model), *defaults, *options], input=stdin)


def refused(model: Path | str, *options: str, stdin: str | bytes | None = None) -> str:
    """The message of a run that must end with status 2, two parts on stderr, nothing on stdout and no traceback."""
    result = generate(model, *options, stdin=stdin)
    assert isinstance(result.exception, SystemExit), f"not refused in words: {result.exception!r}\n{result.output}"
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "\n  fix: " in result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr
