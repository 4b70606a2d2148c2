"""What classifiers read of a request. The agent can send what it likes, so any JSON value may stand anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def objects(found: Any) -> list[dict[str, Any]]:
    """The objects of a list; none where there is no list."""
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def tool_names(body: Mapping[str, Any]) -> set[str]:
    """What the tools are called, in any of the three protocols."""
    tools = objects(body.get("tools"))
    named = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in tools]
    return {str(each.get("name")) for each in named}
