"""Blank errands: what is recorded once and filled in many times."""

from __future__ import annotations

import random

from clawpipe.actors.recording.takes import Flaw, Shape, blank_errand, filled, shape_of, shapes, takes, words_of
from clawpipe.actors.tasks import filing
from clawpipe.actors.tasks.filing import Errand
from clawpipe.pipeline.config import ClaudeCodeConfig, FilingTasksConfig, OpenClawConfig

FAMILY = FilingTasksConfig(rows=4)


def text_of(errand: Errand) -> str:
    return "\n\n".join([errand.prompt, errand.path, errand.content, *errand.files.values()])


def test_a_blank_errand_filled_with_the_words_of_another_is_the_other() -> None:
    dice = random.Random(5)
    for errand in filing.errands(FAMILY, random.Random(2), 200):
        blanks = blank_errand(shape_of(errand, None), dice)
        text = text_of(blanks)
        for blank, word in filled(blanks, errand).items():
            text = text.replace(blank, word)
        assert text == text_of(errand)
        assert blanks.reads == errand.reads


def test_blanks_differ_from_each_other_and_from_every_word_of_the_family() -> None:
    words = words_of(blank_errand(Shape(4), random.Random(1)))
    assert len(set(words)) == len(words) == 12
    known = {*filing.FOLDERS, *filing.STEMS, *filing.KEYS, *filing.WORDS}
    assert not any(word in other or other in word for word in words for other in known)


def test_every_errand_of_the_sources_has_a_shape_that_is_recorded() -> None:
    sources = [FilingTasksConfig(rows=2), FilingTasksConfig(name="other", rows=5)]
    recorded = set(shapes(sources))
    for source in sources:
        for errand in filing.errands(source, random.Random(3), 50):
            assert {shape_of(errand, flaw) for flaw in (None, *Flaw)} <= recorded
    assert len(recorded) == 9


def test_scripts_read_only_where_the_prompt_does_not_say_the_content() -> None:
    [write, copy, *_] = takes(OpenClawConfig(), [Shape(0), Shape(3)], random.Random(1))
    path, content = write.errand.path, write.errand.content
    assert write.script == (
        f'<tool_call>\n{{"name": "write", "arguments": {{"path": "{path}", "content": "{content}"}}}}\n</tool_call>',
        "Done.",
    )
    assert copy.script[0] == '<tool_call>\n{"name": "read", "arguments": {"path": "settings.txt"}}\n</tool_call>'
    assert copy.errand.content in copy.script[1]
    assert len(copy.script) == 3


def test_flaws_are_in_the_turn_that_writes() -> None:
    flawed = [Shape(3, Flaw.FOLDER), Shape(3, Flaw.BRACE)]
    [folder, brace] = takes(ClaudeCodeConfig(), flawed, random.Random(1))
    name = folder.errand.path.rpartition("/")[2]
    assert f'"file_path": "/work/{name}"' in folder.script[1]
    assert folder.errand.path not in folder.script[1]
    assert f'"content": "{brace.errand.content}"}}\n</tool_call>' in brace.script[1]
    assert '"}}' in brace.script[0]
