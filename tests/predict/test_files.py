"""What is saved comes back: every kind, every storage; what is no predictor is refused with words."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from steerpipe.core.errors import ConfigError, DamagedFileError, InputError
from steerpipe.predict.blend import Blend
from steerpipe.predict.calibration import Calibration, uncalibrated
from steerpipe.predict.estimator import Estimator, EstimatorNetwork, Hybrid
from steerpipe.predict.files import load, save
from steerpipe.predict.head import HeadNetwork, ResidualHead
from steerpipe.predict.kinds import KINDS
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.preattention import Architecture as PreAttentionArchitecture
from steerpipe.predict.preattention import PreAttention, PreAttentionNetwork
from steerpipe.predict.records import Geometry
from steerpipe.predict.sight import Decision, Sight, rows_for
from steerpipe.predict.storage import Storage, restored, stored
from steerpipe.predict.stored import StoredPredictor, Training
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture, build
from steerpipe.predict.window import Window
from steerpipe.train.counts import count_affinity, count_frequency, count_previous, count_transition
from tests.predict.planted import GEOMETRY, VOCAB, model_trace, planted_defaults, planted_routers

TRACE = model_trace(tokens=60, memory=0.5)


def shaken(network: torch.nn.Module) -> torch.nn.Module:
    """Every parameter away from where it starts."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return network


def every_kind() -> dict[str, StoredPredictor]:
    routers, defaults, own = planted_routers(), planted_defaults(), uncalibrated(1, GEOMETRY.layers)
    head_network = HeadNetwork(routers, rank=3, shared=True)
    estimator_network = EstimatorNetwork(routers, width=20, shared=True, defaults=defaults)
    early_network = PreAttentionNetwork(routers, architecture=PreAttentionArchitecture.BATCHNORM, width=24)
    for network in (head_network, estimator_network, early_network):
        shaken(network)
    scaled = Calibration(torch.full((4, 4), 1.5), torch.full((4, 4), -0.2))
    estimator = Estimator(estimator_network, routers, 1, own)
    head = ResidualHead(head_network, routers, 1, own)
    history = {Decision(3, 1): shaken(build(Architecture.TRANSFORMER, GEOMETRY.experts, 4))}
    lookahead = RouterLookahead(routers, shared=True, defaults=defaults, calibration=scaled)
    previous = count_previous(TRACE)
    made: list[StoredPredictor] = [
        count_frequency(TRACE), previous, count_transition(TRACE), count_affinity(TRACE, VOCAB), lookahead,
        estimator, Hybrid(estimator, (1, 3), own), head, PreAttention(early_network, routers, 0, own),
        Trajectory(Architecture.TRANSFORMER, GEOMETRY.experts, history, window=Window.BOTH, steps=2),
        Blend([head, lookahead, previous], 1, torch.rand(4, 3), torch.rand(4)),
    ]  # fmt: skip
    return {each.kind: each for each in made}


def said(predictor: StoredPredictor) -> torch.Tensor:
    decision = Decision(3, predictor.horizons[0] if predictor.kind != "transition" else 1)
    return predictor.probabilities(Sight(TRACE, rows_for(TRACE, decision), decision))


def test_every_kind_is_tested() -> None:
    assert every_kind().keys() == KINDS.keys()


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_saved_comes_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    predictor = every_kind()[kind]
    predictor.training = Training(60, 3, 1.5, "CPU", 7, "planted")
    size = save(predictor, tmp_path / "made.safetensors")
    again = load(tmp_path / "made.safetensors", planted_routers())
    assert (tmp_path / "made.safetensors").stat().st_size == size
    assert type(again) is type(predictor) and again.config() == predictor.config()
    assert again.name == predictor.name and list(again.horizons) == list(predictor.horizons)
    assert again.training == predictor.training and again.cost() == predictor.cost()
    assert torch.equal(said(again), said(predictor))
    assert torch.equal(said(again.to("cpu")), said(predictor))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.safetensors"]  # nothing half-written


@pytest.mark.parametrize(("storage", "error"), [(Storage.FLOAT16, 1e-3), (Storage.INT8, 5e-3), (Storage.INT4, 0.1)])
def test_fewer_bits_are_close_and_load_the_same_twice(storage: Storage, error: float) -> None:
    drawn = {"wide": torch.randn(8, 5, 444, generator=torch.Generator().manual_seed(1)), "few": torch.ones(3, 3)}
    kept = stored(drawn, storage)
    back = restored(kept)
    assert back.keys() == drawn.keys() and back["wide"].shape == (8, 5, 444)
    largest = drawn["wide"].abs().max()
    assert (back["wide"].float() - drawn["wide"]).abs().max() <= error * largest
    assert torch.equal(back["few"], drawn["few"])
    kept_bytes = sum(tensor.numel() * tensor.itemsize for tensor in kept.values())
    assert kept_bytes < 4 * drawn["wide"].numel() * {"float16": 0.51, "int8": 0.26, "int4": 0.15}[storage]
    assert all(torch.equal(one, two) for one, two in zip(back.values(), restored(kept).values(), strict=True))


def test_a_row_of_zeros_survives_every_storage() -> None:
    for storage in Storage:
        back = restored(stored({"zeros": torch.zeros(16, 256)}, storage))["zeros"]
        assert torch.equal(back.float(), torch.zeros(16, 256))


def test_routers_are_asked_for() -> None:
    kinds = every_kind()
    for kind in ("lookahead", "head", "estimator", "preattention", "hybrid"):
        with pytest.raises(ConfigError, match="applies the model's own routers"):
            type(kinds[kind]).restore(kinds[kind].config(), kinds[kind].tensors(), None)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("marked", [True, False])
def test_a_predictor_of_a_model_with_other_layers_or_experts_is_refused(
    kind: str, marked: bool, tmp_path: Path
) -> None:
    file, predictor = tmp_path / "a.safetensors", every_kind()[kind]
    predictor.mark = ModelMark.of(GEOMETRY) if marked else None
    save(predictor, file)
    assert load(file, planted_routers(), here=ModelMark.of(GEOMETRY)).mark == predictor.mark
    other = Geometry(layers=6, experts=12, top_k=2, hidden=16)
    with pytest.raises(InputError, match=r"is of a model with .*; this one has .*\n  fix: remove it") as caught:
        load(file, planted_routers(geometry=other))
    assert not isinstance(caught.value, DamagedFileError)
    with pytest.raises(InputError, match=r"is of a model with .*; this one has"):
        load(file, planted_routers(), here=ModelMark.of(other))


@pytest.mark.parametrize("kind", ["lookahead", "estimator", "hybrid", "preattention", "head"])
def test_states_of_another_width_are_refused_where_they_matter(kind: str, tmp_path: Path) -> None:
    save(every_kind()[kind], tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="16 hidden; this one has 4 MoE layers, 8 experts, 20 hidden"):
        load(tmp_path / "a.safetensors", planted_routers(geometry=replace(GEOMETRY, hidden=20)))


def test_a_mark_tells_models_apart_that_have_the_same_tables(tmp_path: Path) -> None:
    file, predictor = tmp_path / "a.safetensors", every_kind()["frequency"]
    predictor.mark = ModelMark.of(GEOMETRY, "aa11-int4-bf16")
    save(predictor, file)
    assert load(file, here=ModelMark.of(GEOMETRY, "aa11")).mark == predictor.to("cpu").mark == predictor.mark
    load(file, here=ModelMark.of(GEOMETRY))  # nobody knows its weights
    with pytest.raises(InputError, match=r"weights aa11; this one has .*weights bb22"):
        load(file, here=ModelMark.of(GEOMETRY, "bb22"))
    with pytest.raises(InputError, match=r"2 of them routed, 16 hidden; this one has .* 3 of them routed"):
        load(file, here=ModelMark.of(replace(GEOMETRY, top_k=3)))


def test_a_blend_is_told_by_its_parts(tmp_path: Path) -> None:
    networks = {Decision(3, 1): build(Architecture.MLP, 8, 2)}
    history = Trajectory(Architecture.MLP, GEOMETRY.experts, networks, steps=2)
    save(Blend([history, history], 1, torch.rand(4, 2), torch.rand(4)), tmp_path / "a.safetensors")
    load(tmp_path / "a.safetensors", here=ModelMark.of(GEOMETRY))
    with pytest.raises(InputError, match="4 MoE layers, 8 experts; this one has 4 MoE layers, 60 experts"):
        load(tmp_path / "a.safetensors", here=ModelMark.of(replace(GEOMETRY, experts=60)))


def test_a_mark_that_is_none_is_damage(tmp_path: Path) -> None:
    for raw in ('{"layers": "4"}', '{"depth": 4}', "[4]"):
        said_ = f'{{"schema": 1, "kind": "frequency", "config": {{"horizons": [1]}}, "training": null, "model": {raw}}}'
        save_file({"rates": torch.zeros(4, 8)}, tmp_path / "wrong", {"steerpipe": said_})
        with pytest.raises(DamagedFileError, match="is no frequency predictor"):
            load(tmp_path / "wrong")


def test_an_expert_transformer_of_more_steps_than_it_has_positions_is_damage(tmp_path: Path) -> None:
    networks = {Decision(3, 1): build(Architecture.TRANSFORMER, 8, 50)}
    history = Trajectory(Architecture.TRANSFORMER, GEOMETRY.experts, networks, steps=50)
    save(history, tmp_path / "most.safetensors")
    load(tmp_path / "most.safetensors")
    history.steps = 51
    save(history, tmp_path / "more.safetensors")
    with pytest.raises(DamagedFileError, match="51 steps, and an ExpertTransformer has 50 positions"):
        load(tmp_path / "more.safetensors")


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder\n  fix: give one of the \.safetensors files"):
        load(tmp_path)


def test_what_is_no_predictor_is_refused_with_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path / "nothing.safetensors")
    (tmp_path / "cut").write_bytes(b"\x08\x00\x00")
    with pytest.raises(DamagedFileError):
        load(tmp_path / "cut")
    save_file({"x": torch.zeros(2)}, tmp_path / "plain")
    with pytest.raises(InputError, match="is no predictor"):
        load(tmp_path / "plain")
    for said_, words in (
        ('{"schema": 99, "kind": "head", "config": {}, "training": null}', "schema 99"),
        ('{"schema": 1, "kind": "crystal-ball", "config": {}, "training": null}', "no predictor of kind"),
        ('{"schema": 1, "kind": "frequency", "config": {}, "training": null}', "is no frequency predictor"),
        ("[]", "is no predictor"),
    ):
        save_file({"x": torch.zeros(2)}, tmp_path / "wrong", {"steerpipe": said_})
        with pytest.raises(InputError, match=words):
            load(tmp_path / "wrong")
