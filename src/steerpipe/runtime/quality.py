"""The setting `quality` in a running engine: the desk that it comes to, and who looks on for it."""

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import ConfigError, DamagedFileError, InputError
from steerpipe.core.protocols import ForwardTap
from steerpipe.core.quality import (
    OF_A_LAYER,
    Allowance,
    AnswerQuality,
    Dial,
    MissPolicy,
    QualityPlan,
    Substituted,
    check_cpu,
)
from steerpipe.model.spec import ModelSpec
from steerpipe.model.weights import ModelWeights
from steerpipe.predict import files
from steerpipe.predict.logits import LogitPredictor
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.proposals import CommittedRoutes
from steerpipe.predict.routers import routers_of_weights
from steerpipe.predict.shipped import for_model
from steerpipe.runtime.experts import Ladder
from steerpipe.runtime.prediction import geometry_of, mark_of
from steerpipe.runtime.quality_profile import QualityProfile, load_profile, profile_of
from steerpipe.runtime.substitutes import Shelf, Substitutes, best_ranks
from steerpipe.store.reader import Pack


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan, and what it may cost where a profile says so."""

    name: str
    plan: QualityPlan
    allowance: Allowance | None = None
    identity: str = ""  # of the pack that it is for; without one, predictors of other weights are taken


@dataclass(frozen=True, slots=True)
class Quality:
    """Lossy answers to a miss, in one engine."""

    chosen: Chosen
    desk: Substitutes
    taps: tuple[ForwardTap, ...]

    def line(self, counts: Substituted) -> str:
        """What a person is told beside an answer."""
        said = (
            f"quality {self.chosen.name}: {counts.share:.1%} of {counts.uses} expert uses in decoding were substituted"
        )
        if counts.patched:
            said += f", {counts.patched} of them corrected later"
        if counts.computed:
            said += f", {counts.computed} computed where they lie"
        return said

    def of(self, counts: Substituted) -> AnswerQuality:
        return AnswerQuality(Path(self.chosen.name).name, counts, calibrated=self.chosen.allowance is not None)


def identity_of(pack: Pack) -> str:
    return f"{pack.manifest.source}-{pack.manifest.expert_format.value}"


def choose(
    config: EngineConfig, spec: ModelSpec, folder: Path, identity: str, *, form: str
) -> Chosen | None:  # fmt: skip
    """The plan that was asked for by name, by policy or as a file; None: exact. `form`: the format of the experts.

    It does not ask where the experts will lie: a wrong choice is told also where nothing is ever missed.
    """
    named = config.quality_profile
    profile = None if named is None else load_profile(Path(named), identity)  # read even where the answer is exact
    asked, by_name = config.quality, config.quality in (*Dial, *MissPolicy)
    if asked in (Dial.EXACT, MissPolicy.WAIT) or (by_name and not spec.moe_layers):
        return None
    ranks = {spec.moe(layer).top_k for layer in spec.moe_layers}
    if len(ranks) > 1:
        raise ConfigError("layers differ in how many experts a token uses", fix="use --quality exact")
    shape = len(spec.moe_layers), max(ranks, default=0)
    if asked in list(Dial):
        setting = (profile or _profile_beside(folder, identity, asked, spec)).setting(Dial(asked))
        chosen = Chosen(asked, setting.plan, setting.allowance, identity)
    else:
        plan = QualityPlan.uniform(MissPolicy(asked), *shape) if by_name else _read_plan(Path(asked))
        chosen = Chosen(asked, plan, identity=identity)
    if chosen.plan.shape != shape:
        raise ConfigError(
            f"the plan of quality {asked} is for {chosen.plan.shape[0]} layers and {chosen.plan.shape[1]} ranks",
            fix=f"this model has {shape[0]} layers with experts and {shape[1]} ranks",
        )
    check_cpu(chosen.plan.used, form)
    return chosen


def open_quality(
    chosen: Chosen | None, config: EngineConfig, spec: ModelSpec, weights: ModelWeights, folder: Path,
    source: Ladder,
) -> Quality | None:  # fmt: skip
    """None: the engine is exact, and asks nobody."""
    if chosen is None:
        return None
    shelf = source.impatient()
    home = folder if config.quality_profile is None else Path(config.quality_profile).parent
    here = mark_for(spec, chosen.identity)
    lookahead = find_lookahead(spec, weights, here, folder, home)
    vectors = vectors_for(chosen.plan, spec, lookahead)
    routes = _commits(chosen.plan, spec, weights, folder, lookahead, here, shelf)
    nearby = source.nearby() if MissPolicy.CPU in chosen.plan.used else None
    desk = Substitutes(
        chosen.plan, shelf, spec.moe_layers, vectors, routes, nearby=nearby, allowance=chosen.allowance
    )  # fmt: skip
    return Quality(chosen, desk, () if routes is None else (routes,))


def mark_for(spec: ModelSpec, identity: str) -> ModelMark:
    return mark_of(spec, identity.partition("-")[0] or None)


def uncalibrated(spec: ModelSpec, needed: str = "") -> ConfigError:
    """Of a model without a geometry: neither default vectors nor a profile can be measured."""
    shapes = {(spec.moe(layer).experts, spec.moe(layer).top_k) for layer in spec.moe_layers}
    whose = "layers that differ" if shapes else "no experts"
    if len(shapes) == 1:
        whose = "one layer of experts" if len(spec.moe_layers) == 1 else f"all {max(shapes)[0]} experts routed"
    fix = f"use --quality exact{' or drop' if len(shapes) == 1 else ''}, and no --cover"
    return ConfigError(f"{needed}a model with {whose} cannot be calibrated", fix=fix)


def vectors_for(plan: QualityPlan, spec: ModelSpec, lookahead: RouterLookahead) -> Tensor | None:
    """Default vectors [layers, E, H], where somebody has measured them. ConfigError: nobody can."""
    if lookahead.defaults is not None:
        return lookahead.defaults.vectors
    if geometry_of(spec) is None and plan.used & {MissPolicy.SURROGATE, MissPolicy.PATCH}:
        raise uncalibrated(spec, "surrogate and patch need default vectors, and ")
    return None


def find_lookahead(spec: ModelSpec, weights: ModelWeights, here: ModelMark, *places: Path) -> RouterLookahead:
    """The model's own, with default vectors where somebody has measured them: beside the model, or in one of `places`
    itself. InputError: they are of another model, or damaged."""
    routers = routers_of_weights(spec, weights).to("cpu")  # the desk's, wherever the model is computed
    for place in places:
        shipped = for_model(place)
        file = place / "lookahead.safetensors" if shipped is None else shipped.files.get("lookahead")
        if file is not None and file.is_file():
            found = files.load(file, routers, here=here)
            if isinstance(found, RouterLookahead):
                if found.defaults is not None and not found.defaults.vectors.isfinite().all():
                    raise DamagedFileError(
                        f"{file} has default vectors that are not finite", fix="remove it, then steerpipe calibrate"
                    )
                return found
    shared = all(spec.moe(layer).shared_width for layer in spec.moe_layers)
    return RouterLookahead(routers, shared=shared)


def committing(
    plan: QualityPlan, spec: ModelSpec, weights: ModelWeights, folder: Path, lookahead: RouterLookahead,
    here: ModelMark,
) -> dict[int, LogitPredictor]:  # fmt: skip
    """Who says the route of each layer that is committed to. The weights of `commit` are a router's; for `commit-true`,
    which needs the experts alone, a trained head is asked where there is one."""
    shipped = for_model(folder)
    head_file = None if shipped is None else shipped.heads().get(plan.horizon)
    head = None if head_file is None else files.load(head_file, routers_of_weights(spec, weights).to("cpu"), here=here)
    trained = head if isinstance(head, LogitPredictor) else lookahead
    return {
        number: trained if ranks[0] is MissPolicy.COMMIT_TRUE else lookahead
        for number, ranks in plan.rows()
        if ranks[0] in OF_A_LAYER and number >= plan.horizon
    }


def _commits(
    plan: QualityPlan, spec: ModelSpec, weights: ModelWeights, folder: Path, lookahead: RouterLookahead,
    here: ModelMark, shelf: Shelf,
) -> CommittedRoutes | None:  # fmt: skip
    if not plan.used & set(OF_A_LAYER):
        return None
    geometry = geometry_of(spec)
    if geometry is None or plan.horizon not in lookahead.horizons:
        raise ConfigError(
            f"nothing says the routes of this model {plan.horizon} layers ahead",
            fix="use drop" if geometry is None else "use surrogate, patch or drop",
        )

    def send(layer: int, experts: Tensor) -> None:
        routed = experts.cpu().numpy()
        shelf.send_for(layer, best_ranks(routed, shelf.missing(layer, routed)))

    renormalise = spec.moe(spec.moe_layers[0]).renormalise
    predictors = committing(plan, spec, weights, folder, lookahead, here)
    return CommittedRoutes(
        predictors, geometry, spec.moe_layers, renormalise=renormalise, horizon=plan.horizon, send=send
    )


def _read_plan(file: Path) -> QualityPlan:
    try:
        return QualityPlan.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as problem:
        raise InputError(f"{file} cannot be read as a quality plan: {problem}", fix="see docs/quality.md") from None


def _profile_beside(folder: Path, identity: str, asked: str, spec: ModelSpec) -> QualityProfile:
    file = profile_of(folder)
    if file is None and geometry_of(spec) is None:
        raise uncalibrated(spec, f"the quality {asked} needs a profile, and ")
    if file is None:
        raise ConfigError(
            f"the quality {asked} needs a profile, and nobody has measured this model",
            fix="steerpipe calibrate MODEL TEXTS, or --quality exact",
        )
    return load_profile(file, identity)
