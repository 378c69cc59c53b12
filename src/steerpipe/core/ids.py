"""Identities that travel between the stages. An id is a type, never a bare int in a tuple."""

from typing import NamedTuple, NewType

SequenceId = NewType("SequenceId", int)


class ExpertId(NamedTuple):
    """One expert of one layer; orders by layer, then expert."""

    layer: int
    expert: int
