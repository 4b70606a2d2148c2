"""What changes from run to run is a blank, like the errand's words."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from clawpipe.actors.recording.rolls import Roll
from clawpipe.actors.recording.takes import Shape, blank_errand
from clawpipe.actors.tasks.filing import Errand, write_errand

DAY = datetime(2026, 11, 29, 18, 11, tzinfo=UTC)  # a Sunday
SESSION = "37f8ca4e-0981-4450-807d-d34f9fee85e8"


def make_roll(text: str, errand: Errand) -> Roll:
    pieces = (("Go.", False), ("I go.", True), (text, False), ("Done.", True))
    return Roll(name="r", harness="h", errand=errand, pieces=pieces, recorded=DAY)


def fill(text: str, errand: Errand, *, seed: int = 0, blanks: Errand | None = None) -> str:
    """The text with the words of `errand` in its blanks."""
    roll = make_roll(text, blanks or blank_errand(Shape(0), random.Random(1)))
    line: dict[str, Any] = roll.line()
    words = dict(zip(line["blanks"], roll.fill(errand, random.Random(seed)), strict=True))
    pattern = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    return re.sub(pattern, lambda match: words[match[0]], text)


ERRAND = write_errand("docs/plan.txt", "lantern")


def test_a_session_id_is_another_in_every_demonstration_and_the_same_within_one() -> None:
    text = f"session={SESSION} | again {SESSION}"
    first, second = (fill(text, ERRAND, seed=seed) for seed in (1, 2))
    assert first != second
    assert SESSION not in first + second
    found = re.fullmatch(r"session=(\S{36}) \| again (\S{36})", first)
    assert found is not None
    assert found[1] == found[2]


def test_the_moment_of_the_recording_is_moved_as_one_and_other_dates_stay() -> None:
    text = "[Sun 2026-11-29 18:11 UTC] today 2026-11-29; born 2019-03-01; at 2026-11-29T18:11"
    found = re.fullmatch(
        r"\[(\w{3}) (\S{10}) (\d\d:\d\d) UTC\] today (\S{10}); born 2019-03-01; at (\S{10})T(\d\d:\d\d)",
        fill(text, ERRAND, seed=3),
    )
    assert found is not None
    day, date, time, today, again, later = found.groups()
    assert date == today == again != "2026-11-29"
    assert time == later
    assert datetime.fromisoformat(date).strftime("%a") == day


def test_a_recording_over_midnight_has_two_days_that_are_both_moved() -> None:
    tomorrow = (DAY + timedelta(days=1)).strftime("%Y-%m-%d")
    filled = fill(f"2026-11-29 then {tomorrow}", ERRAND, seed=4)
    assert "2026-11-29" not in filled
    assert tomorrow not in filled


def test_the_size_that_a_harness_reports_is_that_of_what_is_written() -> None:
    blanks = blank_errand(Shape(0), random.Random(1))
    text = f"wrote {len(blanks.content)} bytes to {blanks.path}"
    assert fill(text, ERRAND, blanks=blanks) == "wrote 7 bytes to docs/plan.txt"


def test_a_number_that_stands_in_the_prompt_already_is_the_harnesss_own() -> None:
    blanks = blank_errand(Shape(0), random.Random(1))
    prompt = f"Results have at most {len(blanks.content)} bytes."
    roll = Roll(name="r", harness="h", errand=blanks, pieces=((prompt, False), ("Done.", True)), recorded=DAY)
    assert not any("bytes" in blank for blank in roll.line()["blanks"])


def test_a_word_that_is_shown_cut_short_is_found() -> None:
    blanks = blank_errand(Shape(0), random.Random(1))
    assert make_roll(f"wrote {blanks.path}", blanks).trace() is None
    assert make_roll(f"wrote {blanks.path[:8]}...", blanks).trace() == blanks.path[:6]
