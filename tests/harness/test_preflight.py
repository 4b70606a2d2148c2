"""What `clawpipe check` says of the rollout side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clawpipe.actors.harness import install
from clawpipe.actors.preflight import check
from clawpipe.pipeline.config import (
    AgentLoopConfig,
    ClaudeCodeConfig,
    ClawGymTasksConfig,
    CodexConfig,
    Config,
    FilingTasksConfig,
    HarnessConfig,
    McpConfig,
    ModelConfig,
    OpenClawConfig,
    OpenCodeConfig,
    SandboxConfig,
    TinyModelConfig,
)

TINY = ModelConfig(tiny=TinyModelConfig())


def config(*tasks: Any, model: ModelConfig = TINY, entries: tuple[HarnessConfig, ...] = (AgentLoopConfig(),)) -> Config:
    return Config(model=model, tasks=tasks or (FilingTasksConfig(count=3),), harness=entries)


def gym(tmp_path: Path, text: str) -> ClawGymTasksConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return ClawGymTasksConfig(path=str(path), name="gym")


def row(prompt: str) -> str:
    files = [{"file_path": "reward/check.py", "content": ""}]
    return json.dumps({"prompt": prompt, "hook_code": "python3 reward/check.py /w", "input_files": files}) + "\n"


def put_in_place(kind: str, version: str = "") -> dict[str, Path]:
    """Files where the programs would be, in the cache of this test: the program's own, and node's."""
    binds = install.programs(kind, version)
    inside = {kind: install.command(kind)[-1], "node": "/opt/node/bin/node"}
    files = {name: Path(binds[f"/opt/{name}"], Path(path).relative_to(f"/opt/{name}")) for name, path in inside.items()}
    for file in files.values():
        file.parent.mkdir(parents=True)
        file.touch()
    return files


def test_the_quickstart_has_no_problem_and_its_tasks_are_named() -> None:
    report = check(config(), offline=False)
    assert report.problems == ()
    assert report.task_ids == ("filing/task_00000", "filing/task_00001", "filing/task_00002")


def test_offline_looks_at_no_file(tmp_path: Path) -> None:
    gone = ClawGymTasksConfig(path=str(tmp_path / "gone.jsonl"))
    asked = config(gone, FilingTasksConfig(count=1), model=ModelConfig(path="/nowhere"))
    assert check(asked, offline=True).problems == ()
    assert check(asked, offline=True).task_ids == ("filing/task_00000",)
    (problem,) = check(asked, offline=False).problems
    assert problem.startswith(f"{tmp_path}/gone.jsonl: cannot be read")


def test_every_bad_source_is_said_on_one_line(tmp_path: Path) -> None:
    report = check(config(gym(tmp_path, "{}\n"), FilingTasksConfig(count=1, stems=500)), offline=False)
    assert len(report.problems) == 2
    assert report.problems[0].startswith(f"{tmp_path}/rows.jsonl: row 1: ")
    assert "stems = 500 is over" in report.problems[1]
    assert not any("\n" in problem for problem in report.problems)


def test_a_prompt_that_the_harness_cannot_take_is_a_problem(tmp_path: Path) -> None:
    source = gym(tmp_path, row("short") + row("x" * 140_000))
    (problem,) = check(config(source), offline=False).problems
    assert problem.startswith("task gym/task_00001: agentloop takes a prompt of at most")


def test_a_program_that_is_not_installed_is_a_problem_unless_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    asked = config(entries=(ClaudeCodeConfig(name="cc"), CodexConfig(version="7.0.0")))
    node, codex = check(asked, offline=False).problems
    assert node.startswith(f"[[harness]] cc: {tmp_path}/harness/node-")
    assert node.endswith("is not installed; run `clawpipe harness install claude_code`")
    assert codex.endswith("run `clawpipe harness install codex@7.0.0`")
    put_in_place("codex", "7.0.0")
    (problem,) = check(asked, offline=False).problems
    assert problem.startswith(f"[[harness]] cc: {tmp_path}/harness/claude_code-")
    assert check(asked, offline=True).problems == ()


@pytest.mark.parametrize("lost", ["codex", "node"])
def test_a_folder_that_has_lost_its_program_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    files = put_in_place("codex")
    assert check(config(entries=(CodexConfig(),)), offline=False).problems == ()
    files[lost].unlink()
    (problem,) = check(config(entries=(CodexConfig(),)), offline=False).problems
    assert problem.startswith(f"[[harness]] codex: {tmp_path}/harness/{lost}-")
    assert problem.endswith("has lost its program; run `clawpipe harness install codex`")


def test_a_sandbox_in_which_a_program_cannot_live_is_a_problem() -> None:
    asked = config(entries=(OpenClawConfig(), OpenCodeConfig(name="oc"), AgentLoopConfig()))
    asked = msgspec.structs.replace(asked, sandbox=SandboxConfig(memory_bytes=512 * 1024**2))
    (problem,) = check(asked, offline=True).problems
    assert problem.startswith("[[harness]] oc: [sandbox] memory_bytes = 536870912 is too little for opencode")
    assert problem.endswith("set it to 805306368 or more")


@pytest.mark.filterwarnings("ignore")  # importing vLLM and torch warns
@pytest.mark.parametrize("key", ["tool_parser", "reasoning_parser"])
def test_a_parser_that_vllm_does_not_know_is_a_problem_of_the_tiny_model_too(key: str) -> None:
    right = {"tool_parser": "qwen3_coder", "reasoning_parser": "qwen3"}
    assert check(config(model=ModelConfig(tiny=TinyModelConfig(), **right)), offline=False).problems == ()
    wrong = ModelConfig(tiny=TinyModelConfig(), **{**right, key: "nonsense"})
    (problem,) = check(config(model=wrong), offline=False).problems
    assert problem.startswith(f"[model] {key}: vLLM has no 'nonsense'")


def test_a_version_that_is_none_is_said_once_beside_the_other_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    version, claude = check(config(entries=(CodexConfig(version="latest"), ClaudeCodeConfig())), offline=False).problems
    assert version.startswith("codex: version 'latest' is no exact version")
    assert claude.endswith("run `clawpipe harness install claude_code`")


def test_a_harness_that_cannot_run_with_this_model_is_a_problem_even_offline() -> None:
    model = ModelConfig(tiny=TinyModelConfig(), name="claude-next")
    refused, elsewhere = check(
        config(entries=(ClaudeCodeConfig(name="a"), CodexConfig(env={"CODEX_HOME": "/"})), model=model), offline=True
    ).problems
    (home,) = check(config(entries=(CodexConfig(env={"HOME": "/root"}),)), offline=True).problems
    assert home.startswith("[[harness]] codex: env may not set HOME")
    assert refused.startswith("[[harness]] a: Claude Code takes [model] name = 'claude-next'")
    assert elsewhere.startswith("[[harness]] codex: env may not set CODEX_HOME")


def test_a_folder_of_documents_that_is_not_there_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWPIPE_CACHE", str(tmp_path))
    put_in_place("codex")
    served = (McpConfig(name="docs", documents=f"{tmp_path}/gone"),)
    (problem,) = check(config(entries=(CodexConfig(mcp=served),)), offline=False).problems
    assert problem.startswith(f"[[harness.mcp]] docs: documents = {tmp_path}/gone is not a folder")


def test_a_rootfs_without_python_is_a_problem(tmp_path: Path) -> None:
    asked = config()
    asked = msgspec.structs.replace(asked, sandbox=msgspec.structs.replace(asked.sandbox, rootfs=str(tmp_path)))
    (problem,) = check(asked, offline=False).problems
    assert problem.startswith(f"[sandbox] rootfs: {tmp_path}/usr/bin/python3 is missing")


def model_folder(folder: Path, template: str) -> Path:
    """A tokenizer of single bytes with the given chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")], True)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template
    tokenizer.save_pretrained(folder)
    return folder


TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- OPEN + '\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\\n' + CLOSE }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def template(opening: str, closing: str) -> str:
    return TEMPLATE.replace("OPEN", f"'{opening}'").replace("CLOSE", f"'{closing}'")


@pytest.mark.filterwarnings("ignore")  # importing vLLM and torch warns
def test_a_tool_call_must_come_back_from_template_tokenizer_and_parser(tmp_path: Path) -> None:
    good = model_folder(tmp_path / "good", template("<tool_call>", "</tool_call>"))
    assert check(config(model=ModelConfig(path=str(good))), offline=False).problems == ()
    bad = model_folder(tmp_path / "bad", template("<call>", "</call>"))
    (problem,) = check(config(model=ModelConfig(path=str(bad))), offline=False).problems
    assert re.match(r"\[model\] path = .*/bad: a tool call does not survive .* tool_parser = 'hermes'", problem)
    (problem,) = check(config(model=ModelConfig(path=str(good), tool_parser="nonsense")), offline=False).problems
    assert "vLLM has no 'nonsense'" in problem
    refusing = TEMPLATE.replace("{{- OPEN", "{{- raise_exception('no tools here')").replace("CLOSE", "''")
    deaf = model_folder(tmp_path / "deaf", refusing)
    (problem,) = check(config(model=ModelConfig(path=str(deaf))), offline=False).problems
    assert "deaf: its chat template refuses a tool call (no tools here)" in problem
