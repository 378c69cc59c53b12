"""What the decoder on a GPU cannot do, said before anything is loaded for it. No Triton here."""

import torch

from steerpipe.core.errors import ConfigError
from steerpipe.model.spec import ModelSpec

MOST_EXPERTS = 1024  # of a layer: the router's kernel compares each with each, and more would not fit its registers


def check_model(spec: ModelSpec, device: torch.device) -> None:
    """Raises ConfigError for a model, or a setting of torch, that the kernels do not compute as they should."""
    top_ks = {spec.moe(layer).top_k for layer in spec.moe_layers}
    if len(top_ks) > 1:
        raise ConfigError(
            f"layers of this model route a token to {sorted(top_ks)} experts; on a GPU it has to be one number",
            fix="use --device cpu",
        )
    most = max((spec.moe(layer).experts for layer in spec.moe_layers), default=0)
    if most > MOST_EXPERTS:
        raise ConfigError(
            f"a layer of this model has {most:,} experts; on a GPU there may be {MOST_EXPERTS:,}",
            fix="use --device cpu",
        )
    if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        raise ConfigError(
            f"torch computes float32 products in {torch.get_float32_matmul_precision()!r} precision here",
            fix='call torch.set_float32_matmul_precision("highest"): routers decide in float32',
        )
