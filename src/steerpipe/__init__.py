"""steerpipe runs Mixture-of-Experts language models that are larger than the fast memory they run on.

    from steerpipe import Pipeline

Importing the package is cheap: it guards the CPU (see `core.cpu`) and leaves torch alone until `Pipeline` is asked for.
"""

from typing import TYPE_CHECKING, Any

from steerpipe.core.cpu import apply_guard

if TYPE_CHECKING:
    from steerpipe.engine.tokenizer import ChatMessage
    from steerpipe.runtime.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["CPU_GUARD", "ChatMessage", "Pipeline", "__version__"]

CPU_GUARD = apply_guard()  # before torch's first product, hence before anything that imports torch


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from steerpipe.runtime.pipeline import Pipeline

        return Pipeline
    if name == "ChatMessage":
        from steerpipe.engine.tokenizer import ChatMessage

        return ChatMessage
    raise AttributeError(f"module 'steerpipe' has no attribute {name!r}")
