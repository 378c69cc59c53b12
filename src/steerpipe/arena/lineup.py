"""Who takes part: what is counted in seconds from the training texts, the control, the bounds, and saved predictors."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from steerpipe.arena.apart import check_unseen
from steerpipe.arena.control import shuffled
from steerpipe.arena.entries import SHIPPED, Entry, Role, entries_of
from steerpipe.core.errors import InputError
from steerpipe.predict.bounds import Oracle, Random
from steerpipe.predict.files import load
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.records import TracedSequence
from steerpipe.predict.reuse import ReuseForecast
from steerpipe.predict.reuse_file import load_reuse
from steerpipe.predict.routers import Routers
from steerpipe.predict.shipped import for_model
from steerpipe.predict.stored import StoredPredictor, Training
from steerpipe.train.counts import count_affinity, count_frequency, count_previous, count_transition
from steerpipe.train.material import Material
from steerpipe.train.recipes import has_shared, train_lookahead

CONTROL = "shuffled labels"
_REUSE = "reuse"  # lies beside the predictors and says when an expert is used next: for eviction
_AFFINITY_NUMBERS = 200_000_000  # of the token table: 400 MB; models with large vocabularies get fewer layers


def usual_entries(material: Material, horizons: Sequence[int], source: str) -> list[Entry]:
    """Counted on `material`, and router lookahead where it has hidden states and the model's routers.

    `source`: whose routing it is, as tables shall name it.
    """
    return [
        *_counted(material, horizons, source),
        *_lookahead(material, horizons, source),
        _control(material, horizons),
        *_bounds(horizons),
    ]


def saved_entries(
    files: Sequence[Path], folder: Path | None, routers: Routers | None, horizons: Sequence[int], device: str,
    test: Sequence[TracedSequence], taken: Collection[str] = (),
    here: ModelMark | None = None,
) -> list[Entry]:  # fmt: skip
    """Predictors from `files`, and those that come with the model in `folder` (None: no model was named).

    Files of one name and different horizons are one entry; one more for a horizon is an entry named after its folder
    or file as well, one whose name is among `taken` after its file. One that answers at none of `horizons` is an entry
    without any. One that learnt from a prompt of `test` is refused, or an
    entry without any if it comes with the model; one of another model than `here` is refused.
    """
    shipped = for_model(folder) if folder is not None else None
    named = {file: SHIPPED for stem, file in shipped.files.items() if stem != _REUSE} if shipped is not None else {}
    named |= dict.fromkeys(files, "from a file")
    found: dict[str, Entry] = {}
    for file, origin in named.items():
        predictor = load(file, routers, device, here)
        try:
            check_unseen(predictor, file, test)
        except InputError as problem:
            if origin != SHIPPED:
                raise
            name = f"{predictor.name} ({file.stem})"  # nobody named it, so nobody could leave it out
            found[name] = Entry(name, {}, origin=origin, left_out=problem.what)
            continue
        answered: dict[int, RoutingPredictor] = {each: predictor for each in predictor.horizons if each in horizons}
        by_itself = predictor.name in taken or not answered
        for name in _names(predictor.name, file, by_itself=by_itself):
            other = found.get(name, Entry(name, {}, origin=origin))
            free = not other.files if by_itself else not answered.keys() & other.by_horizon.keys()
            if name not in taken and other.origin == origin and free:
                sources = {**other.files, **dict.fromkeys(answered, file)}
                found[name] = replace(other, by_horizon={**other.by_horizon, **answered}, files=sources)
                break
    return list(found.values())


def _names(name: str, file: Path, *, by_itself: bool) -> Iterator[str]:
    """What a saved predictor may be called, the best first; the last names one file alone."""
    if not by_itself:
        yield name
        if file.parent.name:
            yield f"{name} ({file.parent.name})"
    yield f"{name} ({file.stem})"
    yield f"{name} ({file})"


def shipped_reuse(folder: Path | None, here: ModelMark | None = None) -> ReuseForecast | None:
    """The reuse forecast that comes with the model in `folder`. InputError: it is of another model than `here`."""
    shipped = for_model(folder) if folder is not None else None
    file = shipped.files.get(_REUSE) if shipped is not None else None
    return None if file is None else load_reuse(file, here=here)


def _counted(material: Material, horizons: Sequence[int], source: str) -> list[Entry]:
    trace = material.trace
    layers = min(trace.geometry.layers, _AFFINITY_NUMBERS // (material.vocab * trace.geometry.experts))
    ahead = [horizon for horizon in horizons if horizon >= 1]
    makers: list[Callable[[], StoredPredictor]] = [
        lambda: count_frequency(trace, horizons),
        lambda: count_previous(trace, horizons),
        lambda: count_affinity(trace, material.vocab, own_layers=layers, horizons=horizons),
        lambda: count_transition(trace, ahead),
    ]
    return entries_of((_timed(make, material, source), "counted here") for make in makers)


def _lookahead(material: Material, horizons: Sequence[int], source: str) -> list[Entry]:
    """As published: on the residual, and with the exact shared expert where the family has one."""
    if material.routers is None or material.trace.states is None:
        return []
    kinds = (False, True) if has_shared(material) else (False,)
    made: list[tuple[RoutingPredictor, str]] = []
    for shared in kinds:
        makes = lambda shared=shared: train_lookahead(material, defaults=None, shared=shared, horizons=horizons)  # noqa: E731
        made.append((_timed(makes, material, source), "the model's routers"))
    return entries_of(made)


def _control(material: Material, horizons: Sequence[int]) -> Entry:
    counted = count_transition(shuffled(material.trace), [horizon for horizon in horizons if horizon >= 1])
    return Entry(CONTROL, dict.fromkeys(counted.horizons, counted), Role.CONTROL, "transition, on shuffled labels")


def _bounds(horizons: Sequence[int]) -> list[Entry]:
    return entries_of([(Oracle(horizons), "reads the answer"), (Random(horizons), "draws")], Role.BOUND)


def _timed(make: Callable[[], StoredPredictor], material: Material, source: str) -> StoredPredictor:
    begin = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - begin
    made.training = Training(material.trace.rows, material.prompts, seconds, str(material.trace.device), 0, source)
    return made
