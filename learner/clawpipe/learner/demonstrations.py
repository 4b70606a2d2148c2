"""Scripted demonstrations as the role `demos` wrote them, and their form as training sequences.

`tiny` trains the tokenizer on them, `sft` the model.
"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from transformers import PreTrainedTokenizerFast

from clawpipe.learner.tokenizer import encode_turns
from clawpipe.pipeline.errors import LearnerError
from clawpipe.pipeline.packing import Path


class Demonstration(Struct, frozen=True, kw_only=True):
    """One conversation. An assistant message's `content` is the raw text that the model should sample."""

    tools: tuple[dict[str, Any], ...]  # OpenAI tool objects
    messages: tuple[dict[str, Any], ...]
    flawed: bool
    held_out: bool  # not to be trained on


def read(path: FilePath) -> list[Demonstration]:
    """The file's demonstrations. LearnerError, with the line, when it cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as err:
        raise LearnerError(f"{path}: cannot be read ({err.strerror}); run the role `demos` first") from err
    decoder = msgspec.json.Decoder(Demonstration)
    demonstrations = []
    for number, line in enumerate(lines, start=1):
        try:
            demonstrations.append(decoder.decode(line))
        except msgspec.MsgspecError as err:
            raise LearnerError(f"{path}, line {number}: not a demonstration ({err}); write the file anew") from err
    return demonstrations


def sequence(tokenizer: PreTrainedTokenizerFast, demonstration: Demonstration) -> Path:
    """Its tokens, with a loss entry for each one of an assistant turn, the end mark included."""
    ids, sampled = encode_turns(tokenizer, demonstration.messages, demonstration.tools)
    entries = np.flatnonzero(sampled).astype(np.int32)
    return Path(
        tokens=np.array(ids, np.int32),
        entries=entries,
        logprobs=np.zeros(len(entries), np.float32),
        versions=np.zeros(len(entries), np.int32),
    )
