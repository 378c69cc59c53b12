"""What the stable prefix asks about a tokenizer. `boundaries.read_rule` finds the rule of one."""

from typing import Protocol

from steerpipe.intake.added_tokens import AddedTokens, Judgement


class BoundaryRule(Protocol):
    """Where a tokenizer must cut a text, whatever is typed after it."""

    @property
    def added(self) -> AddedTokens:
        """Tokens that are cut out of a text before anything else."""
        ...

    def cuts(self, before: str, after: str) -> bool:
        """Whether a text with these two characters side by side is always cut between them; added tokens aside."""
        ...

    def judge(self, left: str, right: str) -> Judgement:
        """What added tokens say of a place where `cuts` holds, from the text on both sides."""
        ...

    def part(self, text: str) -> str:
        """What the tokenizer has to be given for a part of a prompt that begins at such a place."""
        ...
