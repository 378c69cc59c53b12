"""Triton's interpreter without work that it does in vain. What a kernel computes stays the same, to the bit.

A kernel's time in it is Python's, not numpy's: of one row through its experts two thirds went into these three.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def spare_vain_work() -> None:
    """For this process, once. Triton's language stays the interpreter's between kernels too."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "_get_np_dtype")):
        return  # not the Triton of the lock, whose inside we know: slower, and right
    # Each call of a device function, and every tl.sum is one, looks through all members of the language again.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    # Every sum of integers is computed again in int64 and compared, for an assertion that only `debug` makes.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    # Each look at a type builds a table of all types.
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)


def _by_name(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """functools.cache, of types that have no hash."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = look_up(kind)
        return known[kind.name]

    return find
