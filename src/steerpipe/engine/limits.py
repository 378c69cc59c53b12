"""What could never run is refused before it is queued."""

from steerpipe.core.errors import RequestError
from steerpipe.engine.request import Request


def answer_limit(request: Request, vocab: int, max_context: int) -> int:
    """Most tokens the answer may have; checks the prompt on the way. Raises RequestError."""
    prompt = request.prompt_ids
    if not prompt:
        raise RequestError("the prompt is empty", fix="give at least one token of text")
    strange = next((i for i in prompt if not 0 <= i < vocab), None)
    if strange is not None:
        raise RequestError(f"token id {strange} is not in the vocabulary of {vocab}", fix="tokenise with this model")
    unknown = next((i for i in request.settings.stop_token_ids if i >= vocab), None)
    if unknown is not None:
        raise RequestError(f"stop token {unknown} is not in the vocabulary of {vocab}", fix="leave it out")
    room = max_context - len(prompt)
    if room < (not request.prompt_only):
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; the context holds {max_context}, answer included",
            fix="shorten the prompt, or raise max_context if the model allows it",
        )
    return 0 if request.prompt_only else min(request.settings.max_tokens or room, room)
