"""Runs several command lines in one process and prints what each did: huggingface_hub reads its settings at import.

stdin: a JSON list of argument lists. stdout: a JSON list of [exit status, stdout, stderr, exception or null].
"""

import json
import sys
import time

from typer.testing import CliRunner

from steerpipe.cli import app


def main() -> None:
    early = [name for name in ("huggingface_hub", "torch", "transformers") if name in sys.modules]
    assert not early, f"importing the command line has imported {early}"
    from huggingface_hub.utils import logging

    logging.get_logger("huggingface_hub")  # keeps the stderr of this moment, which must outlive the first run

    time.sleep = lambda _: None  # it waits 23 seconds between its retries
    done = []
    for arguments in json.load(sys.stdin):
        result = CliRunner().invoke(app, arguments)
        spoken = result.exception is None or isinstance(result.exception, SystemExit)
        done.append([result.exit_code, result.stdout, result.stderr, None if spoken else repr(result.exception)])
    print(json.dumps(done))


if __name__ == "__main__":
    main()
