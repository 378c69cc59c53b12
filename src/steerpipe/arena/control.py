"""The control: the same training on labels that mean nothing. What it scores above chance is a leak, not knowledge."""

from dataclasses import replace

import torch

from steerpipe.predict.records import PackedTrace


def shuffled(trace: PackedTrace, seed: int = 0) -> PackedTrace:
    """`trace` with the expert numbers of each (token, layer) renamed at random, each by itself.

    Shuffling whole rows would leave every expert as popular as it is, and popularity alone scores above chance.
    """
    random = torch.Generator().manual_seed(seed)
    drawn = torch.empty_like(trace.experts)
    for layer in range(trace.geometry.layers):  # one at a time: [N, E] keys instead of [N, L, E]
        names = torch.rand(trace.rows, trace.geometry.experts, generator=random).argsort(1)  # [N, E]
        drawn[:, layer] = names[:, : trace.geometry.top_k].to(drawn)  # any k distinct ones are the renamed k
    return replace(trace, experts=drawn)
