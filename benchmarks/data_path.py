"""What the data path does: records over JetStream to closed rollouts. `make bench-data-path`, or with --json FILE.

256 rollouts of 60 calls, which grow to 64K tokens, are published by 256 publishers through a nats-server and assembled
by the pipeline service. The server has a core, publishers and service share another one. Then assembling alone: how
its cost grows with the length of the conversations, and what a naive reference costs. Ends with 1 when a promise is
not kept.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from data_path_assembly import against_naive, costs_s
from data_path_load import Load
from data_path_setup import Where
from data_path_stream import CALL_BYTES, TOKEN_BYTES, Passage, memory, passage


@dataclass(frozen=True, slots=True)
class Promise:
    """What a figure must be."""

    sign: str
    limit: float

    def kept(self, figure: float) -> bool:
        """Whether it is."""
        compare: Callable[[float, float], bool] = operator.ge if self.sign == ">=" else operator.le
        return compare(figure, self.limit)


PROMISES = {
    "new_tokens_per_s": Promise(">=", 3_000_000),
    "calls_per_s": Promise(">=", 5_000),
    "wire_ratio": Promise("<=", 1.3),
    "memory_ratio": Promise("<=", 3.0),
    # The cost of a conversation that is so many times as long, over the cost of the short one; a quarter is for noise.
    "growth_4x": Promise("<=", 4 * 1.25),
    "growth_16x": Promise("<=", 16 * 1.25),
    "speedup_over_naive": Promise(">=", 1.0),
}


def main() -> None:
    """One run, one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=256, help="a multiple of 8, whole groups")
    parser.add_argument("--passes", type=int, default=3, help="of which the median counts")
    parser.add_argument("--naive-rollouts", type=int, default=16, help="that the naive reference merges as well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rollouts, one pass: under 20 s")
    parser.add_argument(
        "--realtime", action="store_true", help="let nothing else on this machine interfere; needs root"
    )
    parser.add_argument("--profile", type=Path, help="where cProfile writes what the service did in one more pass")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.rollouts, args.passes, args.naive_rollouts = args.rollouts // 4, 1, 2
    if args.rollouts < 1 or args.rollouts % Load().group_size or args.passes < 1:
        parser.error("--rollouts must be a multiple of 8 (of 32 with --quick), --passes at least 1")
    figures, details = measure(args)
    print_table(figures, details)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))
    sys.exit(0 if all(PROMISES[name].kept(figure) for name, figure in figures.items()) else 1)


def measure(args: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """(the promised figures, what stands behind them)."""
    load = Load(rollouts=args.rollouts, seed=args.seed)
    where = Where.here(args.realtime)
    alone, alone_details = _assembling(load, args)
    streamed, streamed_details = anyio.run(_streaming, load, args, where, backend_options={"use_uvloop": True})
    return streamed | alone, streamed_details | alone_details


async def _streaming(load: Load, args: argparse.Namespace, where: Where) -> tuple[dict[str, float], dict[str, float]]:
    """Uvloop for the publishers, as the proxy runs."""
    held = await memory(load, where)
    passes = [await passage(load, where) for _ in range(args.passes)]
    if args.profile:
        await passage(load, where, args.profile.absolute())
    wall_s = statistics.median(each.wall_s for each in passes)
    sizes = {"open": held.open_bytes, "closed": held.closed_bytes, "peak": held.peak_bytes}
    ratios = {f"memory_ratio_{when}": size / (TOKEN_BYTES * load.num_tokens) for when, size in sizes.items()}
    figures = {
        "new_tokens_per_s": load.num_tokens / wall_s,
        "calls_per_s": load.num_calls / wall_s,
        "wire_ratio": max(each.stored_bytes for each in passes) / _allowed_bytes(load),
        "memory_ratio": max(ratios.values()),
    }
    return figures, _spent(load, passes) | ratios


def _spent(load: Load, passes: list[Passage]) -> dict[str, float]:
    """Where the time of a call goes, in microseconds of processor time, and how much the passes differ."""
    per_call = 1e6 / load.num_calls
    return {
        "publisher_us_per_call": per_call * statistics.median(each.publisher_s for each in passes),
        "service_us_per_call": per_call * statistics.median(each.service_s for each in passes),
        "server_us_per_call": per_call * statistics.median(each.server_s for each in passes),
        "slowest_calls_per_s": load.num_calls / max(each.wall_s for each in passes),
        "fastest_calls_per_s": load.num_calls / min(each.wall_s for each in passes),
    }


def _allowed_bytes(load: Load) -> int:
    """What the wire ratio is over."""
    return TOKEN_BYTES * load.num_tokens + CALL_BYTES * load.num_calls


def _assembling(load: Load, args: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """All lengths with the same number of tokens in all."""
    once, four, sixteen = costs_s([load.longer(factor, max(1, load.rollouts // 4 // factor)) for factor in (1, 4, 16)])
    merged = replace(load, rollouts=args.naive_rollouts)
    naive = against_naive(merged)
    figures = {
        "growth_4x": four / once,
        "growth_16x": sixteen / once,
        "speedup_over_naive": naive.lists_s / naive.ours_s,
    }
    details = {
        "assembly_ns_per_token": 1e9 * once / load.tokens,
        "assembly_ns_per_token_4x": 1e9 * four / (4 * load.tokens),
        "assembly_ns_per_token_16x": 1e9 * sixteen / (16 * load.tokens),
        "speedup_over_naive_bytes": naive.bytes_s / naive.ours_s,
        "naive_wire_ratio": naive.whole_bytes / _allowed_bytes(merged),
    }
    return figures, details


def print_table(figures: dict[str, float], details: dict[str, float]) -> None:
    """One line per promise, then one per figure behind them."""
    width = max(len(name) for name in (*figures, *details))
    for name, figure in figures.items():
        promise = PROMISES[name]
        verdict = "kept" if promise.kept(figure) else "FAIL"
        print(f"{name:<{width}}  {promise.sign} {promise.limit:>12,.2f}  {figure:>14,.2f}  {verdict}")
    for name, figure in details.items():
        print(f"{name:<{width}}  {'':>15}  {figure:>14,.2f}")


if __name__ == "__main__":
    main()
