"""Recorded demonstrations are cached: what they were recorded from is part of their name."""

from __future__ import annotations

from clawpipe.actors.harness.install import PINS
from clawpipe.pipeline.models import RECORDING


def test_other_pinned_versions_are_another_recording() -> None:
    """When this fails, count RECORDING up and write the new versions down here."""
    assert (RECORDING, {kind: pin.version for kind, pin in PINS.items()}) == (
        1,
        {
            "openclaw": "2026.9.6",
            "claude_code": "2.1.328",
            "codex": "0.169.0",
            "opencode": "1.18.33",
            "qwen_code": "0.24.4",
        },
    )
