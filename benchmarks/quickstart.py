"""Runs the main job for several seeds and prints where the time goes. `make bench`, or with --json FILE.

Every figure comes from the run's own summary, but for `wall_s`, which is the whole command with model building, cold
start and engine start. Compare shares and ratios, not seconds of different machines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """One run per seed, one row per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.toml")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(args.config, seed, args.updates) for seed in args.seeds]
    for row in rows:
        print(json.dumps(row))
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def measure(config: Path, seed: int, updates: int | None) -> dict[str, Any]:
    """Runs one seed and reduces its summary."""
    command = [str(Path(sysconfig.get_path("scripts"), "clawpipe")), "up", str(config)]
    command += ["--set", f"run.seed={seed}", "--set", f"model.tiny.seed={seed}"]
    command += ["--updates", str(updates)] if updates else []
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder, "summary.json")
        command += ["--summary", str(summary), "--run-dir", str(Path(folder, "run"))]
        began = time.monotonic()
        ended = subprocess.run(command, stdout=sys.stderr, check=False)
        wall_s = time.monotonic() - began
        if ended.returncode:
            raise SystemExit(f"seed {seed}: clawpipe up ended with {ended.returncode}")
        return reduce(seed, wall_s, json.loads(summary.read_text()))


def reduce(seed: int, wall_s: float, summary: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run that the table shows; shares are of the learner's loop."""
    time_ = summary["time"]
    spent = {name: time_[f"learner_{name}_s"] for name in ("wait", "fetch", "train", "push", "checkpoint")}
    loop_s = sum(spent.values())
    return {
        "seed": seed,
        "wall_s": wall_s,
        "loop_s": loop_s,
        "reward_first": summary["reward"]["first"],
        "reward_last": summary["reward"]["last"],
        "rollouts": summary["rollouts"]["settled"],
        "lost": summary["rollouts"]["lost"],
        "calls": summary["calls"],
        "calls_aborted": summary["calls_aborted"],
        "versions_pushed": summary["versions_pushed"],
        **{f"share_{name}": seconds / loop_s for name, seconds in spent.items()},
        "learner_busy_share": 1 - spent["wait"] / loop_s,
        "rollout_s_mean": time_["rollout_s"] / max(1, summary["rollouts"]["settled"]),
        "rollouts_at_once": time_["rollout_s"] / loop_s,
        "rollouts_per_s": summary["rollouts"]["settled"] / loop_s,
        "sampled_tokens_per_s": summary["tokens"]["sampled"] / loop_s,
        "staleness_mean": summary["staleness"]["mean"],
        "staleness_max": summary["staleness"]["max"],
        "push_pause_p50_s": summary["push_pause_s"]["p50"],
        "push_pause_p99_s": summary["push_pause_s"]["p99"],
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per figure, one column per seed."""
    width = max(len(name) for name in rows[0])
    for name in rows[0]:
        values = [row[name] for row in rows]
        shown = [f"{value:.3f}" if isinstance(value, float) else json.dumps(value) for value in values]
        print(f"{name:<{width}}  " + "  ".join(f"{cell:>14}" for cell in shown))


if __name__ == "__main__":
    main()
