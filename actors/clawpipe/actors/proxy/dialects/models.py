"""GET /v1/models: the policy is the only model, listed in the form of whichever provider the client expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

PATH = "/v1/models"


class Models:
    """The answers to GET /v1/models and GET /v1/models/{id}."""

    def __init__(self, name: str) -> None:
        self._name = name
        openai = {"id": name, "object": "model", "created": 0, "owned_by": "clawpipe"}
        anthropic = {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }
        pages = {"first_id": name, "last_id": name, "has_more": False}
        self._openai = _bodies(openai, {"object": "list", "data": [openai]})
        self._anthropic = _bodies(anthropic, {"data": [anthropic], **pages})

    def get(self, path: str, headers: Mapping[str, str]) -> bytes | None:
        """The body, or None where there is no such path."""
        model, listed = self._anthropic if is_anthropic(headers) else self._openai
        return {PATH: listed, f"{PATH}/{self._name}": model}.get(path)


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether a client speaks Anthropic's protocol, on paths that two providers share."""
    return "anthropic-version" in headers


def _bodies(model: dict[str, Any], listed: dict[str, Any]) -> tuple[bytes, bytes]:
    return msgspec.json.encode(model), msgspec.json.encode(listed)
