"""What a model is, in numbers and switches: everything the decoder needs to know and nothing about files.

A family (model/families) turns a checkpoint's config.json into one ModelSpec. The decoder reads
specs only, so a new architecture is a declaration, not a second decoder.
"""

from dataclasses import dataclass
from enum import StrEnum


class RopeKind(StrEnum):
    """How rotary frequencies are stretched. `dynamic` is `default` within the trained context, which is our limit."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"


class QkNorm(StrEnum):
    """Where queries and keys are normalised: not at all, per head, or over all heads at once."""

    NONE = "none"
    HEAD = "head"
    ALL_HEADS = "all_heads"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    kind: RopeKind
    theta: float
    dim: int  # rotated part of a head
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    original_context: int = 0  # tokens; llama3, yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    short_factor: tuple[float, ...] = ()  # longrope, one per rotated pair


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    clip_qkv: float | None = None
    window: int | None = None  # a row sees itself and window - 1 rows before it; None: everything before it


@dataclass(frozen=True, slots=True)
class DenseMlpSpec:
    width: int


@dataclass(frozen=True, slots=True)
class MoeSpec:
    experts: int
    top_k: int
    width: int
    renormalise: bool  # top-k weights divided by their sum
    shared_width: int = 0  # 0: no shared expert; otherwise it is gated by a sigmoid of its own


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: DenseMlpSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    max_context: int  # tokens
    stored_dtype: str  # "float32", "bfloat16" or "float16": what config.json says the files hold

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeSpec))

    def moe(self, layer: int) -> MoeSpec:
        """The MoE part of a layer that has one."""
        mlp = self.layers[layer].mlp
        assert isinstance(mlp, MoeSpec), f"layer {layer} has no experts"
        return mlp
