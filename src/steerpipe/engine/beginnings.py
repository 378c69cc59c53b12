"""What sequences take from the store of prompts, and what they leave there."""

from steerpipe.engine.prefixes import PrefixStore
from steerpipe.engine.request import Sequence


def reuse(prefixes: PrefixStore, sequence: Sequence) -> None:
    """Takes over the longest kept beginning of its prompt, if that is longer than what it has."""
    request = sequence.request
    if request.scope is None or request.prompt_logprobs is not None:
        return
    found = prefixes.fork(request.scope, request.prompt_ids)
    if found.length <= sequence.kv.length:
        found.free()
        return
    sequence.kv.free()
    sequence.kv = found
    if not sequence.started:  # else it finds what it computed itself, before it was sent back
        sequence.cached = found.length


def take_over(prefixes: PrefixStore, sequence: Sequence) -> bool:
    """Whether a prompt alone has what it goes on behind for itself now, until it leaves it: nothing is to be copied."""
    request = sequence.request
    ids = request.prompt_ids[: sequence.kv.length]
    return request.prompt_only and request.scope is not None and prefixes.hand_over(request.scope, ids)


def shorten(sequence: Sequence, length: int) -> None:
    """Gives up what was found of its prompt beyond `length`."""
    sequence.kv.truncate(length)
    sequence.cached = min(sequence.cached, length)


def leave(prefixes: PrefixStore, sequence: Sequence) -> None:
    """Its KV goes: what was prefilled to the store, for its scope; nothing of an answer that nobody asked for."""
    request = sequence.request
    if request.scope is None or sequence.ahead:
        sequence.kv.free()
        return
    sequence.kv.truncate(min(sequence.kv.length, len(request.prompt_ids)))
    prefixes.keep(request.scope, request.prompt_ids[: sequence.kv.length], sequence.kv)
    sequence.kv = prefixes.pool.sequence()
