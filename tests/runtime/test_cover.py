"""Cover tokens: the first tokens of an answer wait for nothing, the others for everything; nothing changes without."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steerpipe import Pipeline
from steerpipe.core.config import EngineConfig
from steerpipe.core.cover import MOST_AUTO_TOKENS, Covered
from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.core.quality import MissPolicy, QualityPlan, Substituted
from steerpipe.core.timeline import Timeline
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.moe import Route
from steerpipe.model.step import decode_rows, prefill_rows
from steerpipe.runtime.calibrating import open_subject
from steerpipe.runtime.chat_thread import ChatThread, TurnReport
from steerpipe.runtime.cover import CoverDesk, check_cover, covering_tokens, open_cover
from steerpipe.runtime.models import EMBEDDED
from steerpipe.store.reader import open_pack
from steerpipe.tiny import write_tiny
from steerpipe.transfer.source import LadderSource

CPU = torch.device("cpu")
ONE, OTHER = SequenceId(1), SequenceId(2)
PROMPT = "The dog"


def opened(model: Path | None = None, **settings: Any) -> Pipeline:
    return Pipeline(model, **{"dtype": "float32", "threads": 1, "profile": False, "fast_memory": "12.5%"} | settings)


@dataclass
class Nothing:
    """A shelf on which nothing is there."""

    asked: list[int] = field(default_factory=list)

    def missing(self, layer: int, experts: np.ndarray) -> np.ndarray:
        return np.ones(experts.shape, dtype=np.bool_)

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        self.asked += list(ranks)
        return len(ranks)

    def compute(self, expert: ExpertId, x: torch.Tensor) -> torch.Tensor | None:
        return None


@dataclass
class Desk:
    """A CoverDesk over two layers of four experts, top-2; `token` lasts a second."""

    span: int | None
    block_seconds: float = 0.5
    now: float = 0.0

    def __post_init__(self) -> None:
        self.shelf = Nothing()
        plan = QualityPlan.uniform(MissPolicy.SURROGATE, 2, 2)
        self.desk = CoverDesk(
            plan, self.shelf, (0, 1), torch.ones(2, 4, 3), None, self.span, lambda: self.block_seconds, lambda: self.now
        )

    def token(self, *sequences: SequenceId, experts: tuple[int, int] = (0, 1)) -> list[bool]:
        """Which rows went without their experts."""
        self.now += 1.0
        if not self.desk.begin(sequences, decode=True):
            return [False] * len(sequences)
        without = []
        for layer in (0, 1):
            route = Route(torch.tensor([experts] * len(sequences)), torch.ones(len(sequences), 2))
            settled = self.desk.settle(layer, torch.zeros(len(sequences), 3), route)
            pairs = set() if settled.stand_ins is None else set(settled.stand_ins.pairs)
            without.append([{2 * row, 2 * row + 1} <= pairs for row in range(len(sequences))])
        assert without[0] == without[1]
        return without[0]


def test_as_many_tokens_as_the_seconds_of_the_transfers_hold() -> None:
    assert covering_tokens(10, 0.1, 0.5) == 2
    assert covering_tokens(10, 0.1, 0.4) == 3
    assert covering_tokens(1, 0.1, 0.5) == covering_tokens(0, 0.1, 0.5) == covering_tokens(5, 0.0, 0.5) == 1
    assert covering_tokens(1000, 1.0, 0.01) == MOST_AUTO_TOKENS


def test_only_the_first_tokens_of_the_answer_that_was_told_of_go_without() -> None:
    desk = Desk(2)
    desk.desk.cover(ONE)
    assert [desk.token(ONE), desk.token(ONE), desk.token(ONE)] == [[True], [True], [False]]
    assert desk.token(OTHER) == [False]
    taken = desk.desk.take(ONE)
    assert (taken.tokens, taken.experts, taken.seconds) == (2, 4, 2.0)  # each expert once, at half a second
    assert taken.uses == Substituted(uses=8, substituted=8)
    assert desk.desk.take(ONE).tokens == 0


def test_in_a_batch_others_wait_beside_an_answer_that_is_covered() -> None:
    desk = Desk(1)
    desk.desk.cover(OTHER)
    assert desk.token(ONE, OTHER) == [False, True]
    assert desk.token(ONE, OTHER) == [False, False]


def test_an_answer_keeps_no_account_of_tokens_that_wait_beside_another_that_is_covered() -> None:
    desk = Desk(2)
    desk.desk.cover(ONE)
    assert [desk.token(ONE), desk.token(ONE)] == [[True], [True]]
    desk.desk.cover(OTHER)
    assert [desk.token(ONE, OTHER), desk.token(ONE, OTHER)] == [[False, True], [False, True]]
    for sequence in (ONE, OTHER):
        assert desk.desk.take(sequence).uses == Substituted(uses=8, substituted=8)


def test_a_token_that_failed_and_is_decoded_again_is_covered_again() -> None:
    desk = Desk(2)
    desk.desk.cover(ONE)
    assert desk.desk.begin((ONE,), decode=True)  # and no further than its first layer
    desk.desk.settle(0, torch.zeros(1, 3), Route(torch.tensor([[0, 1]]), torch.ones(1, 2)))
    assert [desk.token(ONE), desk.token(ONE), desk.token(ONE)] == [[True], [True], [False]]
    assert desk.desk.take(ONE).tokens == 2


def test_prompts_wait() -> None:
    desk = Desk(1)
    desk.desk.cover(ONE)
    assert not desk.desk.begin((ONE,), decode=False)
    assert desk.token(ONE) == [True]


def test_auto_covers_what_the_first_token_has_missed() -> None:
    desk = Desk(None, block_seconds=0.6)  # 4 experts: 2.4 s, and a token takes one
    desk.desk.cover(ONE)
    assert [desk.token(ONE, experts=(i, i + 1)) for i in (0, 1, 2, 2)] == [[True], [True], [True], [False]]


def test_what_came_after_the_covered_tokens_is_exact_given_what_they_left() -> None:
    subject = open_subject(None, EngineConfig(dtype="float32", threads=1))
    spec, weights, pack = subject.rehearsal.spec, subject.weights, open_pack(EMBEDDED)
    tokens = subject.codec.encode("The dog ran over the hill, and then it saw a cat that", False)
    pool = KvPool(spec, torch.float32, CPU, 16)
    with LadderSource.open(pack, slots=180, dtype=torch.float32, pace=20e6) as ladder:
        desk = open_cover(EngineConfig(cover="3"), spec, weights, EMBEDDED, ladder, subject.identity)
        assert desk is not None
        covering, exact = Decoder(spec, weights, CPU, None, desk), Decoder(spec, weights, CPU)
        kv, other = pool.sequence(), pool.sequence()
        covering.forward(prefill_rows(ONE, kv, tokens[:8], CPU), ladder, [0])
        exact.forward(prefill_rows(ONE, other, tokens[:8], CPU), subject.source, [0])
        desk.cover(ONE)
        same = []
        for number, token in enumerate(tokens[8:14]):
            if number == 3:
                other.free()
                other = kv.fork()
            told = covering.forward(decode_rows([ONE], [kv], [token], CPU, cell=1), ladder, [0])
            true = exact.forward(decode_rows([ONE], [other], [token], CPU, cell=1), subject.source, [0])
            same.append(bool(torch.equal(told, true)))
        covered = desk.take(ONE)
    assert same == [False, False, False, True, True, True]
    assert covered.tokens == 3 and 0 < covered.uses.share <= 1 and covered.seconds > 0
    assert covered.nats_per_token is not None and covered.nats_per_token > 0


def waits(**settings: Any) -> tuple[list[int], Any]:
    """Waits of the compute stream until each token of an answer, beginning with the first."""
    timeline = Timeline()
    with opened(timeline=timeline, pace="20MB", predict="off", **settings) as pipe:
        answer = pipe.stream(PROMPT, raw=True, temperature=0.0, max_tokens=6, ignore_eos=True)
        counts = [len(timeline.spans("stream 0: waits")) for _ in answer]
        return counts, answer.completion


def test_covered_tokens_put_no_wait_on_the_compute_stream_and_the_next_do() -> None:
    counts, completion = waits(cover="3")
    assert 0 < counts[0] == counts[1] == counts[2] == counts[3] < counts[4] < counts[5]
    assert completion.covered is not None and completion.covered.tokens == 3


def test_without_cover_there_is_no_desk_and_the_answer_says_nothing_of_it() -> None:
    with opened() as pipe:
        assert pipe.cover is None
        assert pipe.generate(PROMPT, raw=True, temperature=0.0, max_tokens=3).covered is None


def test_with_every_expert_resident_the_answer_is_the_exact_one() -> None:
    with opened(fast_memory="auto") as plain, opened(fast_memory="auto", cover="4") as covered:
        one, other = (pipe.generate(PROMPT, raw=True, temperature=0.0, max_tokens=8) for pipe in (plain, covered))
    assert one.token_ids == other.token_ids and other.covered is None


def test_every_answer_is_covered_anew() -> None:
    with opened(cover="2", pace="20MB") as pipe:
        first, second = (pipe.generate(PROMPT, raw=True, temperature=0.0, max_tokens=6) for _ in range(2))
    assert first.covered is not None and second.covered is not None
    assert first.covered.tokens == second.covered.tokens == 2
    assert first.covered.uses.uses == second.covered.uses.uses == 2 * 24 * 4


@pytest.mark.parametrize("drafts", [True, False])
def test_a_chat_covers_answers_that_were_not_begun_before_enter(drafts: bool) -> None:
    with opened(cover="2", pace="20MB", max_context=256) as pipe:
        settings = pipe.settings(temperature=0.0, max_tokens=5)
        with closing(ChatThread(pipe, settings, drafts=drafts)) as thread:
            *_, report = thread.enter("What is a dog?")
    assert isinstance(report, TurnReport) and report.covered is not None
    assert report.covered.tokens == 2


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"quality": "fast"}, "cover tokens with quality fast"),
        ({"cover": "0"}, "cover is '0'"),
        ({"cover": "65"}, "cover is '65'"),
        ({"cover": "many"}, "cover is 'many'"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        opened(**{"cover": "2"} | settings)
    assert caught.value.fix


def test_a_gpu_and_a_model_without_default_vectors_are_refused(tmp_path: Path) -> None:
    with opened(fast_memory="auto") as pipe, pytest.raises(ConfigError, match="does not have them"):
        check_cover(EngineConfig(cover="auto"), pipe.spec, device="cuda")
    write_tiny("olmoe", tmp_path / "model")
    with pytest.raises(ConfigError, match="default vectors"):
        opened(tmp_path / "model", cover="2", cache_dir=str(tmp_path / "cache"), fast_memory="50%")


def test_a_person_is_told_what_was_covered_and_what_it_costs() -> None:
    uses = Substituted(uses=192, substituted=48, patched=5, nats=0.5)
    line = Covered(2, 0.034, 40, uses, calibrated=True).line()
    assert "2 tokens ran without 40 experts" in line and "34 ms" in line and "25%" in line and "0.25 nats" in line
    assert "KL unknown" in Covered(2, 0.034, 40, uses, calibrated=False).line()
    assert Covered(2, 0.034, 40, uses, calibrated=False).as_json()["expected_nats_per_token"] is None
    assert Covered(0, 0.0, 0, Substituted(), calibrated=True).line() == "cover: no token was covered"
