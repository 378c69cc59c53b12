"""What is trained: shapes and plans, frozen, with the three presets nano, draft and smoke.

A shape fixes the architecture and is what `config.json` says. A plan fixes everything that changes the
weights and nothing that does not (where files lie, when to stop), so that a resumed run can refuse another plan.
"""

from dataclasses import asdict, dataclass, field, replace
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


# Times each source is read per epoch, 1 if not named. MDN is one large dialect: read it less. Topical-Chat (47 % of the
# held-out bytes, 3 % of the training text) must not be read more: after 44 passes it was memorised, 1.40 bits per byte
# against 0.98 after 7.5.
SOURCE_WEIGHTS = {"mdn": 0.5}


@dataclass(frozen=True)
class TrainPlan:
    """Everything that decides the weights, given a shape, a corpus and a tokenizer."""

    epochs: float = 7.5
    tokens_per_step: int = 32_768
    matrix_rate: float = 1e-2  # Muon, in units where an update has RMS 0.2 (see optimizer.py)
    vector_rate: float = 8e-3  # AdamW: embeddings, routers, norms, biases
    weight_decay: float = 0.1
    warmup_steps: int = 100
    dropout: float = 0.1
    balance_loss: float = 1e-2
    router_z_loss: float = 1e-4
    teacher_share: float = 0.0  # of the loss, taken as cross entropy to a teacher's distribution (draft only)
    seed: int = 0
    source_weights: dict[str, float] = field(default_factory=lambda: dict(SOURCE_WEIGHTS))

    def changed(self, **changes: Any) -> Self:
        """With other values, where they are not None. An unknown name is a TypeError."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True)
class Preset:
    shape: ModelShape
    plan: TrainPlan


PRESETS = {
    "nano": Preset(ModelShape(), TrainPlan()),
    "draft": Preset(
        ModelShape(layers=4, hidden=160, heads=5, experts=0, top_k=0, expert_width=0, shared_width=0, dense_width=512),
        TrainPlan(epochs=1.5, weight_decay=0.02, dropout=0.0, teacher_share=0.7),
    ),
    "smoke": Preset(
        ModelShape(320, 256, layers=2, hidden=32, heads=2, experts=8, top_k=2, expert_width=16, shared_width=32),
        TrainPlan(epochs=2.0, tokens_per_step=256, warmup_steps=2),
    ),
}


def plain(value: ModelShape | TrainPlan) -> dict[str, Any]:
    """As JSON types, for checkpoint headers and logs."""
    return asdict(value)
