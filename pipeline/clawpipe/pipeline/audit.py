"""`clawpipe ledger RUN_DIR`: opens the books of a run, counts them, and proves that they balance.

The proof is in `proof`, the comparison of what was trained with what was dropped in `survivors`; here are the
files, the comparison with summary.json, and what the user sees.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import report
from clawpipe.pipeline.books import TRAINED, RolloutState, Row, Totals, bucket_tokens, dropped_tokens, end_of
from clawpipe.pipeline.errors import ConfigError
from clawpipe.pipeline.ledger_file import Stored, reading
from clawpipe.pipeline.proof import first_breach
from clawpipe.pipeline.survivors import EVERY_HARNESS, Measure, Survival, survivors

_HEADS = ("harness", "ended", "rollouts", "tokens", "calls", "seconds", "reward")


class Account(Struct, frozen=True, kw_only=True):
    """What there is of one harness, or of all, by where it is or why it is not there."""

    rollouts: dict[str, int]
    calls: dict[str, int]  # by role
    tokens: dict[str, int]


class Audit(Struct, frozen=True, kw_only=True):
    """What `clawpipe ledger` found. `wrong` None: the books balance."""

    run_dir: str
    goes_on: bool
    accounts: dict[str, Account]  # by harness; EVERY_HARNESS for all
    survivors: tuple[Survival, ...]
    wrong: str | None
    rollout: str | None  # the first one that breaks the law


def audit(run_dir: Path, *, goes_on: bool) -> Audit:
    """Reads the run's ledger, as of one moment, and proves it. `goes_on`: a launcher works in the folder.

    ClawpipeError when the folder holds no run, or no ledger of this version.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such folder; give the folder of a run")
    # While the run goes on there may be one of a service that was started anew since.
    summary = None if goes_on else _summary(run_dir / "summary.json")
    with reading(run_dir / "ledger.sqlite") as ledger:
        config = configuration.restore(run_dir / "config.json")
        stored = ledger.read()
        over = not goes_on and len(stored.updates) >= config.run.updates
        breach = first_breach(stored, ledger.calls(), max_reuse=config.replay.max_reuse, over=over)
    wrong = str(breach) if breach else _unlike_summary(stored, summary)
    return Audit(
        run_dir=str(run_dir),
        goes_on=goes_on,
        accounts=accounts(stored.rows),
        survivors=survivors(stored.rows),
        wrong=wrong,
        rollout=breach.rollout_id if breach else None,
    )


def accounts(rows: Iterable[Row]) -> dict[str, Account]:
    """All harnesses together first, then each by name."""
    found = {EVERY_HARNESS: Account(rollouts=Counter(), calls=Counter(), tokens=Counter())}
    for row in sorted(rows, key=lambda row: row.harness):
        own = found.setdefault(row.harness, Account(rollouts=Counter(), calls=Counter(), tokens=Counter()))
        for account in (found[EVERY_HARNESS], own):
            _count(account, row)
    return found


def lines(found: Audit) -> list[str]:
    """The audit as a person reads it."""
    total = found.accounts[EVERY_HARNESS]
    size = f"{sum(total.rollouts.values())} rollouts, {sum(total.calls.values())} calls"
    return [
        f"{found.run_dir}: {size}, {total.tokens.get('sampled', 0)} tokens sampled",
        *(line for part in ("rollouts", "calls", "tokens") for line in ("", *_table(part, found.accounts))),
        "",
        "trained against dropped: mean / median / p90, and the ratio of the mean to that of the trained",
        *columns([_HEADS, *(_survival(each) for each in found.survivors)], num_left=2),
        "",
        found.wrong or "the books balance" + (" so far: the run goes on" if found.goes_on else ""),
    ]


def columns(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Rows of equal length as lines; the first `num_left` columns start at the left, the others end at the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < num_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _count(account: Account, row: Row) -> None:
    if not row.is_stray:
        _add(account.rollouts, {_place(row): 1})
    _add(account.calls, row.roles)
    dropped = {f"dropped: {reason}": tokens for reason, tokens in dropped_tokens(row).items()}
    _add(account.tokens, {**bucket_tokens(row), **dropped})


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for key, number in more.items():
        if number:
            counts[key] = counts.get(key, 0) + number


def _place(row: Row) -> str:
    """Where the rollout is, or how it ended."""
    end = end_of(row)
    if not end:
        return row.state.value
    return TRAINED if end == TRAINED else f"{'dropped' if row.state is RolloutState.DROPPED else 'unused'}: {end}"


def _table(part: str, accounts: Mapping[str, Account]) -> list[str]:
    counts: list[dict[str, int]] = [getattr(account, part) for account in accounts.values()]
    names = [name or "all" for name in accounts]
    keys = sorted(counts[0], key=lambda key: (key.startswith(("dropped", "unused")), key))
    return columns([[part, *names], *([key, *(str(each.get(key, 0)) for each in counts)] for key in keys)])


def _survival(found: Survival) -> list[str]:
    cells = (_measure(found.measures[name]) for name in found.measures)
    return [found.harness or "all", found.end, str(found.rollouts), *cells]


def _measure(found: Measure) -> str:
    if found.mean is None or found.median is None or found.p90 is None:
        return "-"
    ratio = "" if found.ratio is None else f" (x{found.ratio:.2f})"
    return f"{found.mean:.4g} / {found.median:.4g} / {found.p90:.4g}{ratio}"


def _summary(path: Path) -> dict[str, Any] | None:
    """summary.json, if the run has ended. ConfigError when it cannot be read."""
    try:
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as err:
        raise ConfigError(f"{path}: not the summary of a run ({err}); move it away, and the ledger is all") from err
    return found


def _unlike_summary(stored: Stored, summary: Mapping[str, Any] | None) -> str | None:
    """The first count of the summary that is not the ledger's."""
    if summary is None:
        return None
    harnesses: dict[str, Totals] = {}
    for row in stored.rows:
        harnesses.setdefault(row.harness, Totals()).add(row)
    mine = report.counts(harnesses, stored.updates)
    booked, said = _flat(mine), _flat({key: summary.get(key, {}) for key in mine})
    for key in sorted(booked.keys() | said.keys()):
        a, b = booked.get(key, 0), said.get(key, 0)
        if a != b:
            return f"summary.json: {key} is {b}, by the ledger's rows it is {a}: off by {b - a:+}"
    return None


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return found


def as_json(found: Audit) -> str:
    """The audit for programs."""
    return json.dumps(msgspec.to_builtins(found), indent=2)
