"""What every table of the configuration is made of: bounded numbers, names, and the base of all tables."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]+$")]
Port = Annotated[int, Meta(ge=0, le=65535)]
PortInside = Annotated[int, Meta(ge=1, le=65535)]  # of a sandbox, where the harness is told it before anything listens
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]  # of an environment
MCP_NAME = "^[A-Za-z][A-Za-z0-9_-]*$"  # of a server: part of its tools' names, and a key in harnesses' own files


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every table of the file: frozen, keyword only, unknown keys refused."""
