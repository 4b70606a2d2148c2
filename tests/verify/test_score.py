"""The mean rule, and what becomes of output that is no verdict."""

from __future__ import annotations

import msgspec
import pytest

from clawpipe.actors.verify.score import Graded, score


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ('{"a": 1.0, "b": 0.5}', 0.75),
        ('{"a": true, "b": false, "c": false, "d": true}', 0.5),
        ('{"reward": 0.0, "a": true, "b": true}', 2 / 3),
        ('{"a": 1, "note": "text", "more": null, "deep": {"b": 0}, "list": [0]}', 1.0),
        ('{\n  "a": 0.25\n}\n', 0.25),
        ('reading files\n{"a": 0.5}\n\n', 0.5),
        ('{"a": -0.0}', 0.0),
    ],
)
def test_the_reward_is_the_mean_of_all_numbers(output: str, reward: float) -> None:
    graded = score(output)
    assert graded.reward == pytest.approx(reward, abs=1e-12)
    assert graded.note == ""


def test_the_authors_own_reward_stays_visible() -> None:
    assert score('{"reward": 0.2, "a": true}').checks == {"reward": 0.2, "a": 1.0}


@pytest.mark.parametrize(
    ("output", "check"),
    [
        ("", "grader_printed_no_json"),
        ("1.0", "grader_printed_no_json"),
        ('[{"a": 1}]', "grader_printed_no_json"),
        ('{"a": 1', "grader_printed_no_json"),
        ("[" * 100_000, "grader_printed_no_json"),
        ("{}", "grader_printed_no_number"),
        ('{"a": "1.0"}', "grader_printed_no_number"),
        ('{"a": NaN, "b": 1}', "grader_value_refused"),
        ('{"a": Infinity}', "grader_value_refused"),
        ('{"a": 1e400}', "grader_value_refused"),
        ('{"a": -0.1}', "grader_value_refused"),
        ('{"a": 1.5, "b": 0.1}', "grader_value_refused"),
        ('{"a": 1' + "0" * 400 + "}", "grader_value_refused"),
        ('{"a": 1' + "0" * 5000 + "}", "grader_printed_no_json"),
    ],
)
def test_output_without_a_usable_verdict_is_a_named_zero(output: str, check: str) -> None:
    graded = score(output)
    assert graded.reward == 0.0
    assert graded.checks == {check: 0.0}
    assert graded.note


def test_half_a_surrogate_pair_in_a_name_can_be_sent() -> None:
    verdict = score('{"\\ud83d": 1, "ok": 0}')
    assert (verdict.reward, verdict.checks) == (0.5, {"?": 1.0, "ok": 0.0})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Graded) == verdict
