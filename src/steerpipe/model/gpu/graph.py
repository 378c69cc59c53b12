"""Captured decode steps: one CUDA graph per number of rows and context bucket, replayed without a pause between layers.

A graph holds addresses, so everything that it reads or writes lies in buffers that stay where they are; what changes
from step to step travels in one copy, with which it begins. Legend: R rows, L MoE layers, k experts per row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.blocks import BlockSource
from steerpipe.model.gpu.branches import Branch, Branches, Predictor
from steerpipe.model.gpu.clock import Clock
from steerpipe.model.gpu.collection import without_collection
from steerpipe.model.gpu.direct import Follower, ReadThrough
from steerpipe.model.gpu.experts import Direct
from steerpipe.model.gpu.inputs import StepInputs
from steerpipe.model.gpu.mailbox import Mailbox
from steerpipe.model.gpu.network import ExpertRun, Network
from steerpipe.model.gpu.predicted import PredictedStep
from steerpipe.model.gpu.reuse import ReuseBranch
from steerpipe.model.gpu.rows import Pass, Picked, Step, room_for, routing_buffer
from steerpipe.model.gpu.steer import Steer

_LAST_POLLS = 48  # of 2 us and more: the last tap speaks some 55 us after its router


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [R, vocab] fp32, written by each replay


class _Kind(NamedTuple):
    """What a captured step depends on."""

    room: int
    forced: bool
    branch: Branch | None  # of who predicts in it
    reuse: ReuseBranch | None  # who forecasts reuse in it


@dataclass(frozen=True, slots=True)
class Served:
    """What one step leaves on the device: all but the logits is valid until the next one."""

    logits: Tensor  # [wanted rows, vocab] fp32
    experts: Tensor  # [L, R, k] int32
    gates: Tensor  # [L, R, k] fp32


class StepGraphs:
    """All graphs of one class of steps (`rows` rows) over one source. One thread; captures when first needed."""

    def __init__(
        self, network: Network, source: BlockSource, rows: int, device: torch.device, clock: Clock | None = None,
        guess_clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """`clock`: who writes down a step's times; `guess_clock`: those of what it sends for ahead."""
        layers = network.spec.moe_layers
        top_k = network.spec.moe(layers[0]).top_k if layers else 1
        self._network = network
        self._source = source
        self._rows = rows
        self._layers = layers
        self._inputs = StepInputs(rows, network.reach, device)
        self._experts = routing_buffer(len(layers), rows, top_k, torch.int32, device)
        self._forced = routing_buffer(len(layers), rows, top_k, torch.int32, device)
        self._gates = routing_buffer(len(layers), rows, top_k, torch.float32, device)
        self._mailbox = Mailbox(len(layers), rows * top_k, pinned=True)
        self._stream = torch.cuda.Stream(device)
        self._urgent = torch.cuda.Stream(device, priority=-1)  # who goes first beside a predictor
        self._side = torch.cuda.Stream(device) if rows == 1 else None  # batches have no time to win there
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[_Kind, _Captured] = {}
        self._stamp = 0
        self._begins = False  # the last step was queued, and perhaps has not begun
        self._run: ExpertRun = Direct(source)
        self._follower: Follower | None = None
        if rows == 1 and source.landing is not None:
            self._run = ReadThrough(source, source.landing, top_k, device)
            self._follower = Follower(source, source.landing, layers, self._mailbox)
        self._clock = clock
        self._spoke: Branch | None = None  # in the step before, until it is taken
        stamp = self._inputs.stamp
        self._branches = Branches(network, source, stamp, top_k, device, guess_clock) if rows == 1 else None

    def run(
        self, rows: Pass, places: NDArray[np.int64], forced: Tensor | None, said: Tensor | None = None,
        reuse: ReuseBranch | None = None, predictor: Predictor | None = None,
    ) -> Served:  # fmt: skip
        """One step, and the logits of its rows `places`. The host serves its layers as they ask; results are queued,
        not awaited.

        `said` [L, h, n] int32: what the taps say instead of their own (kernels/foretell.py). `reuse`: a branch of it.
        `predictor`: who predicts in a step of one row; it may be another one in every step.
        """
        self._await_begun()
        branch = self._enter(predictor)
        speaks = None if branch is None or branch.resting else branch
        kind = _Kind(room_for(rows.keys), forced is not None, speaks, reuse)
        captured = self._captured.get(kind) or self._capture_all(kind)
        self._stamp += 1
        self._inputs.write(rows, kind.room, self._stamp)
        if forced is not None:
            self._forced.copy_(forced, non_blocking=True)
        if said is not None and speaks is not None:
            speaks.say(said)
        picked = Picked(captured.logits, places)  # takes memory: not while the device waits for us

        def queue() -> None:
            captured.graph.replay()
            picked.queue()  # now: who has followed the last layer is late already

        if self._source.resident:
            self._replay_resident(queue)
        elif self._follower is not None and (speaks is None or speaks.fetching is not None):
            self._replay_followed(self._follower, queue, branch, rests=speaks is None)
        else:
            self._replay_served(queue, branch, rests=speaks is None)
        self._spoke = speaks
        return Served(picked.rows, self._experts, self._gates)

    def take_predicted(self) -> PredictedStep | None:
        """What the last step said and came to, once, if anybody spoke in it. The device has finished it, but perhaps
        for a predictor apart: what that has not answered yet counts nowhere."""
        spoke, self._spoke = self._spoke, None
        if spoke is None:
            return None
        named, ahead = spoke.named
        sent = None if spoke.fetching is None else spoke.fetching.mail.words.numpy().copy()
        routed = self._mailbox.words.numpy().copy()
        return PredictedStep(spoke.forecaster, self._stamp, named.numpy().copy(), routed, sent, ahead)

    def _enter(self, predictor: Predictor | None) -> Branch | None:
        """Whose step it is."""
        branches = self._branches
        if branches is None:
            return None
        if branches.fetching is not None:
            branches.fetching.slots.collect()
        branch = branches.of(predictor)
        branches.turn_to(branch)
        return branch

    def _replay_resident(self, queue: Callable[[], None]) -> None:
        """Nobody follows it: the host runs ahead of the device by one step."""
        try:
            queue()
            self._begins = bool(self._layers)
            if not self._begins:
                self._inputs.read_later()
        except BaseException:  # an interrupt: whether it was queued is not known
            _wait()
            raise

    def _await_begun(self) -> None:
        """A step that nobody followed has copied its integers when its first router has posted."""
        if self._begins:
            self._mailbox.wait(0, self._stamp, _finished)
            self._begins = False

    def _replay_followed(
        self, follower: Follower, queue: Callable[[], None], branch: Branch | None, *, rests: bool
    ) -> None:
        """Who is throttled has a layer's questions less before him; who is not asked has as many as before."""
        fetching = None if self._branches is None else self._branches.fetching
        steer = None if branch is None else branch.steer  # of who is served, and rests
        layers = 0 if branch is None or steer is not None else len(self._layers)
        words = None if rests or branch is None or branch.tap is None else branch.tap.words
        follower.run(queue, self._stamp, _finished, _wait, fetching, words, rests=layers)
        if steer is not None:
            steer.rest()

    def _replay_served(self, queue: Callable[[], None], branch: Branch | None, *, rests: bool) -> None:
        """From the replay to the last layer's service nothing may wait for the device: it may be waiting for us."""
        with without_collection():
            try:
                self._source.begin()
                queue()
                if branch is None or rests:
                    self._serve()
                else:
                    self._serve_predicting(branch)
                if branch is not None and branch.steer is not None and rests:
                    branch.steer.rest()
            except BaseException:  # an interrupt as well: kernels that wait would wait for ever
                self._source.release()
                raise

    def _serve(self) -> None:
        """Every layer, as its router asks."""
        for order, layer in enumerate(self._layers):
            self._source.serve(layer, self._mailbox.take(order, self._stamp, _finished))

    def _serve_predicting(self, branch: Branch) -> None:
        """As its router asks or, where the tap before it decides, as that has said."""
        steer, tap, stamp = branch.steer, branch.tap, self._stamp
        if steer is not None:
            steer.begin(stamp)
        for order, layer in enumerate(self._layers):
            if tap is not None and tap.decides(order):
                self._source.serve(layer, tap.take_decided(order, stamp, _finished), ahead=True)
            elif steer is None:
                self._source.serve(layer, self._mailbox.take(order, stamp, _finished))
            else:
                routed = self._mailbox.take(order, stamp, _finished, steer.poll)
                steer.served(routed)
                self._source.serve(layer, routed, meanwhile=steer.poll)
        if steer is not None:
            _end(steer)

    def _step(self, kind: _Kind) -> Step:
        stamp, tokens, positions, turns, blocks = self._inputs.views(kind.room)
        return Step(
            stamp, tokens, positions, turns, blocks, self._experts, self._gates, base=None, room=kind.room,
            mailbox=self._mailbox.words, forced=self._forced if kind.forced else None, side=self._side_of(kind),
            tap=None if kind.branch is None else kind.branch.tap, clock=self._clock, reuse=kind.reuse,
        )  # fmt: skip

    def _side_of(self, kind: _Kind) -> torch.cuda.Stream | None:
        """Where experts read for long and wait for nobody, the shared one goes first: a tap and the sum wait for it."""
        return self._urgent if kind.branch is not None and kind.branch.fetching is not None else self._side

    def _capture_all(self, kind: _Kind) -> _Captured:
        """Who predicts may rest one day: without a pause."""
        for needed in (kind, kind._replace(branch=None)):
            if needed not in self._captured:
                self._captured[needed] = self._capture(needed)
        return self._captured[kind]

    def _capture(self, kind: _Kind) -> _Captured:
        """A run without any real row compiles the kernels and wakes cuBLAS."""
        step, experts = self._step(kind), self._run if kind.branch is None else kind.branch.run
        stream = self._urgent if kind.branch is not None and kind.branch.fetching is None else self._stream
        self._inputs.write_nobody(kind.room)
        self._forced.fill_(-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._queue(step, kind, experts)
            self._inputs.read_later()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # threads that read or copy experts go on meanwhile: their calls are not ours to forbid
        capture = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with without_collection(), capture:
            logits = self._queue(step, kind, experts)
        return _Captured(graph, logits)

    def _queue(self, step: Step, kind: _Kind, experts: ExpertRun) -> Tensor:
        self._inputs.queue(kind.room)
        logits = self._network.head(self._network.hidden(step, experts))
        if kind.branch is not None and kind.branch.fetching is not None:
            kind.branch.fetching.join()
        return logits


def _end(steer: Steer) -> None:
    """While the device computes its last experts and the logits, the host has time."""
    for _ in range(_LAST_POLLS):
        if not steer.waiting:
            break
        steer.poll()
    steer.end()


def _finished() -> bool:
    """Whether the device has run all that was queued on this stream."""
    return torch.cuda.current_stream().query()


def _wait() -> None:
    torch.cuda.current_stream().synchronize()
