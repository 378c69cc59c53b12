"""The server's engine process on a card: eight at once get what each gets alone, and nothing is left behind."""

import pytest
import torch

from benchmarks.serve_on_gpu import ARMS, at_rest, engine, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("arm", ARMS)
def test_clients_drafts_and_cancels_over_the_pipe(arm: str) -> None:
    settings = {"device": "cuda", "profile": False, "max_batch": 8, "max_context": 512, **ARMS[arm]}
    with engine(None, settings) as own:
        found = measure(own, answers=12, tokens=24)
        assert found["same_tokens_as_alone"] == 12
        assert all(each["answers"] == 12 for each in found["mixed"])
        assert at_rest(own).load.live_blocks == at_rest(own).load.kept_blocks
