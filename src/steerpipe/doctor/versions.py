"""Which software is here, and whether it is new enough."""

import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata

from steerpipe import __version__
from steerpipe.doctor.report import Fact, Finding, Level, Section

LEAST = {"torch": "2.11", "transformers": "5.17"}  # as pyproject.toml says
SHOWN = ("torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "numpy")


def examine_versions(installed: Callable[[str], str] = metadata.version) -> Section:
    versions = {package: _version(package, installed) for package in SHOWN}
    facts = (
        Fact("steerpipe", __version__),
        Fact("python", platform.python_version()),
        Fact("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        *(Fact(package, version) for package, version in versions.items()),
    )
    findings = tuple(finding for package, version in versions.items() if (finding := _judge(package, version)))
    return Section("software", facts, findings or (Finding(Level.OK, "every package is new enough"),))


def _version(package: str, installed: Callable[[str], str]) -> str | None:
    try:
        return installed(package)
    except metadata.PackageNotFoundError:
        return None


def _judge(package: str, version: str | None) -> Finding | None:
    least = LEAST.get(package, "0")
    if version is not None and _numbers(version) >= _numbers(least):
        return None
    wanted = f"{package}>={least}" if package in LEAST else package
    what = f"{package} is missing" if version is None else f"{package} {version} is older than {least}"
    return Finding(Level.PROBLEM, what, fix=f"{sys.executable} -m pip install '{wanted}'")


def _numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' → (2, 13, 0): enough to compare releases."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
