"""The training loop: steps, checkpoints, and a stop by the clock from which a later call goes on exactly."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.nano.checkpoint import Progress, load_checkpoint, save_checkpoint
from recipes.nano.config import Preset, TrainPlan, plain
from recipes.nano.corpus import Batch, Tokens, batches, epoch_windows
from recipes.nano.device import CapturedStep, DeviceBatch, compile_blocks, pick_device, place
from recipes.nano.evaluate import bits_per_byte
from recipes.nano.model import Decoder, RouterLoss, cross_entropy, load_entropy, soft_cross_entropy
from recipes.nano.optimizer import MuonAdamW


@dataclass(frozen=True)
class Clock:
    """When to stop and how often to speak; none of it changes the weights."""

    stop_after_seconds: float = math.inf
    checkpoint_every_seconds: float = 60.0  # a kill loses at most this much; a checkpoint of nano is 0.5 GB
    report_every_steps: int = 100
    validate_every_steps: int = 1000


class Run:
    """One model on its way: `advance` trains until the plan is done or the clock runs out."""

    def __init__(
        self, preset: Preset, train: Tokens, held_back: Tokens, out: Path, teacher: Decoder | None = None
    ) -> None:
        self.plan, self.out, self.teacher = preset.plan, out, teacher
        self.train_tokens, self.held_back = train, held_back
        device = pick_device()
        torch.manual_seed(self.plan.seed)
        self.model = Decoder(preset.shape, self.plan.dropout).to(device)
        self.optimizer = MuonAdamW(self.model.named_parameters(), self.plan.weight_decay)
        self.progress = load_checkpoint(out, self.model, self.optimizer, self.plan) or Progress()
        self.steps = plan_steps(train, self.plan)
        self.feed = self._batches()
        self.hard_loss, self.soft_loss, self.gradients = cross_entropy, soft_cross_entropy, self._gradients
        if device.type == "cuda":
            self._compile()

    @property
    def done(self) -> bool:
        return self.progress.step >= self.steps

    def advance(self, clock: Clock) -> bool:
        """Train; True when the plan is done. Always leaves a checkpoint of where it stopped."""
        start = saved = time.monotonic()
        before = self.progress
        self.log(event="start", step=before.step, steps=self.steps, plan=plain(self.plan))
        while not self.done and time.monotonic() - start < clock.stop_after_seconds:
            loss, load = self._step()
            step, elapsed = self.progress.step, time.monotonic() - start
            self.progress = replace(self.progress, seconds=before.seconds + elapsed)
            if step % clock.report_every_steps == 0 or self.done:
                rate = round((step - before.step) * self.plan.tokens_per_step / elapsed)
                self.log(step=step, loss=round(float(loss), 4), **_load_figures(load), tokens_per_second=rate)
            if step % clock.validate_every_steps == 0 or self.done:
                self.log(step=step, held_back_bits_per_byte=self.validate())
            if elapsed - (saved - start) > clock.checkpoint_every_seconds:
                self.save()
                saved = time.monotonic()
        self.save()
        return self.done

    def save(self) -> None:
        save_checkpoint(self.out, self.model, self.optimizer, self.plan, self.progress)

    def validate(self) -> dict[str, float]:
        """Bits per byte of the training documents that were held back, by source."""
        scores = bits_per_byte(self.model, self.held_back, self.plan.tokens_per_step)
        return {source: round(score.bits_per_byte, 4) for source, score in scores.items()}

    def log(self, **entry: Any) -> None:
        line = json.dumps({**entry, "seconds": round(self.progress.seconds, 1)})
        print(line, flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "log.jsonl").open("a") as log:
            log.write(line + "\n")

    def _compile(self) -> None:
        for model in filter(None, (self.model, self.teacher)):
            compile_blocks(model)
        self.hard_loss, self.soft_loss = torch.compile(cross_entropy), torch.compile(soft_cross_entropy)
        self.gradients = CapturedStep(self._gradients, self.model.zero_grad)

    def _step(self) -> tuple[Tensor, Tensor]:
        # Dropout depends on the step alone: a resumed run draws what an uninterrupted one would have drawn.
        torch.manual_seed(self.plan.seed * 1_000_003 + self.progress.step)
        batch = place(next(self.feed), self.model.embedding.device)
        self.model.train()
        loss, load = self.gradients(batch)
        factor = rate_factor(self.progress.step, self.steps, self.plan.warmup_steps)
        self.optimizer.step(self.plan.matrix_rate * factor, self.plan.vector_rate * factor)
        if not isinstance(self.gradients, CapturedStep):
            self.model.zero_grad()
        self.progress = replace(self.progress, step=self.progress.step + 1, batch=self.progress.batch + 1)
        return loss, load

    def _gradients(self, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Add the gradients of the whole loss to the parameters; the loss of the text alone is what is reported."""
        hidden, routers = self.model(batch.inputs, batch.positions, batch.bounds)
        text_loss = self.hard_loss(hidden, self.model.embedding, batch.targets).mean()
        (self._with_teacher(text_loss, hidden, batch) + router_loss(routers, self.plan)).backward()
        return text_loss.detach(), _loads(routers)

    def _with_teacher(self, text_loss: Tensor, hidden: Tensor, batch: DeviceBatch) -> Tensor:
        if self.teacher is None or not self.plan.teacher_share:
            return text_loss
        with torch.no_grad():
            known, _ = self.teacher(batch.inputs, batch.positions, batch.bounds)
            teacher_logits = self.teacher.logits(known)
        soft_loss = self.soft_loss(hidden, self.model.embedding, teacher_logits).mean()
        return torch.lerp(text_loss, soft_loss, self.plan.teacher_share)

    def _batches(self) -> Iterator[Batch]:
        """From where the run stands to the end of time; moves `progress` to the next epoch when one is used up."""
        while True:
            at, plan = self.progress, self.plan
            tokens, context = self.train_tokens, self.model.shape.context
            windows = epoch_windows(tokens, context, plan.source_weights, plan.seed, at.epoch)
            yield from batches(tokens, windows, plan.tokens_per_step, first_batch=at.batch)
            self.progress = replace(self.progress, epoch=at.epoch + 1, batch=0)


def plan_steps(train: Tokens, plan: TrainPlan) -> int:
    """Steps of the whole plan: epochs of the weighted corpus."""
    lengths = train.starts[1:] - train.starts[:-1]
    weights = [plan.source_weights.get(str(source), 1.0) for source in train.sources]
    return max(1, round(plan.epochs * float((lengths * weights).sum()) / plan.tokens_per_step))


def rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Linear from 0 to 1 over the warm-up, then linear to 0 at the end of the plan."""
    return min((step + 1) / warmup_steps, (steps - step) / max(1, steps - warmup_steps), 1.0)


def router_loss(routers: list[RouterLoss], plan: TrainPlan) -> Tensor | float:
    return sum((plan.balance_loss * r.balance + plan.router_z_loss * r.z for r in routers), start=0.0)


def _loads(routers: list[RouterLoss]) -> Tensor:
    """Rows per expert and layer [layers with a router, experts]."""
    return torch.stack([router.load for router in routers]) if routers else torch.empty(0)


def _load_figures(load: Tensor) -> dict[str, float]:
    """The least even layer's load entropy (1 is even), for the log. Waits for the device."""
    if not len(load):
        return {}
    return {"least_load_entropy": round(float(load_entropy(load).min()), 4)}
