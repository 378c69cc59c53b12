"""The seed's three networks: routing history [R, S, E] → logits [R, E]. R rows, S steps, E experts."""

from enum import StrEnum

import torch
from torch import Tensor, nn


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
    """Two layers of 256; the last state speaks."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(experts, 256, num_layers=2, batch_first=True)
        self.out = nn.Linear(256, experts)

    def forward(self, history: Tensor) -> Tensor:
        states, _ = self.lstm(history)
        logits: Tensor = self.out(states[:, -1])
        return logits


class ExpertTransformer(nn.Module):
    """Width 128, 50 learnt positions, 2 encoder layers of 4 heads and 512, dropout .1; the last step speaks."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(experts, 128)
        self.positions = nn.Parameter(torch.randn(1, 50, 128))
        layer = nn.TransformerEncoderLayer(d_model=128, nhead=4, dim_feedforward=512, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(128, experts)

    def forward(self, history: Tensor) -> Tensor:
        x = self.embedding(history) + self.positions[:, : history.shape[1]]
        logits: Tensor = self.out(self.encoder(x)[:, -1])
        return logits


def build(architecture: Architecture, experts: int, steps: int) -> nn.Module:
    """`steps`: length of the history."""
    if architecture is Architecture.MLP:
        return HistoryMlp(experts, steps)
    return HistoryLstm(experts) if architecture is Architecture.LSTM else ExpertTransformer(experts)


def multiply_adds(architecture: Architecture, experts: int, steps: int) -> int:
    """Of one decision."""
    if architecture is Architecture.MLP:
        return steps * experts * 512 + 512 * 256 + 256 * experts
    if architecture is Architecture.LSTM:
        return steps * 4 * 256 * (experts + 3 * 256) + 256 * experts
    per_step = experts * 128 + 2 * (4 * 128 * 128 + 2 * 128 * 512 + 2 * steps * 128)
    return steps * per_step + 128 * experts
