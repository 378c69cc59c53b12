"""Tokens as clients are shown them beside their log probabilities."""

from collections.abc import Sequence
from typing import Any

from steerpipe.core.events import TokenLogprob
from steerpipe.engine.tokenizer import TextCodec


class TokenTexts:
    """The text and bytes of single tokens. A token may be part of a character."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def chat_entry(self, chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> dict[str, Any]:
        """One element of `logprobs.content` of a chat."""
        return self._described(chosen) | {"top_logprobs": [self._described(each) for each in top]}

    def label(self, token_id: int) -> str:
        """As `/v1/completions` spells a token: its text, or `bytes:\\xe2\\x80` where it is no whole character."""
        raw = self._codec.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def likeliest(self, chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> dict[str, float]:
        """One element of `top_logprobs` of a completion: the chosen token is always in it.

        Of two tokens with the same text, the likelier one is shown.
        """
        shown: dict[str, float] = {}
        for each in (*top, chosen):
            shown.setdefault(self.label(each.token_id), each.logprob)
        return shown

    def offsets(self, token_ids: Sequence[int], start: int) -> list[int]:
        """Where each token begins in the text, in characters; the text before them has `start`."""
        stream, at, found = self._codec.stream(), start, []
        for token_id in token_ids:
            found.append(at)
            at += len(stream.push(token_id))
        return found

    def _described(self, token: TokenLogprob) -> dict[str, Any]:
        raw = self._codec.token_bytes(token.token_id)
        return {"token": raw.decode(errors="replace"), "logprob": token.logprob, "bytes": list(raw)}
