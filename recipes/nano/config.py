"""What is trained: shapes and plans, frozen, with the three presets nano, draft and smoke.

A shape fixes the architecture and is what `config.json` says. A plan fixes everything that changes the
weights and nothing that does not (where files lie, when to stop), so that a resumed run can refuse another plan.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

END_OF_TEXT = "<|endoftext|>"
CHAT_START = "<|im_start|>"
CHAT_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, CHAT_START, CHAT_END)  # ids 0, 1, 2
END_OF_TEXT_ID, CHAT_START_ID, CHAT_END_ID = range(3)


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2-MoE decoder with tied embeddings; `experts == 0` means a dense MLP of `dense_width` in every layer."""

    vocabulary: int = 8192
    context: int = 1024
    layers: int = 24
    hidden: int = 192
    heads: int = 3
    experts: int = 60
    top_k: int = 4
    expert_width: int = 48
    shared_width: int = 192
    dense_width: int = 0
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}; choose one that is")
        if bool(self.experts) == bool(self.dense_width):
            raise ValueError("a shape has either experts or a dense_width; set the other one to 0")

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads


# Times each source is read per epoch. Held-out text is 47 % Topical-Chat by bytes, the training text 3 %, and it is the
# only source in which people simply talk about the world: read it more often. MDN is one large dialect: read it less.
SOURCE_WEIGHTS = {"topical_chat": 4.0, "mdn": 0.5}


@dataclass(frozen=True)
class TrainPlan:
    """Everything that decides the weights, given a shape, a corpus and a tokenizer."""

    epochs: float = 10.0
    tokens_per_step: int = 65_536
    matrix_rate: float = 6e-3  # Muon, in units where an update has RMS 0.2 (see optimizer.py)
    vector_rate: float = 4e-3  # AdamW: embeddings, routers, norms, biases
    weight_decay: float = 0.1
    warmup_steps: int = 100
    dropout: float = 0.0
    balance_loss: float = 1e-2
    router_z_loss: float = 1e-4
    teacher_share: float = 0.0  # of the loss, taken as cross entropy to a teacher's distribution (draft only)
    seed: int = 0
    source_weights: dict[str, float] = field(default_factory=lambda: dict(SOURCE_WEIGHTS))

    def changed(self, **changes: Any) -> Self:
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True)
class Preset:
    shape: ModelShape
    plan: TrainPlan


PRESETS = {
    "nano": Preset(ModelShape(), TrainPlan()),
    "draft": Preset(
        ModelShape(layers=4, hidden=160, heads=5, experts=0, top_k=0, expert_width=0, shared_width=0, dense_width=512),
        TrainPlan(epochs=6.0, weight_decay=0.02, teacher_share=0.7),
    ),
    "smoke": Preset(
        ModelShape(
            vocabulary=320, context=64, layers=2, hidden=32, heads=2, experts=8, top_k=2, expert_width=16, shared_width=32
        ),
        TrainPlan(epochs=2.0, tokens_per_step=256, warmup_steps=2, dropout=0.1),
    ),
}


def plain(value: ModelShape | TrainPlan) -> dict[str, Any]:
    """As JSON types, for checkpoint headers and logs."""
    return asdict(value)


def shape_from(values: dict[str, Any]) -> ModelShape:
    """The inverse of `plain` for a shape. An unknown key is an error."""
    unknown = set(values) - {f.name for f in fields(ModelShape)}
    if unknown:
        raise ValueError(f"unknown keys in a model shape: {sorted(unknown)}; was it written by another version?")
    return ModelShape(**values)
