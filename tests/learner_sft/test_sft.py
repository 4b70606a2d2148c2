"""The role `coldstart`: it learns, it stops at the gate, and what it writes is what it trained."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from clawpipe.learner import hf, parallel, sft
from clawpipe.learner.demonstrations import read
from clawpipe.learner.model import build_model
from clawpipe.learner.sft import Outcome, Trainer, read_lessons
from clawpipe.learner.tokenizer import encode_turns
from clawpipe.pipeline.config import Config, ParallelConfig
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.observe import Progress

GATE = 0.2  # the recipe's in `world`


def train(world: Any, config: Config, save_to: Path | None = None) -> Outcome:
    source = Path(world.runtime.init_model_dir)
    lessons = read_lessons(Path(world.runtime.demos_path), source)
    with parallel.session(ParallelConfig()):
        model = build_model(source, ParallelConfig(), torch.float32, 0)
        hf.load(model, source)
        trainer = Trainer(model, config.model.coldstart, lessons, random.Random(1))
        outcome = trainer.run(Progress(world.runtime.path(), "coldstart", "cold start"))
        if save_to is not None:
            hf.save_hf_folder(model, source, save_to)
    return outcome


def probability(world: Any, folder: str, *, flawed: bool, held_out: bool) -> float:
    """Mean probability of a kind of demonstration, by transformers, one conversation at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for each in read(Path(world.runtime.demos_path)):
        if (each.flawed, each.held_out) != (flawed, held_out):
            continue
        ids, sampled = (torch.tensor(part) for part in encode_turns(tokenizer, each.messages, each.tools))
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        said = logprobs.gather(1, ids[1:, None])[:, 0][sampled[1:]]
        found.append(said.sum().exp().item())
    return sum(found) / len(found)


def test_the_model_learns_and_its_folder_gives_transformers_the_probability_of_the_gate(built: Any) -> None:
    source, target = (Path(built.runtime.init_model_dir), Path(built.runtime.start_model_dir))
    before = probability(built, str(source), flawed=False, held_out=True)
    outcome = train(built, built.with_recipe(flawed_steps=0), save_to=target)
    after = probability(built, str(target), flawed=False, held_out=True)
    assert before < 1e-6
    assert outcome.gate_probability >= GATE
    assert after == pytest.approx(outcome.gate_probability, rel=1e-4)
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_the_gate_opens_at_the_first_check_that_reaches_it(built: Any) -> None:
    early = train(built, built.with_recipe(gate_probability=1e-9, flawed_steps=0))
    late = train(built, built.with_recipe(flawed_steps=0))
    assert early.clean_steps < late.clean_steps
    assert {early.clean_steps % 5, late.clean_steps % 5} == {0}
    assert 1e-9 <= early.gate_probability < GATE <= late.gate_probability


def test_a_gate_that_stays_closed_is_an_error_that_says_what_to_change(built: Any) -> None:
    config = built.with_recipe(max_steps=4, check_every_steps=2, gate_probability=0.9)
    with pytest.raises(LearnerError, match=r"max_steps = 4 .* below gate_probability = 0.9; raise max_steps"):
        sft.main(config, built.runtime)
    assert not Path(built.runtime.start_model_dir).exists()


def test_the_second_stage_teaches_the_flaw(built: Any) -> None:
    sft.main(built.with_recipe(flawed_steps=40, flawed_fraction=1.0), built.runtime)
    learned = probability(built, built.runtime.start_model_dir, flawed=True, held_out=False)
    assert learned > 0.3
    assert learned > probability(built, built.runtime.start_model_dir, flawed=False, held_out=True)
    progress = json.loads(built.runtime.path("progress", "coldstart.json").read_text())
    assert progress["finished"]
    assert progress["done"] == progress["total"]


def test_the_same_seed_trains_the_same_weights(built: Any, tmp_path: Path) -> None:
    recipe = built.with_recipe(gate_probability=0.0, check_every_steps=1, flawed_steps=3)
    sft.main(recipe, built.runtime)
    first = (tmp_path / "start" / "model.safetensors").read_bytes()
    (tmp_path / "start").rename(tmp_path / "first")
    sft.main(recipe, built.runtime)
    assert (tmp_path / "start" / "model.safetensors").read_bytes() == first


def test_a_file_without_flawed_demonstrations_is_refused(built: Any) -> None:
    path = Path(built.runtime.demos_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"flawed": false' in line))
    with pytest.raises(LearnerError, match="no flawed demonstrations"):
        sft.main(built.config, built.runtime)


def test_the_gate_waits_for_the_harness_that_is_learned_worst(built: Any) -> None:
    source = Path(built.runtime.init_model_dir)
    lessons = read_lessons(Path(built.runtime.demos_path), source)
    recipe = built.with_recipe(flawed_steps=0).model.coldstart
    with parallel.session(ParallelConfig()):
        model = build_model(source, ParallelConfig(), torch.float32, 0)
        hf.load(model, source)
        trainer = Trainer(model, recipe, lessons, random.Random(1))
        learned = trainer.run(Progress(built.runtime.path(), "coldstart", "cold start")).gate_probability
        held_out = {"learned": lessons.held_out[""], "strange": lessons.flawed}
        both, strange = (
            Trainer(model, recipe, replace(lessons, held_out=groups), random.Random(1)).probability()
            for groups in (held_out, {"strange": lessons.flawed})
        )
    assert learned >= GATE
    assert both == strange < GATE / 2
