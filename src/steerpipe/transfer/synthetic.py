"""Routing that behaves like a trained model's, for where no recording is at hand. Pure; a seed gives one routing.

Every expert of every layer has a log popularity: a fixed part (Zipf), a part of the topic, which is new in every
sequence and drifts within it, and a part of the passage, which lives for a few tokens. A token draws top_k distinct
experts from it (Gumbel noise on the logits, then the largest: sampling without replacement).

The defaults are fitted by hand to 24 x 60 experts with top-4; `benchmarks/hit_rates.py` prints how close they come.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK_TOKENS = 256  # tokens drawn at once: 24 x 60 normals of each kind are 3 MB


@dataclass(frozen=True, slots=True)
class SyntheticRouting:
    """What to draw. The strengths are in natural log units of popularity; a sequence is one topic."""

    tokens: int = 4000
    layers: int = 24
    experts: int = 60
    top_k: int = 4
    zipf: float = 0.35  # popularity falls with rank ** -zipf
    topic: float = 1.0  # standard deviation of the topic's part
    topic_tokens: float = 192.0  # after that many tokens its correlation has fallen to 1 / e
    passage: float = 0.8  # the same for what lives for a few tokens
    passage_tokens: float = 2.0
    sequence_tokens: int = 400  # length of a sequence
    seed: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.top_k <= self.experts, f"top-{self.top_k} of {self.experts} experts"
        assert min(self.tokens, self.layers, self.sequence_tokens) > 0, "routing of nothing"

    def sequences(self) -> NDArray[np.int32]:
        """[tokens]: which sequence each token belongs to."""
        return (np.arange(self.tokens) // self.sequence_tokens).astype(np.int32)


def draw_routing(plan: SyntheticRouting) -> NDArray[np.int64]:
    """[tokens, layers, top_k]: distinct experts, the most probable first by its noisy logit."""
    random = np.random.default_rng(plan.seed)
    shape = (plan.layers, plan.experts)
    ranks = random.permuted(np.tile(np.arange(1.0, plan.experts + 1), (plan.layers, 1)), axis=1)
    popularity = -plan.zipf * np.log(ranks)  # [layers, experts]
    topic, passage = random.normal(size=shape), random.normal(size=shape)
    keep_topic, keep_passage = math.exp(-1 / plan.topic_tokens), math.exp(-1 / plan.passage_tokens)
    add_topic, add_passage = math.sqrt(1 - keep_topic**2), math.sqrt(1 - keep_passage**2)
    routing = np.empty((plan.tokens, plan.layers, plan.top_k), dtype=np.int64)
    for begin in range(0, plan.tokens, _BLOCK_TOKENS):
        count = min(_BLOCK_TOKENS, plan.tokens - begin)
        steps = random.normal(size=(2, count, *shape))
        logits = random.gumbel(size=(count, *shape))
        for index in range(count):
            fresh = (begin + index) % plan.sequence_tokens == 0
            topic = steps[0, index] if fresh else keep_topic * topic + add_topic * steps[0, index]
            passage = steps[1, index] if fresh else keep_passage * passage + add_passage * steps[1, index]
            logits[index] += popularity + plan.topic * topic + plan.passage * passage
        routing[begin : begin + count] = np.argsort(-logits, axis=-1, kind="stable")[..., : plan.top_k]
    return routing
