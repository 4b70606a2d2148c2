"""What the user of `clawpipe up` sees: a live screen in a terminal, plain lines otherwise.

Both are drawn from files that the roles write: progress/<role>.json for long steps, status.json for the run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clawpipe.pipeline.books import TRAINED
from clawpipe.pipeline.observe import Step, steps

LIVE_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 10.0


@contextmanager
def make_screen(run_dir: Path, updates: int) -> Iterator[PlainScreen | LiveScreen]:
    """The screen that fits standard output."""
    console = Console(stderr=False)
    if not console.is_terminal:
        yield PlainScreen(run_dir)
        return
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        yield LiveScreen(run_dir, live)


class PlainScreen:
    """One line per change, for logs and pipes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._updates: int | None = None
        self._said: dict[str, str] = {}
        self._spoken_s: dict[str, float] = {}

    def say(self, line: str) -> None:
        """One line."""
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        sys.stdout.flush()

    async def watch(self) -> None:
        """Says what has changed: starts, ends and updates at once, the rest every PLAIN_INTERVAL_S."""
        while True:
            for step in steps(self._run_dir):
                key = f"{step.role}/{step.label}/{step.started_s}"
                self._say_changed(key, step_line(step), urgent=step.finished)
            status = read_status(self._run_dir)
            updated = self._updates != status.get("updates")
            self._updates = status.get("updates")
            self._say_changed("run", status_line(status), urgent=updated)
            await anyio.sleep(LIVE_INTERVAL_S)

    def _say_changed(self, key: str, line: str, *, urgent: bool) -> None:
        waited = time.monotonic() - self._spoken_s.get(key, -PLAIN_INTERVAL_S)
        if line and self._said.get(key) != line and (urgent or waited >= PLAIN_INTERVAL_S):
            self._said[key] = line
            self._spoken_s[key] = time.monotonic()
            self.say(line)


class LiveScreen:
    """A table that is drawn again twice a second."""

    def __init__(self, run_dir: Path, live: Live) -> None:
        self._run_dir = run_dir
        self._live = live

    def say(self, line: str) -> None:
        """A line above the table."""
        self._live.console.print(line, highlight=False)

    async def watch(self) -> None:
        """Draws until cancelled."""
        while True:
            self._live.update(self._draw())
            await anyio.sleep(LIVE_INTERVAL_S)

    def _draw(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for step in steps(self._run_dir):
            if not step.finished:
                table.add_row(*step_cells(step))
        return Group(table, Text(status_line(read_status(self._run_dir))))


def read_status(run_dir: Path) -> dict[str, Any]:
    """status.json, or nothing while there is none."""
    try:
        found: dict[str, Any] = json.loads((run_dir / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def status_lines(run_dir: Path) -> list[str]:
    """The plain form of `clawpipe status`."""
    status = read_status(run_dir)
    lines = [step_line(step) for step in steps(run_dir)]
    return [*lines, status_line(status) or "the run has not begun", *dead_letter_lines(status)]


def dead_letter_lines(status: dict[str, Any]) -> list[str]:
    """What was set aside because it could not be used: how much of it by reason, and the newest. Often nothing."""
    letters = status.get("dead_letters", {})
    counts = {flaw: count for flaw, count in sorted(letters.get("counts", {}).items()) if count}
    if not counts:
        return []
    kinds = ", ".join(f"{count} {_plain(flaw)}" for flaw, count in counts.items())
    return [
        f"dead letters: {sum(counts.values())} records were set aside: {kinds}",
        *(f"  {each['rollout']}, {each['message_id']}: {each['detail']}" for each in letters.get("newest", ())),
    ]


def step_cells(step: Step) -> tuple[str, str, str, str]:
    """Role, what it does, how far it is, time left."""
    share = f"{100 * step.done / step.total:.0f}%" if step.total else ""
    left = f"{duration(step.left_s)} left" if step.left_s is not None and not step.finished else ""
    return step.role, " ".join(filter(None, (step.label, step.detail))), share, left


def step_line(step: Step) -> str:
    """A step as one line."""
    done = f"done in {duration(step.updated_s - step.started_s)}" if step.finished else ""
    role, label, share, left = step_cells(step)
    return f"{role}: " + ", ".join(filter(None, (label, done or share, left)))


def status_line(status: dict[str, Any]) -> str:
    """The run as one line: updates, reward, rollouts, time left."""
    if not status:
        return ""
    rewards = status.get("reward", {}).get("per_update", [])
    parts = [
        f"{status.get('phase', 'running')}: update {status.get('updates', 0)} of {status.get('updates_total', '?')}",
        f"reward {rewards[-1]:.3f}" if rewards else "",
        f"staleness {status['staleness']['mean']:.1f}" if status.get("staleness") else "",
        _throttled(status.get("max_staleness", {})),
        f"{status['rollouts'].get('scored', 0)} rollouts scored" if status.get("rollouts") else "",
        f"{duration(status['left_s'])} left" if status.get("left_s") is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _throttled(bound: dict[str, int]) -> str:
    """The bound of staleness while it is lower than the configuration has it."""
    if bound.get("now") == bound.get("configured"):
        return ""
    return f"max_staleness lowered to {bound['now']} of {bound['configured']}"


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The end of a run in a few lines; all of it is in summary.json."""
    reward, tokens, rollouts = summary["reward"], summary["tokens"], summary["rollouts"]
    ends = ", ".join(f"{count} {_plain(name)}" for name, count in rollouts.items() if count)
    dropped = sum(tokens["dropped"].values())
    reasons = ", ".join(f"{count} {_plain(reason)}" for reason, count in tokens["dropped"].items() if count)
    pause = summary["push_pause_s"]
    first, last = reward["first"], reward["last"]
    rise = f"{first:.3f} -> {last:.3f}" if first is not None and last is not None else "not measured"
    return [
        f"updates {summary['updates']}, verified reward {rise} (mean of the first and last three updates)",
        f"rollouts: {ends or 'none'}",
        f"tokens: {tokens['sampled']} sampled, {tokens['trained']} trained, {dropped} dropped"
        + (f" ({reasons})" if reasons else ""),
        f"versions pushed {summary['versions_pushed']}"
        + (f", pause p50 {pause['p50']:.2f} s, p99 {pause['p99']:.2f} s" if pause["p50"] is not None else ""),
        *_survivor_lines(summary["survivors"]),
        *(_harness_line(name, found) for name, found in summary["harness"].items()),
    ]


def _survivor_lines(survivors: dict[str, Any]) -> list[str]:
    """Whether what was dropped is longer or better than what was trained; nothing when nothing was dropped."""
    trained = survivors.get(TRAINED)
    lost = {end: found for end, found in survivors.items() if end != TRAINED}
    if trained is None or not lost:
        return []
    return [f"trained rollouts: {_means(trained)}; {'; '.join(f'{_plain(e)}: {_means(f)}' for e, f in lost.items())}"]


def _means(found: dict[str, Any]) -> str:
    tokens, reward = _measured(found["sampled"], ".0f"), _measured(found["reward"], ".3f")
    return f"{found['rollouts']} of {tokens} tokens, reward {reward}"


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _harness_line(name: str, found: dict[str, Any]) -> str:
    reward, reuse, tokens = found["reward_mean"], found["prefix_reuse"], found["tokens"]
    roles = ", ".join(f"{count} {role}" for role, count in found["roles"].items())
    broken = sum(found["broken_grafts"].values())
    return (
        f"{name}: {found['rollouts']} rollouts, mean reward {_measured(reward, '.3f')}, "
        f"calls {roles or 'none'}, tokens {tokens['trained']} trained of {tokens['sampled']}, "
        f"prefix reuse {_measured(reuse, '.0%')}, {broken} calls with a broken graft"
    )


def _measured(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """75 -> "1m15s"."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{secs:02}s" if minutes else f"{secs}s"
