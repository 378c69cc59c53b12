"""The seed's three networks: routing history [R, S, E] → logits [R, E]. R rows, S steps, E experts."""

from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Architecture(StrEnum):
    MLP = "mlp"
    LSTM = "lstm"
    TRANSFORMER = "transformer"


class HistoryMlp(nn.Module):
    """Three layers on the flattened history. The seed gives no widths; with 512 and 256 it has as many parameters as
    the transformer (.45 M at 10 x 60)."""

    def __init__(self, experts: int, steps: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(steps * experts, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, experts),
        )

    def forward(self, history: Tensor) -> Tensor:
        logits: Tensor = self.layers(history)
        return logits


class HistoryLstm(nn.Module):
    """Two layers of 256; the last state speaks.

    The steps are written out: many of these networks learn as one batch, for which the library's LSTM has no rule.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(experts, 256, num_layers=2, batch_first=True)
        self.out = nn.Linear(256, experts)

    def forward(self, history: Tensor) -> Tensor:
        x = history  # [R, S, E]
        for ih, hh, ih_bias, hh_bias in self.lstm.all_weights:
            x = _recur(F.linear(x, ih, ih_bias + hh_bias), hh)  # [R, S, 256]
        logits: Tensor = self.out(x[:, -1])
        return logits

    @torch.no_grad()
    def start_at(self, rates: Tensor) -> None:
        """Before training: the experts' `rates` [E] as the first answer, and inputs that are heard.

        From PyTorch's own start every weight first learns the rates, and within 20 steps of nano the last state is the
        same for every history: the network hears nothing any more.
        """
        self.out.bias.copy_(torch.logit(rates, eps=1e-4))
        for (weight, *_), std in zip(self.lstm.all_weights, (0.5, 0.125), strict=True):
            nn.init.normal_(weight, std=std)


def _recur(driven: Tensor, weight: Tensor) -> Tensor:
    """States of one layer: what its inputs say [R, S, 4 x 256] → [R, S, 256]."""
    state = cell = torch.zeros_like(driven[:, 0, : weight.shape[1]])
    states = []
    for step in range(driven.shape[1]):
        enter, keep, new, show = (driven[:, step] + F.linear(state, weight)).chunk(4, dim=-1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
        state = torch.sigmoid(show) * torch.tanh(cell)
        states.append(state)
    return torch.stack(states, dim=1)


POSITIONS = 50  # of an ExpertTransformer


class ExpertTransformer(nn.Module):
    """Width 128, 50 learnt positions, 2 encoder layers of 4 heads and 512, dropout .1; the last step speaks.

    Of the last encoder layer the last step alone is computed: nobody reads the others (2.6 instead of 4.1 M
    multiply-adds for 10 steps).
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(experts, 128)
        self.positions = nn.Parameter(torch.randn(1, POSITIONS, 128))
        layer = nn.TransformerEncoderLayer(d_model=128, nhead=4, dim_feedforward=512, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(128, experts)

    def forward(self, history: Tensor) -> Tensor:
        x = self.embedding(history) + self.positions[:, : history.shape[1]]  # [R, S, 128]
        first, last = self.encoder.layers
        x = _encode(first, x, x)
        logits: Tensor = self.out(_encode(last, x, x[:, -1:])[:, 0])
        return logits


def _encode(layer: nn.Module, x: Tensor, own: Tensor) -> Tensor:
    """`layer(x)` of the steps `own` of x alone: [R, S, 128], [R, O, 128] → [R, O, 128].

    Written out: over 20 steps plain products are faster than fused attention, whose tiles hold 128.
    """
    assert isinstance(layer, nn.TransformerEncoderLayer), "the encoder is made of them"
    own = layer.norm1(own + layer.dropout1(_attend(layer.self_attn, x, own)))
    told: Tensor = layer.linear2(layer.dropout(layer.activation(layer.linear1(own))))
    encoded: Tensor = layer.norm2(own + layer.dropout2(told))
    return encoded


def _attend(attention: nn.MultiheadAttention, x: Tensor, own: Tensor) -> Tensor:
    """What the steps `own` hear from all steps of x."""
    width, heads = attention.embed_dim, attention.num_heads
    weights = attention.in_proj_weight.split((width, 2 * width))
    biases = attention.in_proj_bias.split((width, 2 * width))
    query = F.linear(own, weights[0], biases[0]).unflatten(-1, (heads, -1)).transpose(1, 2)  # [R, 4, O, 32]
    both = F.linear(x, weights[1], biases[1]).unflatten(-1, (2, heads, -1))  # [R, S, 2, 4, 32]
    key, value = both.permute(2, 0, 3, 1, 4)  # [R, 4, S, 32] each
    shares = torch.softmax(query @ key.mT * attention.head_dim**-0.5, dim=-1)
    heard = F.dropout(shares, attention.dropout, attention.training) @ value
    told: Tensor = attention.out_proj(heard.transpose(1, 2).flatten(2))
    return told


def build(architecture: Architecture, experts: int, steps: int) -> nn.Module:
    """`steps`: length of the history. ValueError: an ExpertTransformer has no positions for so many."""
    if architecture is Architecture.TRANSFORMER and steps > POSITIONS:
        raise ValueError(f"a history of {steps} steps, and an ExpertTransformer has {POSITIONS} positions")
    if architecture is Architecture.MLP:
        return HistoryMlp(experts, steps)
    return HistoryLstm(experts) if architecture is Architecture.LSTM else ExpertTransformer(experts)


def multiply_adds(architecture: Architecture, experts: int, steps: int) -> int:
    """Of one decision."""
    if architecture is Architecture.MLP:
        return steps * experts * 512 + 512 * 256 + 256 * experts
    if architecture is Architecture.LSTM:
        return steps * 4 * 256 * (experts + 3 * 256) + 256 * experts
    every_step = experts * 128 + 4 * 128 * 128 + 2 * 128 * 512 + 2 * steps * 128
    keys_and_values = 2 * 128 * 128  # of the last layer
    last_step = 2 * 128 * 128 + 2 * 128 * 512 + 2 * steps * 128
    return steps * (every_step + keys_and_values) + last_step + 128 * experts
