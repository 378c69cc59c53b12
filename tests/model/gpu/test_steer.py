"""The host's half of prediction: what is said at taps becomes what the source expects, in time and in order."""

from steerpipe.kernels.foretell import LEAST_PROBABILITY
from steerpipe.model.gpu.fetching import NAMED
from steerpipe.model.gpu.mailbox import Mailbox
from steerpipe.model.gpu.steer import Steer

LAYERS, STAMP = (2, 4, 6, 8), 5


class Told:
    """A source that moves nothing."""

    def __init__(self) -> None:
        self.expected: list[list[tuple[int, int]]] = []
        self.pumps = 0
        self.lasts: list[int] = []  # how often something had been expected by then
        self.idle = self.throttled = False

    def expect(self, experts: list[tuple[int, int]]) -> None:
        self.expected.append(experts)

    def pump(self) -> None:
        self.pumps += 1

    def send_last(self) -> None:
        self.lasts.append(len(self.expected))


def steer(horizon: int) -> tuple[Steer, Told, Mailbox]:
    source, words = Told(), Mailbox(len(LAYERS) * horizon, NAMED, pinned=False)
    made = Steer(source, words, LAYERS, horizon)
    made.begin(STAMP)
    return made, source, words


def say(words: Mailbox, place: int, named: dict[int, float], stamp: int = STAMP) -> None:
    told = [(round(likely * 0x7FFF) << 16) | expert for expert, likely in named.items()]
    for index, low in enumerate([*told, *[0] * (NAMED - len(told))]):
        words.words[place, index] = stamp << 32 | low


def test_the_likely_experts_of_the_next_layer_are_expected_in_their_order() -> None:
    made, source, words = steer(1)
    made.served([1])
    say(words, 0, {7: 0.9, 3: 0.5, 1: LEAST_PROBABILITY - 0.01})
    made.poll()
    assert source.expected == [[(4, 7), (4, 3)]] and source.pumps == 1


def test_nothing_is_told_twice_and_nothing_of_another_step() -> None:
    made, source, words = steer(1)
    made.served([1])
    say(words, 0, {7: 0.9}, stamp=STAMP - 1)
    made.poll()
    assert source.expected == []
    say(words, 0, {7: 0.9})
    made.poll()
    made.poll()
    assert source.expected == [[(4, 7)]] and source.pumps == 3


def test_what_is_said_too_late_is_not_told() -> None:
    made, source, words = steer(1)
    made.served([1])
    made.served([2])  # layer 1 has come before anything was said of it
    say(words, 0, {7: 0.9})
    made.poll()
    assert source.expected == []


def test_later_layers_come_after_nearer_ones_and_wait_until_the_link_has_nothing_else() -> None:
    made, source, words = steer(2)
    made.served([1])
    say(words, 0, {7: 0.9})
    say(words, 1, {5: 0.9})
    made.poll()
    assert source.expected == [[(4, 7), (6, 5)]]
    made.served([2])
    say(words, 2, {1: 0.8})
    made.poll()
    say(words, 3, {2: 0.8})
    made.poll()
    assert source.expected[1:] == [[(6, 1)]], "what is two layers ahead has time"
    source.idle = True
    made.poll()
    assert source.expected[2:] == [[(6, 1), (8, 2)]]


def test_what_is_said_across_the_boundary_of_two_tokens_is_kept() -> None:
    made, source, words = steer(1)
    for _ in LAYERS:
        made.served([1])
    for place in range(len(LAYERS)):
        say(words, place, {9: 0.9})
    made.poll()
    assert source.expected == [[(2, 9)]], "the first layer of the next token"
    made.begin(STAMP + 1)
    made.served([1])
    say(words, 0, {3: 0.9}, stamp=STAMP + 1)
    made.poll()
    assert source.expected[1:] == [[(4, 3)]], "the first layer has come"


def test_a_step_without_prediction_counts_as_a_question_per_layer() -> None:
    made, source, _ = steer(2)
    made.rest()
    assert source.expected == [()] * len(LAYERS)
    source.throttled = True
    assert made.resting


def test_a_step_waits_for_its_last_tap_and_ends_with_all_that_was_said() -> None:
    made, source, words = steer(2)
    for order in range(len(LAYERS)):
        made.served([1])
        assert made.waiting
        say(words, 2 * order, {7: 0.9})
        made.poll()
        assert made.waiting, "it speaks of two layers"
        say(words, 2 * order + 1, {5: 0.9})
        made.poll()
        assert not made.waiting
    made.end()
    assert source.expected[-1] == [(2, 7), (4, 5)] and source.lasts == [len(source.expected)]


def test_a_step_of_which_nothing_new_was_said_sends_what_is_expected() -> None:
    made, source, _ = steer(1)
    made.end()
    assert source.expected == [] and source.lasts == [0]
