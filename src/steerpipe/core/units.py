"""Bytes, as people write them. Binary units are KiB, MiB, GiB; decimal ones kB, MB, GB."""

import math
import re

from steerpipe.core.errors import ConfigError

_FACTORS = {
    "": 1, "b": 1,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """'512MiB', '4 GB' or '1024' → bytes. A bare K, M, G or T is binary, as in llama.cpp."""
    match = _PATTERN.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    count = math.inf if match is None or factor is None else float(match[1]) * factor
    if not math.isfinite(count):  # no amount, or one of more than 300 digits
        raise ConfigError(f"{text!r} is not an amount of bytes", fix="write a number and a unit, such as 512MiB or 4GB")
    return round(count)


def format_bytes(count: int) -> str:
    """Three significant digits (four from 1,000 on) with a binary unit: 1536 → '1.5 KiB'."""
    if abs(count) < 1024:
        return f"{count} B"
    amount, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if abs(amount) < 1023.5:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if abs(amount) >= 999.5 else f"{amount:.3g} {unit}"
