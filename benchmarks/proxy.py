"""What a call costs through the proxy, over the same call to the engine. `make bench-proxy`, or with --json FILE.

16 conversations with prompts of 8k tokens go on at the same time, on one embedded vLLM with a tiny model. Every call
of each is made twice, in an order that chance decides: through the proxy, and to the engine with the very tokens that
the proxy sends; every few also to vLLM's own endpoint of the same protocol, with the same text and tools. What is
compared are the differences, call by call. Ends with 1 when a promise is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import psutil
from proxy_setup import Rollout, World, open_rollout, world
from proxy_traffic import DIALECTS, Books, Conversation, Load, Sample

MAX_ADDED_MS = 5.0
MAX_IDLE_KB = 200.0
IDLE_S = 5.0
WARM_ROLLOUTS, MEASURED_ROLLOUTS = 32, 64  # that make a call before their memory is looked at


def main() -> None:
    """One run, one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--new-tokens", type=int, default=150)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dialects", nargs="+", default=list(DIALECTS), choices=list(DIALECTS))
    parser.add_argument("--whole", action="store_true", help="answers in one piece instead of streams")
    parser.add_argument("--pause-s", type=float, default=1.0, help="mean pause before every timed call")
    parser.add_argument("--text-every", type=int, default=4, help="turns between two calls of vLLM's own endpoint")
    parser.add_argument("--idle", type=int, default=500, help="idle rollouts, for their memory")
    parser.add_argument(
        "--realtime", action="store_true", help="let nothing else on this machine interfere; needs root"
    )
    parser.add_argument("--profile", type=Path, help="where cProfile writes what the proxy did")
    parser.add_argument("--keep", type=Path, help="a new folder for logs and model, which stays")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = anyio.run(measure, args)
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))
    sys.exit(0 if all(row.get("pass", True) for row in rows) else 1)


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per dialect and answer length, and one for the memory."""
    profile = str(args.profile.absolute()) if args.profile else ""
    with _folder(args.keep) as folder:
        async with world(folder, profile) as made:
            if args.realtime:
                _take_precedence()
            rows = [await idle_memory(made, args)] if args.idle else []
            for name in args.dialects:
                for max_tokens in args.max_tokens:
                    load = Load(
                        dialect=DIALECTS[name],
                        max_tokens=max_tokens,
                        stream=not args.whole,
                        turns=args.turns,
                        new_tokens=args.new_tokens,
                        pause_s=args.pause_s,
                        text_every=args.text_every,
                    )
                    row = await one_pass(made, load, f"{name}-{max_tokens}", args)
                    print(json.dumps(row), flush=True)
                    rows.append(row)
        return rows


async def one_pass(made: World, load: Load, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All conversations at the same time."""
    books = Books(_tokenizer(made))
    talks = [books.opening(f"{name}-{number}", args.prompt_tokens) for number in range(args.conversations)]
    held = [
        Conversation(made, await open_rollout(made, f"{name}-{number}"), load, talk, books)
        for number, talk in enumerate(talks)
    ]
    await _all(held, "open")
    idle = await _idle_cpu_share(made)
    began_s, before_s, encoded = time.monotonic(), _cpu_s(made.proxy), made.encoded_tokens()
    await _all(held, "go_on")
    calls = sum(len(each.samples) for each in held)
    cpu_s = _cpu_s(made.proxy) - before_s - idle * (time.monotonic() - began_s)
    encoded = made.encoded_tokens() - encoded
    row = {
        "pass_name": name,
        "calls": calls,
        "proxy_cpu_ms": 1000 * cpu_s / calls,
        "broken": sum(each.broken for each in held),
    }
    row |= reduce([sample for each in held for sample in each.samples], encoded)
    for each in held:
        await each.close()
    return row


def reduce(samples: list[Sample], encoded: int) -> dict[str, Any]:
    """Medians and 90th percentiles in milliseconds, of the calls and of their differences."""
    row: dict[str, Any] = {"prompt_tokens": statistics.median(sample.prompt_tokens for sample in samples)}
    for way in ("tokens", "proxy", "vllm"):
        row[f"{way}_ms"] = 1000 * statistics.median(each.took_s[way] for each in samples if way in each.took_s)
    for way in ("proxy", "vllm"):
        pairs = [each.took_s for each in samples if way in each.took_s]
        added = sorted(1000 * (took[way] - took["tokens"]) for took in pairs)
        row |= {f"{way}_pairs": len(added), f"{way}_added_ms": statistics.median(added)}
        row[f"{way}_added_p90_ms"] = added[int(0.9 * (len(added) - 1))]
    new = sum(sample.new_tokens for sample in samples)
    row |= {"new_tokens": new / len(samples), "encoded_tokens": encoded / len(samples)}
    row["pass"] = (
        row["proxy_added_ms"] <= MAX_ADDED_MS
        and row["proxy_added_ms"] < row["vllm_added_ms"]
        and row["encoded_tokens"] <= row["new_tokens"]
    )
    return row


async def idle_memory(made: World, args: argparse.Namespace) -> dict[str, Any]:
    """What a rollout costs the proxy that has not called yet, and one whose harness works after its first call."""
    await _open_idle(made, "warm", 20)
    before = _rss_kb(made.proxy)
    opened = await _open_idle(made, "idle", args.idle)
    idle_kb = (_rss_kb(made.proxy) - before) / args.idle
    books = Books(_tokenizer(made))
    load = Load(DIALECTS["chat"], 1, True, 0, 0, 0.0, 1)
    held = [
        Conversation(made, rollout, load, books.opening(f"idle-{number}", args.prompt_tokens), books)
        for number, rollout in enumerate(opened[: WARM_ROLLOUTS + MEASURED_ROLLOUTS])
    ]
    await _in_groups(held[:WARM_ROLLOUTS], args.conversations)
    before = _rss_kb(made.proxy)
    await _in_groups(held[WARM_ROLLOUTS:], args.conversations)
    waiting_kb = (_rss_kb(made.proxy) - before) / len(held[WARM_ROLLOUTS:])
    for rollout in opened:
        await rollout.close()
    row = {"pass_name": "idle", "rollouts": args.idle, "idle_kb": idle_kb, "after_a_call_kb": waiting_kb}
    return row | {"pass": max(idle_kb, waiting_kb) <= MAX_IDLE_KB}


async def _in_groups(held: list[Conversation], size: int) -> None:
    """Their first calls, some at the same time: more at once than in a run would leave holes in the proxy's memory."""
    for start in range(0, len(held), size):
        await _all(held[start : start + size], "open")


async def _open_idle(made: World, name: str, number: int) -> list[Rollout]:
    return [await open_rollout(made, f"{name}-{index}") for index in range(number)]


async def _all(held: list[Conversation], what: str) -> None:
    async with anyio.create_task_group() as group:
        for each in held:
            group.start_soon(getattr(each, what))


def _folder(kept: Path | None) -> AbstractContextManager[Path]:
    """Where logs and model are; a new folder that goes away, unless one was given."""
    if kept is not None:
        kept.mkdir(parents=True)
        return nullcontext(kept)
    return _temporary()


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _tokenizer(made: World) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(Path(made.socket).parent / "model" / "tokenizer.json"))


async def _idle_cpu_share(made: World) -> float:
    """CPU seconds per second that the proxy spends on rollouts that do nothing."""
    before = _cpu_s(made.proxy)
    await anyio.sleep(IDLE_S)
    return (_cpu_s(made.proxy) - before) / IDLE_S


def _take_precedence() -> None:
    """Real-time scheduling for every thread of ours and of what we started."""
    us = psutil.Process()
    for process in (us, *us.children(recursive=True)):
        for thread in process.threads():
            os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _rss_kb(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 1024)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per figure of each row."""
    for row in rows:
        print(f"\n{row['pass_name']}: {'pass' if row['pass'] else 'FAIL'}")
        for name, value in row.items():
            if name not in ("pass_name", "pass"):
                print(f"  {name:<22} {value:>12.2f}")


if __name__ == "__main__":
    main()
