"""A trace from a file of prompts: what is missing in the folder is traced and written, prompt after prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steerpipe.core.errors import InputError
from steerpipe.trace.header import TraceHeader, TraceOptions
from steerpipe.trace.prompts import FilePrompt
from steerpipe.trace.tracing import EncodedPrompt, TracedModel, Tracer
from steerpipe.trace.writer import TraceWriter


@dataclass(frozen=True, slots=True)
class Stand:
    """How far a trace is."""

    prompts: int  # that are wanted
    finished: int  # of them
    tokens: int  # in the whole folder
    new_tokens: int  # of this run
    resumed: int  # prompts that were there already
    lost_bytes: int  # torn tail of a former run that was cut off
    too_long: tuple[str, ...]  # prompts without room for an answer: left out


Report = Callable[[Stand], None]


def trace_options(model: TracedModel, *, window: int | None, generate: int, **kept: bool | int) -> TraceOptions:
    """Checked against the model. InputError: windows or answers that its context cannot hold."""
    longest = model.context if window is None else window
    if not 1 <= longest <= model.context:
        raise InputError(f"windows of {window} tokens", fix=f"the model's context holds 1 to {model.context}")
    if not 0 <= generate < longest:
        raise InputError(
            f"answers of {generate} tokens", fix=f"give 0 to {longest - 1}: prompt and answer share {longest} tokens"
        )
    if kept.get("batch", 1) < 1:
        raise InputError(f"a batch of {kept['batch']} prompts", fix="give 1 or more")
    plain = TraceOptions(engine=model.engine, dtype=model.dtype, max_tokens=longest, generate=generate)
    return replace(plain, **kept)  # type: ignore[arg-type]  # the fields that are left are bool and int


def collect_trace(
    tracer: Tracer, prompts: Sequence[FilePrompt], folder: Path, options: TraceOptions, report: Report
) -> Stand:
    """Traces every prompt that `folder` does not have yet. Interrupted at any moment, it keeps what was finished.

    `report` is called at the start and after every prompt.
    """
    tracer.check(options)
    model = tracer.model
    header = TraceHeader(model.identity, model.geometry, model.vocabulary, model.generator, options)
    sources = {prompt.id: prompt.source for prompt in prompts}
    with TraceWriter(folder, header) as writer:
        missing = [prompt for prompt in prompts if prompt.id not in writer.finished]
        encoded = [EncodedPrompt(each.id, each.encode(tracer.codec, raw=options.raw)) for each in missing]
        room = options.max_tokens - options.generate
        too_long = tuple(each.id for each in encoded if options.generate and len(each.tokens) > room)
        wanted = [each for each in encoded if each.id not in frozenset(too_long)]
        before = writer.tokens
        resumed = len(prompts) - len(missing)
        total = resumed + len(wanted)
        stand = Stand(total, resumed, before, 0, resumed, writer.lost_bytes, too_long)
        report(stand)
        for windows in tracer.trace(wanted, options):
            writer.write(windows, sources[windows[0].prompt])
            stand = replace(stand, finished=stand.finished + 1, tokens=writer.tokens, new_tokens=writer.tokens - before)
            report(stand)
    return stand
