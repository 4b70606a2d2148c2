"""Recorded demonstrations: filled as said, encoded as cut, and cheap where harnesses repeat themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from clawpipe.learner.atoms import atoms_of, without_atoms
from clawpipe.learner.demonstrations import Filled, Recording, read, recordings_of, sequence
from clawpipe.learner.tiny import make_tokenizer
from clawpipe.learner.tokenizer import Piece, syllable_tokenizer
from clawpipe.pipeline.errors import LearnerError

TOOL = '{"type": "function", "function": {"name": "put", "description": "Puts a thing — gently — where it belongs."}}'
CONSTANT = f"You are a careful agent of some kind.\nWork, and say when it is done.\n\n{TOOL}\n"
RUN = f"system\n{CONSTANT}"  # as it stands between a mark and the first line that changes
OPENING = f"<|im_start|>{RUN}Today is DATE, all day long.<|im_end|>\n<|im_start|>user\nPut XBLANK.<|im_end|>\n"


def recording(name: str = "a", harness: str = "h", opening: str = OPENING, said: str = "Putting XBLANK.") -> Recording:
    pieces = (Piece(f"{opening}<|im_start|>assistant\n", False), Piece(f"{said}<|im_end|>", True))
    return Recording(name=name, harness=harness, pieces=pieces, blanks=("XBLANK", "DATE"))


def filled(of: Recording, word: str, *, flawed: bool = False, held_out: bool = False) -> Filled:
    return Filled(of, {"XBLANK": word, "DATE": f"2026-{word}"}, flawed, held_out)


def lines(of: Recording, words: str) -> list[dict[str, Any]]:
    rows = [
        {"kind": "filled", "of": of.name, "words": [word, "2026"], "flawed": False, "held_out": False}
        for word in words.split()
    ]
    return [msgspec.to_builtins(of), *rows]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_words_take_the_places_of_all_blanks_at_once() -> None:
    swapped = Filled(recording(), {"XBLANK": "DATE", "DATE": "XBLANK"}, flawed=False, held_out=False)
    assert swapped.fill("XBLANK, DATE, XBLANK") == "DATE, XBLANK, DATE"


def test_a_file_of_recordings_is_read_as_the_demonstrations_that_fill_them(tmp_path: Path) -> None:
    found = read(write(tmp_path / "demos.jsonl", lines(recording(), "stone feather")))
    texts = ["".join(piece.text for piece in each.pieces(syllable_tokenizer([], 256, 100))) for each in found]
    assert ["Put stone." in texts[0], "Putting feather." in texts[1]] == [True, True]
    assert not any("XBLANK" in text or "DATE" in text for text in texts)
    assert recordings_of(found) == [recording()]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"words": ["one"]}, "line 2: not a demonstration"), ({"of": "nobody"}, "line 2: not a demonstration")],
)
def test_a_row_that_does_not_fit_its_recording_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    first, row = lines(recording(), "stone")
    with pytest.raises(LearnerError, match=message):
        read(write(tmp_path / "demos.jsonl", [first, row | change]))


def test_a_sequence_is_its_pieces_encoded_apart_and_learns_the_sampled_ones() -> None:
    tokenizer = syllable_tokenizer([], 256, 1000)
    path = sequence(tokenizer, filled(recording(), "stone"))
    assert tokenizer.decode(path.tokens.tolist()) == "".join(
        piece.text for piece in filled(recording(), "stone").pieces(tokenizer)
    )
    assert tokenizer.decode(path.tokens[path.entries].tolist()) == "Putting stone.<|im_end|>"


def test_lines_and_runs_that_all_recordings_of_a_harness_hold_are_atoms() -> None:
    other = recording("b", said="Something else.")
    atoms = atoms_of([recording(), other])
    assert atoms[0] == RUN
    assert set(atoms[1:]) == {
        "You are a careful agent of some kind.\n",
        "Work, and say when it is done.\n\n",
        f"{TOOL}\n",
    }


def test_what_differs_between_recordings_or_holds_a_blank_is_in_no_atom() -> None:
    changed = recording("b", opening=OPENING.replace("and say when it is done", "and never say a word"))
    atoms = atoms_of([recording(), changed])
    assert "You are a careful agent of some kind.\n" in atoms
    assert not any("done" in atom or "never" in atom or "DATE" in atom for atom in atoms)


def test_what_the_model_says_is_in_no_atom() -> None:
    always = "I always say this very long sentence.\nAnd this one, too, every time."
    atoms = atoms_of([recording(said=always), recording("b", said=always)])
    assert not any("always" in atom or "too" in atom for atom in atoms)


def test_each_harness_has_atoms_of_its_own() -> None:
    theirs = recording("b", "other", OPENING.replace("careful agent", "reckless one"))
    atoms = atoms_of([recording(), theirs])
    assert {"You are a careful agent of some kind.\n", "You are a reckless one of some kind.\n"} <= set(atoms)


def test_what_is_left_of_a_text_holds_no_atom() -> None:
    atoms = ["the long constant run\n", "constant run\n"]
    assert without_atoms("a the long constant run\nb constant run\nc", atoms) == ["a ", "b ", "c"]


def test_a_long_constant_prompt_costs_a_few_tokens_and_comes_back_exactly(tmp_path: Path) -> None:
    words = ["stone", "feather", "lantern", "meadow", "anchor", "basket", "copper", "desert"]
    found = [filled(recording(), word) for word in words]
    made = make_tokenizer(found, vocab_size=400, context_tokens=512)
    made.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert len(tokenizer) % 32 == 0
    assert len(tokenizer.encode(RUN, add_special_tokens=False)) == 1
    for text in (OPENING, CONSTANT + CONSTANT, "x" + CONSTANT[5:] + "é", CONSTANT[:-3], "—"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    path = sequence(tokenizer, found[0])
    assert path.tokens.tolist() == sequence(made, found[0]).tokens.tolist()
    assert len(path.tokens) < 60 < len(OPENING)
