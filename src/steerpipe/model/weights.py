"""Dense weights in the form the decoder computes with: fused where matrices share an input, cast once."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steerpipe.model.attention import AttentionWeights
from steerpipe.model.layers import MlpWeights
from steerpipe.model.moe import MoeWeights
from steerpipe.model.spec import AttentionSpec, ModelSpec, MoeSpec, QkNorm
from steerpipe.model.tensors import TensorNames


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor  # [H]
    attention: AttentionWeights
    mlp_norm: Tensor  # [H]
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: Tensor  # [vocab, H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H]
    head: Tensor  # [vocab, H]; the embedding itself where they are tied


def build_weights(
    spec: ModelSpec, names: TensorNames, dense: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """`dense` by names on disk (see tensors.dense_tensors), in any float dtype."""
    builder = _Builder(names, dense, dtype, device)
    embed = builder.weight(names.embed)
    layers = tuple(builder.layer(index, spec) for index in range(len(spec.layers)))
    head = embed if spec.tied_embeddings else builder.weight(names.head)
    return ModelWeights(embed, layers, builder.weight(names.final_norm), head)


@dataclass(frozen=True, slots=True)
class _Builder:
    names: TensorNames
    dense: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device

    def weight(self, name: str, suffix: str = "weight") -> Tensor:
        return self.dense[f"{name}.{suffix}"].to(self.device, self.dtype).contiguous()

    def stack(self, templates: tuple[str, ...], layer: int, suffix: str = "weight") -> Tensor:
        return torch.cat([self.weight(template.format(layer=layer), suffix) for template in templates])

    def layer(self, index: int, spec: ModelSpec) -> LayerWeights:
        names, mlp = self.names, spec.layers[index].mlp
        dense_parts = (names.mlp_gate, names.mlp_up), names.mlp_down
        return LayerWeights(
            self.weight(names.input_norm.format(layer=index)),
            self.attention(index, spec.layers[index].attention),
            self.weight(names.mlp_norm.format(layer=index)),
            self.moe(index, mlp) if isinstance(mlp, MoeSpec) else self.mlp(index, *dense_parts),
        )

    def attention(self, index: int, spec: AttentionSpec) -> AttentionWeights:
        names = self.names
        qkv = (names.query, names.key, names.value)
        normed = spec.qk_norm is not QkNorm.NONE
        return AttentionWeights(
            qkv=self.stack(qkv, index),
            qkv_bias=self.stack(qkv, index, "bias") if spec.qkv_bias else None,
            out=self.stack((names.out,), index),
            out_bias=self.stack((names.out,), index, "bias") if spec.out_bias else None,
            query_norm=self.stack((names.query_norm,), index) if normed else None,
            key_norm=self.stack((names.key_norm,), index) if normed else None,
        )

    def mlp(self, index: int, gate_up: tuple[str, str], down: str) -> MlpWeights:
        return MlpWeights(self.stack(gate_up, index), self.stack((down,), index))

    def moe(self, index: int, spec: MoeSpec) -> MoeWeights:
        names = self.names
        router = self.dense[f"{names.router.format(layer=index)}.weight"].to(self.device, torch.float32)
        if not spec.shared_width:
            return MoeWeights(router, None, None)
        shared = self.mlp(index, (names.shared_gate, names.shared_up), names.shared_down)
        return MoeWeights(router, shared, self.stack((names.shared_switch,), index))
