"""The role `syllables`: the tokenizer that demonstrations are recorded with.

The tiny model's own tokenizer is trained on the demonstrations, and yet the proxy needs one to record them. This one
has the same marks and the same chat template, and comes back to the exact text, so what is recorded is what the model
will read. It has learned English from Python's own manual, which lies on every machine: a harness whose prompt costs
as many tokens as with any other model does not start to compact while it is recorded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from pydoc_data.topics import topics

from clawpipe.learner.safetensor_files import finish_folder
from clawpipe.learner.tokenizer import syllable_tokenizer
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.models import syllables_dir
from clawpipe.pipeline.runtime import Runtime

VOCAB_SIZE = 8192


def main(config: Config, runtime: Runtime) -> None:
    """Writes the folder beside `runtime.demos_path`, anew."""
    target = syllables_dir(Path(runtime.demos_path))
    staging = target.with_name(target.name + ".incomplete")
    for folder in (staging, target):
        shutil.rmtree(folder, ignore_errors=True)
    texts = (topics[name] for name in sorted(topics))
    syllable_tokenizer(texts, VOCAB_SIZE, config.model.context_tokens).save_pretrained(staging)
    finish_folder(staging, target)
