"""What msgspec says of a configuration that it refuses, as the writer of the TOML file can use it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import inspect

_KEY = "key` in `"  # msgspec's way to say that a table's key is refused, and not its value


def explain(message: str, config: type) -> str:
    """msgspec's message with the key's path as a TOML user writes it, and what would be accepted."""
    text, _, where = message.partition(" - at `")
    table = where.removeprefix(_KEY).rstrip("`").removeprefix("$").lstrip(".") or "the top level"
    unknown = re.search(r"unknown field `([^`]*)`", text)
    if unknown:
        return f"unknown key `{unknown[1]}` in {table}; remove it or correct its spelling"
    missing = re.search(r"missing required field `([^`]*)`", text)
    if missing:
        choice = _one_of(config, f"{table}.{missing[1]}")
        return f"key `{missing[1]}` is missing in {table}; add it" + (f": {choice}" if choice else "")
    if where.startswith(_KEY):
        table = f"a key of {table}"
    choice = _one_of(config, table) if text.startswith("Invalid") else ""
    text = text.replace("object`", "table`")
    return f"{table}: {text[:1].lower()}{text[1:]}" + (f"; write {choice}" if choice else "")


def _one_of(config: type, path: str) -> str:
    """The names among which the key at this path is a choice; empty when it is none."""
    names = sorted({str(name) for kind in _kinds_at(config, path) for name in _names(kind)})
    return f"one of {', '.join(names)}" if names else ""


def _kinds_at(config: type, path: str) -> list[inspect.Type]:
    """All types that the value at the path may have: its table may be one of several kinds."""
    kinds = [inspect.type_info(config)]
    for step in re.findall(r"[^.\[\]]+", path):
        kinds = [each for kind in _alternatives(kinds) for each in _below(kind, step)]
    return list(_alternatives(kinds))


def _alternatives(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for kind in kinds:
        yield from kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _below(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.VarTupleType) and step.isdigit():
        yield kind.item_type
    if isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
        if kind.tag_field == step:
            yield inspect.LiteralType(values=(kind.tag,))


def _names(kind: inspect.Type) -> tuple[Any, ...]:
    return kind.values if isinstance(kind, inspect.LiteralType) else ()
