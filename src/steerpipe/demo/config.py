"""The settings of the demo's engines: its own, whatever the environment says, but for the device."""

from typing import Any, Final

from steerpipe.core.config import EngineConfig, load_config

THREADS: Final = 1


def demo_config(**settings: Any) -> EngineConfig:
    """STEERPIPE_PACE would be another contest. A wrong name or value is an error all the same."""
    return EngineConfig(device=load_config().device, dtype="float32", threads=THREADS, **settings)
