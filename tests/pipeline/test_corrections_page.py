"""docs/corrections.md names every kind of correction with its keys and their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from clawpipe.pipeline.config import AutoThrottle, CorrectionConfig, TruncatedConfig

PAGE = (Path(__file__).parents[2] / "docs" / "corrections.md").read_text()


def test_every_kind_is_there_with_its_keys_and_defaults():
    found = {}
    for line in PAGE.split("| --- |", 1)[1].splitlines():
        if match := re.match(r"\| `(\w+)`", line):
            keys = re.findall(r"`(\w+)` \(([^)]+)\)", line.split("|")[3])
            found[match[1]] = {key: float(default) for key, default in keys}
    assert found == {
        kind.__struct_config__.tag: {
            key: getattr(kind(), key) for key in kind.__struct_fields__ if key != "auto_throttle"
        }
        for kind in get_args(CorrectionConfig)
    }
    assert re.search(r"`(\w+)`, the default", PAGE)[1] == TruncatedConfig.__struct_config__.tag


def test_the_throttle_is_shown_with_its_defaults():
    shown = dict(re.findall(r"^(\w+) = ([\d.]+)$", PAGE, re.MULTILINE))
    assert AutoThrottle(ess_below=float(shown["ess_below"]), for_updates=int(shown["for_updates"])) == AutoThrottle()
