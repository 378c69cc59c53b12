"""A predictor of your own enters the arena: `package.module:Class`, or a Python file (`file.py`, `file.py:Class`).

A plugin is code of the person who names it, and runs with their rights, as any script of theirs does.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from steerpipe.core.errors import ConfigError, SteerpipeError
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.train.material import Material

FACES = ("name", "horizons", "probabilities", "cost")  # of a RoutingPredictor
_FACES_FIX = "see steerpipe.predict.protocol.RoutingPredictor for what it needs"
TRAIN = "trained"  # a class method that makes the predictor from training material, where there is something to learn


def load_plugin(spec: str, material: Material) -> RoutingPredictor:
    """The predictor behind `spec`: `Class.trained(material)` if the class has it, else `Class()`."""
    where, _, name = spec.rpartition(":") if _names_class(spec) else (spec, "", "")
    module = _from_file(Path(where)) if where.endswith(".py") else _imported(where, spec)
    chosen = _chosen(module, name, spec)
    with _reported(spec):
        made = getattr(chosen, TRAIN)(material) if hasattr(chosen, TRAIN) else chosen()
        missing = [face for face in FACES if not hasattr(made, face)]
        horizons = () if missing else tuple(made.horizons)
    if missing:
        raise ConfigError(f"{spec} has no {', '.join(missing)}", fix=_FACES_FIX)
    if not all(isinstance(each, int) and each >= 0 for each in horizons):
        raise ConfigError(f"{spec} has the horizons {horizons}: not layers ahead", fix=_FACES_FIX)
    predictor: RoutingPredictor = made
    return predictor


@contextmanager
def _reported(spec: str) -> Iterator[None]:
    """What the plugin's own code raises is an error of that plugin."""
    try:
        yield
    except SteerpipeError:
        raise
    except Exception as problem:
        raise ConfigError(
            f"plugin {spec} raised {type(problem).__name__}: {problem}", fix="mend it, or leave it out"
        ) from problem


def _names_class(spec: str) -> bool:
    return spec.rpartition(":")[2].isidentifier() and ":" in spec


def _imported(where: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ImportError as problem:
        raise ConfigError(
            f"plugin {spec} cannot be imported: {problem}", fix="give package.module:Class, or the path of a .py file"
        ) from None


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"plugin {file} does not exist", fix="give the path of a Python file")
    found = importlib.util.spec_from_file_location(file.stem, file)
    assert found is not None and found.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(found)
    sys.modules[file.stem] = module  # dataclasses look their module up
    with _reported(str(file)):
        found.loader.exec_module(module)
    return module


def _chosen(module: ModuleType, name: str, spec: str) -> Any:
    if name:
        chosen = getattr(module, name, None)
        if chosen is None:
            raise ConfigError(f"plugin {spec}: there is no {name} in it", fix="check the class's name")
        if not callable(chosen):
            raise ConfigError(f"plugin {spec}: {name} is no class: nothing can be made of it", fix="name a class")
        return chosen
    own = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if each.__module__ == module.__name__ and callable(getattr(each, "probabilities", None))
    ]
    if len(own) != 1:
        names = ", ".join(each.__name__ for each in own) or "none"
        raise ConfigError(f"plugin {spec} has {len(own)} predictors ({names})", fix=f"name one: {spec}:Class")
    return own[0]
