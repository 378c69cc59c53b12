"""Which tensors a checkpoint of a spec holds: names and shapes, dense and experts apart."""

from collections.abc import Iterator
from dataclasses import dataclass

from steerpipe.model.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec, QkNorm

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A family's names on disk. `{layer}` and `{expert}` are filled in; `.weight` and `.bias` are appended."""

    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "model.layers.{layer}.input_layernorm"
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm"
    query: str = "model.layers.{layer}.self_attn.q_proj"
    key: str = "model.layers.{layer}.self_attn.k_proj"
    value: str = "model.layers.{layer}.self_attn.v_proj"
    out: str = "model.layers.{layer}.self_attn.o_proj"
    query_norm: str = "model.layers.{layer}.self_attn.q_norm"
    key_norm: str = "model.layers.{layer}.self_attn.k_norm"
    mlp_gate: str = "model.layers.{layer}.mlp.gate_proj"
    mlp_up: str = "model.layers.{layer}.mlp.up_proj"
    mlp_down: str = "model.layers.{layer}.mlp.down_proj"
    router: str = "model.layers.{layer}.mlp.gate"
    shared_gate: str = "model.layers.{layer}.mlp.shared_expert.gate_proj"
    shared_up: str = "model.layers.{layer}.mlp.shared_expert.up_proj"
    shared_down: str = "model.layers.{layer}.mlp.shared_expert.down_proj"
    shared_switch: str = "model.layers.{layer}.mlp.shared_expert_gate"
    expert_gate: str = "model.layers.{layer}.mlp.experts.{expert}.gate_proj"
    expert_up: str = "model.layers.{layer}.mlp.experts.{expert}.up_proj"
    expert_down: str = "model.layers.{layer}.mlp.experts.{expert}.down_proj"


@dataclass(frozen=True, slots=True)
class ExpertTensorNames:
    """Full tensor names of one expert's three matrices: gate [I, H], up [I, H], down [H, I]."""

    gate: str
    up: str
    down: str


def expert_names(names: TensorNames, layer: int, expert: int) -> ExpertTensorNames:
    def full(template: str) -> str:
        return template.format(layer=layer, expert=expert) + ".weight"

    return ExpertTensorNames(full(names.expert_gate), full(names.expert_up), full(names.expert_down))


def dense_tensors(spec: ModelSpec, names: TensorNames) -> dict[str, Shape]:
    """Everything but the routed experts."""
    found: dict[str, Shape] = {
        f"{names.embed}.weight": (spec.vocab, spec.hidden),
        f"{names.final_norm}.weight": (spec.hidden,),
    }
    if not spec.tied_embeddings:
        found[f"{names.head}.weight"] = (spec.vocab, spec.hidden)
    for index, layer in enumerate(spec.layers):
        for template, suffix, shape in _layer_tensors(spec, names, layer):
            found[f"{template.format(layer=index)}.{suffix}"] = shape
    return found


def expert_tensors(spec: ModelSpec, names: TensorNames) -> dict[str, Shape]:
    """The three matrices of every routed expert of every MoE layer."""
    found: dict[str, Shape] = {}
    for layer in spec.moe_layers:
        moe = spec.moe(layer)
        for expert in range(moe.experts):
            full = expert_names(names, layer, expert)
            found[full.gate] = found[full.up] = (moe.width, spec.hidden)
            found[full.down] = (spec.hidden, moe.width)
    return found


def _layer_tensors(spec: ModelSpec, names: TensorNames, layer: LayerSpec) -> Iterator[tuple[str, str, Shape]]:
    hidden = spec.hidden
    yield names.input_norm, "weight", (hidden,)
    yield names.mlp_norm, "weight", (hidden,)
    yield from _attention_tensors(names, layer.attention, hidden)
    if isinstance(layer.mlp, MoeSpec):
        yield names.router, "weight", (layer.mlp.experts, hidden)
        if layer.mlp.shared_width:
            yield names.shared_switch, "weight", (1, hidden)
            yield from _mlp_tensors(
                names.shared_gate, names.shared_up, names.shared_down, layer.mlp.shared_width, hidden
            )
    else:
        yield from _mlp_tensors(names.mlp_gate, names.mlp_up, names.mlp_down, layer.mlp.width, hidden)


def _attention_tensors(names: TensorNames, spec: AttentionSpec, hidden: int) -> Iterator[tuple[str, str, Shape]]:
    query_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for template, width in ((names.query, query_width), (names.key, kv_width), (names.value, kv_width)):
        yield template, "weight", (width, hidden)
        if spec.qkv_bias:
            yield template, "bias", (width,)
    yield names.out, "weight", (hidden, query_width)
    if spec.out_bias:
        yield names.out, "bias", (hidden,)
    if spec.qk_norm is not QkNorm.NONE:
        per_head = spec.qk_norm is QkNorm.HEAD
        yield names.query_norm, "weight", (spec.head_dim if per_head else query_width,)
        yield names.key_norm, "weight", (spec.head_dim if per_head else kv_width,)


def _mlp_tensors(gate: str, up: str, down: str, width: int, hidden: int) -> Iterator[tuple[str, str, Shape]]:
    yield gate, "weight", (width, hidden)
    yield up, "weight", (width, hidden)
    yield down, "weight", (hidden, width)
