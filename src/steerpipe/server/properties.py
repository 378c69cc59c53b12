"""What the server says about itself and its model."""

from dataclasses import asdict
from typing import Any

from steerpipe import __version__
from steerpipe.server.service import Service


def model_json(service: Service) -> dict[str, Any]:
    """One entry of `/v1/models`. Raises ApiError while the model is not there."""
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "steerpipe",
        "max_model_len": service.asker.facts.max_context,
    }


def properties_json(service: Service) -> dict[str, Any]:
    """The body of `/props`: no paths, and nothing of anybody's requests."""
    asker, settings = service.asker, service.settings
    facts = asker.facts
    return {
        "model": service.name,
        "version": __version__,
        "max_context": facts.max_context,
        "max_batch": facts.max_batch,
        "vocab": facts.vocab,
        "has_chat_template": asker.codec.has_chat_template,
        "default_generation_settings": asdict(facts.defaults),
        "end_token_ids": sorted(facts.end_tokens),
        "settings": dict(facts.settings),
        "memory": [asdict(row) for row in facts.memory],
        "experts_resident": facts.experts_resident,
        "limits": {
            "max_queue": settings.max_queue,
            "max_body_bytes": settings.max_body_bytes,
            "timeout_seconds": settings.timeout_seconds,
        },
        "drafts": settings.drafts,
        "engine_restarts": service.link.restarts,
    }
