"""Marks the tests of a folder that starts sandboxes, and skips them where a sandbox cannot be started."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


def mark(items: list[pytest.Item], folder: Path, *marks: pytest.MarkDecorator) -> None:
    """Gives the items below `folder` the mark `sandbox` and these."""
    reason = "needs root" if os.geteuid() != 0 else "needs bubblewrap" if shutil.which("bwrap") is None else None
    skips = [pytest.mark.skip(reason=reason)] if reason else []
    for item in items:
        if folder in item.path.parents:
            for each in (pytest.mark.sandbox, *marks, *skips):
                item.add_marker(each)
