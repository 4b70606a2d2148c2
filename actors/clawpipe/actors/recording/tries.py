"""Whether a recording is fit to learn from, and another try for a take that is not.

A take may fail for a reason of the moment, a busy machine above all, and one such moment must not cost the whole
recording. A wrong script fails every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from msgspec import structs

from clawpipe.actors.proxy.render import Renderer
from clawpipe.actors.recording.studio import Recording
from clawpipe.actors.recording.takes import Take
from clawpipe.pipeline.observe import EventLog
from clawpipe.pipeline.records import Infra, Role, Scored, TimedOut, VerifierInfra

MAX_TRIES = 3

Studio = Callable[[Sequence[Take]], Awaitable[tuple[Renderer, list[Recording]]]]


async def record_fit(studio: Studio, takes: Sequence[Take], log: EventLog) -> tuple[Renderer, list[Recording]]:
    """The last try of each take, in the order of `takes`, fit or not.

    What failed is tried again by itself, `MAX_TRIES` times in all; not so when everything failed, which is no hiccup.
    """
    last: dict[str, Recording] = {}
    left = takes
    for tries in range(1, MAX_TRIES + 1):
        renderer, recordings = await studio(left)
        last |= {each.take.name: structs.replace(each, tries=tries) for each in recordings}
        problems = {each.take.name: problem for each in recordings if (problem := problem_of(each)) is not None}
        for name, problem in problems.items():
            log.warning("take failed", take=name, tries=tries, problem=problem)
        left = [take for take in left if take.name in problems]
        if len(left) in (0, len(takes)):
            break
    return renderer, [last[take.name] for take in takes]


def problem_of(recording: Recording) -> str | None:
    """Why it is not fit to learn from, in words; None when it is."""
    rollout, flaw = recording.rollout, recording.take.shape.flaw
    outcome = recording.outcome
    if not isinstance(outcome, Scored):
        message = "" if isinstance(outcome, TimedOut) else f" ({outcome.message})"
        return f"{recording.take.name}: {type(outcome).__name__}{message}"
    if (outcome.reward == 1.0) is (flaw is not None):
        return f"{recording.take.name}: reward {outcome.reward} ({outcome.checks}), with the flaw {flaw}"
    broken = [call.graft_broken for call in recording.calls if call.graft_broken]
    if broken:
        return f"{recording.take.name}: an earlier turn could not be grafted ({broken[0]})"
    if len(rollout.branches) != 1 or any(fate.dropped for fate in rollout.fates if fate.role is Role.MAIN):
        return (
            f"{recording.take.name}: its main conversation is not one sequence, it has {len(rollout.branches)} branches"
        )
    return None


def summary(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Per harness: what `clawpipe demos` shows."""
    return [
        _summary(name, [each for each in recordings if each.take.harness.name == name])
        for name in dict.fromkeys(each.take.harness.name for each in recordings)
    ]


def _summary(name: str, recordings: Sequence[Recording]) -> dict[str, Any]:
    return {
        "harness": name,
        "rollouts": len(recordings),
        "tried_again": sum(each.tries > 1 for each in recordings),
        "calls": dict(Counter(call.role.value for each in recordings for call in each.calls)),
        "mean_reward": _mean_reward(each for each in recordings if each.take.shape.flaw is None),
        "mean_reward_flawed": _mean_reward(each for each in recordings if each.take.shape.flaw is not None),
        "failed": sum(problem_of(each) is not None for each in recordings),
    }


def _mean_reward(recordings: Iterable[Recording]) -> float | None:
    graded = [each.rollout for each in recordings if not isinstance(each.outcome, Infra | VerifierInfra)]
    return sum(rollout.reward for rollout in graded) / len(graded) if graded else None
