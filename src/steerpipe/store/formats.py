"""How weights are written in a pack. The arithmetic of the quantised formats is in `quant`; the others are copies."""

from enum import StrEnum

from steerpipe.core.errors import ConfigError


class ExpertFormat(StrEnum):
    """What an expert's matrices are stored as."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"  # one scale per output row
    INT4 = "int4"  # one scale per group of inputs

    @property
    def quantised(self) -> bool:
        return self in (ExpertFormat.INT8, ExpertFormat.INT4)


class DenseFormat(StrEnum):
    """What everything but the experts is stored as."""

    NATIVE = "native"  # each tensor as it was
    INT8 = "int8"  # matrices with one scale per row; routers, norms, biases and switches as they were


_SHORT = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}


def parse_expert_format(text: str) -> ExpertFormat | None:
    """'bf16', 'int4', ...; 'native' gives None, which means: as the checkpoint has it."""
    if text == "native":
        return None
    try:
        return ExpertFormat(_SHORT.get(text, text))
    except ValueError:
        known = "native, fp32, bf16, fp16, int8, int4"
        raise ConfigError(f"{text!r} is not a format for experts", fix=f"choose one of {known}") from None


def parse_dense_format(text: str) -> DenseFormat:
    try:
        return DenseFormat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a format for dense weights", fix="choose native or int8") from None
