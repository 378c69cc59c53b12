"""The architectures that the decoder knows. One file each: names on disk, required and understood keys, quirks."""

from steerpipe.core.errors import UnknownFamilyError
from steerpipe.model.families import mixtral, olmoe, qwen2_moe, qwen3_moe
from steerpipe.model.families.base import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (qwen2_moe.FAMILY, qwen3_moe.FAMILY, mixtral.FAMILY, olmoe.FAMILY)
}  # fmt: skip


def find_family(model_type: str, where: str) -> Family:
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnknownFamilyError(
            f"{where} is a {model_type!r} model; known are {', '.join(sorted(FAMILIES))}",
            fix="docs/add-a-model.md shows how to declare a new family; for a one-off run use transformers itself",
        )
    return family
