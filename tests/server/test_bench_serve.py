"""`bench serve` measures what it says, on a server that runs."""

import json

import pytest
from rich.console import Console

from steerpipe.bench.serve import ServeOptions, ratio, render_serve, run_serve
from steerpipe.bench.serve_client import Target
from steerpipe.bench.serve_command import parse_clients
from steerpipe.core.errors import InputError
from tests.server.running import Running


def test_every_token_is_counted_and_no_rate_is_above_its_ceiling(server: Running) -> None:
    said: list[str] = []
    runs = run_serve(Target.of(server.url), ServeOptions((1, 4), answers=4, tokens=6), said.append)
    assert [run.clients for run in runs] == [1, 4] and len(said) == 2
    assert all(run.tokens == 24 for run in runs)
    assert all(run.tokens_per_second < run.ceiling_tokens_per_second for run in runs)
    assert ratio(runs) == runs[1].tokens_per_second / runs[0].tokens_per_second
    json.dumps([run.as_json() for run in runs])
    Console(quiet=True).print(render_serve(runs, "tiny"))


def test_what_is_no_server_is_told() -> None:
    with pytest.raises(InputError, match="no address of a server"):
        Target.of("localhost:8000")
    with pytest.raises(InputError, match="does not answer"):
        Target.of("http://127.0.0.1:9").metrics()
    for text in ("", "a", "0,1"):
        with pytest.raises(InputError, match="--clients"):
            parse_clients(text)
