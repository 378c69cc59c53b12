"""From what a person calls a model to a folder: a path, or a name on the Hugging Face hub.

Only configs, tokenizers and safetensors are ever fetched, and only from the repository's top folder: what lies below
it, and Mistral's consolidated files, are other forms of the same weights. The config comes first, so that an
architecture nobody knows is refused before gigabytes arrive. Cache, token and endpoint are huggingface_hub's own
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

import errno
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from steerpipe.core.errors import CapacityError, HubError, SteerpipeError
from steerpipe.model.checkpoint import read_json, read_spec
from steerpipe.model.families import find_family

T = TypeVar("T")
WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "LICENSE*", "README.md")
UNWANTED = ("*/*", "consolidated*")
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+(@[\w.\-/]+)?")


def locate(model: str) -> Path:
    """The folder of `model`: itself if it is one, else fetched from the hub (`owner/name`, `owner/name@revision`)."""
    try:
        folder = Path(model).expanduser()
        if model and folder.is_dir():  # an empty name, of an unset variable say, is not the current folder
            return folder
        is_file = folder.is_file()
    except (OSError, RuntimeError):  # a name that no folder can have; a home folder of nobody
        is_file = False
    if is_file:
        raise HubError(f"{model} is a file", fix="give the folder that holds config.json and the weights")
    if not _NAME.fullmatch(model):
        raise HubError(
            f"{model or 'an empty name'} is neither a folder nor a hub name",
            fix="give a folder that exists, or a name such as owner/model",
        )
    name, _, revision = model.partition("@")
    return _fetch(name, revision or None)


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    config = Path(_asked(name, revision, lambda: hf_hub_download(name, "config.json", revision=revision)))
    raw = read_json(config)
    family = find_family(str(raw.get("model_type", "unnamed")), name)
    read_spec(family, raw, f"config.json of {name}")
    commit = config.parent.name  # of this config: a push in between must not mix two versions
    wanted, unwanted = list(WANTED), list(UNWANTED)
    fetch = partial(snapshot_download, name, revision=commit, allow_patterns=wanted, ignore_patterns=unwanted)
    return Path(_asked(name, commit, fetch))


def _asked(name: str, revision: str | None, call: Callable[[], T]) -> T:
    """Turns what can go wrong on the way to the hub into one sentence and a fix."""
    from huggingface_hub import errors

    try:
        return call()
    except SteerpipeError:
        raise
    except errors.HFValidationError as problem:
        raise HubError(
            f"there is no folder {name} here, and the hub has no such names: {_line(problem)}",
            fix="give a folder that exists, or owner/name as the model's page on the hub has it",
        ) from None
    except errors.GatedRepoError:
        raise HubError(
            f"{name} is gated", fix="accept its terms on the hub, then set HF_TOKEN to a token of that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"there is neither a folder {name} here nor a model {name} on the hub, or it is private",
            fix="check the spelling (owner/name, or the folder's path); for a private model set HF_TOKEN",
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{name} has no revision {revision}", fix="leave the @revision away, or name an existing one"
        ) from None
    except errors.LocalEntryNotFoundError as problem:
        cause = problem.__cause__ or problem
        offline = isinstance(cause, errors.OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub cannot be reached ({_line(cause)})"
        raise HubError(
            f"there is no folder {name} here, the download cache does not hold all of it, and {why}",
            fix="connect to the network, or give a folder that holds the checkpoint",
        ) from None
    except errors.EntryNotFoundError:
        raise HubError(
            f"{name} has no config.json", fix="give a model in transformers' form, with safetensors"
        ) from None
    except Exception as problem:  # noqa: BLE001  huggingface_hub and its HTTP client raise many kinds
        response = getattr(problem, "response", None)
        if response is not None and response.status_code in (401, 403):
            raise HubError(
                f"the hub refuses access to {name}: {_line(problem)}",
                fix="set HF_TOKEN to a token of an account that may read it; a wrong token is refused as well",
            ) from None
        if isinstance(problem, OSError) and problem.errno == errno.ENOSPC:
            raise CapacityError(
                f"no room for {name}: {problem}", fix="free disk space, or set HF_HOME elsewhere"
            ) from None
        raise HubError(
            f"{name} could not be fetched: {_line(problem)}",
            fix="check the network, then try again: what has arrived is kept",
        ) from None


def _line(problem: BaseException) -> str:
    """The first line of an error that may have many, or its kind where it says nothing."""
    return next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
