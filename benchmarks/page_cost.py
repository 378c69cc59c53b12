"""What a page that is looked at costs an answer: tokens per second with 0, 1 and 8 streams of frames, in one run.

    PYTHONPATH=src:. python benchmarks/page_cost.py [--rounds 5] [--tokens 150]

The numbers of viewers take turns, so that what the machine does meanwhile meets all of them.
"""

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import httpx

from steerpipe.core.config import load_config
from steerpipe.runtime.models import find_model
from steerpipe.server.serving import Serving
from steerpipe.server.settings import ServerSettings

VIEWERS = (0, 1, 8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    rates: dict[int, list[float]] = {viewers: [] for viewers in VIEWERS}
    frames: list[int] = []
    with server() as url:
        httpx.post(f"{url}/prediction", json={"on": False})
        decode_rate(url, options.tokens)  # warm
        for _ in range(options.rounds):
            for viewers in VIEWERS:
                with ExitStack() as stack:
                    seen = [stack.enter_context(looking(url)) for _ in range(viewers)]
                    rates[viewers].append(decode_rate(url, options.tokens))
                    frames += [len(each) for each in seen]
    result = {
        "tokens_per_second": {viewers: round(median(each), 2) for viewers, each in rates.items()},
        "all": {viewers: [round(rate, 2) for rate in each] for viewers, each in rates.items()},
        "frames_per_viewer_and_answer": median(frames),
        "tokens": options.tokens,
    }
    for viewers, rate in result["tokens_per_second"].items():
        print(f"{viewers} viewers: {rate:.1f} tokens/s")
    print(json.dumps(result))


@contextmanager
def server() -> Iterator[str]:
    config = load_config({"fast_memory": "25%", "threads": 1, "profile": False, "max_batch": 1}, environ={})
    ready, addresses = threading.Event(), []

    def announce(address: str, _: object) -> None:
        addresses.append(address)
        ready.set()

    serving = Serving(str(find_model(None)), config, ServerSettings(port=0), announce)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        assert ready.wait(60), "the server did not become ready"
        yield addresses[0]
    finally:
        serving.stop()
        thread.join()


@contextmanager
def looking(url: str) -> Iterator[list[int]]:
    """Reads frames as a page does; their sizes."""
    sizes: list[int] = []
    with httpx.stream("GET", f"{url}/live", timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)

        def read() -> None:
            try:
                sizes.extend(len(line) for line in lines if line)
            except (httpx.StreamError, httpx.HTTPError, OSError):
                return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        yield sizes


def decode_rate(url: str, tokens: int) -> float:
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    timings = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["timings"]
    return float(timings["predicted_per_second"])


if __name__ == "__main__":
    main()
