"""What is killed, and when: a plan that follows from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

PARTS = ("nats", "pipeline", "proxy", "actor", "learner")
LEARNER_PHASES = ("staging", "training", "writing", "written")
ANSWERED = "answered"  # the engine has just said something: the proxy is about to publish the record
MOMENTS = {
    "nats": (ANSWERED, *LEARNER_PHASES),
    "pipeline": (ANSWERED, *LEARNER_PHASES),
    "proxy": (ANSWERED,),
    "actor": (ANSWERED,),
    "learner": LEARNER_PHASES,
}
MORE_KILLS = 2  # than there are parts


@dataclass(frozen=True)
class Kill:
    """SIGKILL to all `victims` at the same time, `gap_s` after the kill before, at the next `moment` if it has one,
    and `late_s` after that."""

    victims: tuple[str, ...]
    gap_s: float
    moment: str
    late_s: float

    def __str__(self) -> str:
        return f"{' and '.join(self.victims)}, {self.gap_s:.2f} s on, at {self.moment or 'no moment'}"


def plan(seed: int) -> tuple[Kill, ...]:
    """Every part is killed at least once; every third kill, about, takes two parts at the same time."""
    dice = random.Random(f"kills-{seed}")
    victims = [*PARTS, *dice.choices(PARTS, k=MORE_KILLS)]
    dice.shuffle(victims)
    found = []
    while victims:
        pair = dice.random() < 0.3 and len(victims) > 1 and victims[-1] != victims[-2]
        found.append(_kill(dice, tuple(victims.pop() for _ in range(2 if pair else 1))))
    return tuple(found)


def _kill(dice: random.Random, victims: tuple[str, ...]) -> Kill:
    return Kill(
        victims=victims,
        gap_s=dice.uniform(0.2, 1.4),
        moment=dice.choice(("", *MOMENTS[victims[0]])),
        late_s=dice.uniform(0, 0.05),
    )
