"""Common beginnings of two texts."""


def common_length(one: str, other: str) -> int:
    """How many of the first characters of both are the same."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return min(len(one), len(other))
