"""Configuration errors say file, key and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawpipe.pipeline import config as configuration
from clawpipe.pipeline.checks import run_checks
from clawpipe.pipeline.cli import parse_overrides
from clawpipe.pipeline.errors import ConfigError

MINIMAL = """
[model.tiny]
[[harness]]
kind = "agentloop"
[[tasks]]
kind = "filing"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("[learner]\nlearning_rate = 1", r"c\.toml: unknown key `learning_rate` in learner; remove it or correct"),
        ("[run]\nupdates = 'ten'", r"c\.toml: run\.updates: expected `int`, got `str`"),
        ("[run]\nupdates = 0", r"run\.updates: expected `int` >= 1"),
        ("[replay]\nleaf_cap = 'few'", r"replay\.leaf_cap: expected `int \| table`, got `str`"),
        ("[replay.leaf_cap]\nat_least = 9\nat_most = 3", r"replay\.leaf_cap: at_least = 9 is more than at_most = 3"),
        (
            "[replay]\nsampling = 'windowed'\nwindow_groups = 7",
            r"window_groups = 7 is less than \[schedule\] groups_per_step = 8: no batch would ever be full; raise",
        ),
        ("[schedule]\nmin_group = 9", r"schedule: min_group = 9 is more than group_size = 8: every group would be dr"),
        ("[schedule]\ngroup_size = 1", r"group_size = 1 with \[algorithm\] kind = \"grpo\": nothing would be trained"),
        ("[replay]\nwindow_groups = 9", r"replay: window_groups = 9 is for sampling = \"windowed\"; set it, or leave"),
        ("[proxy]\ntemperature = 0", r"proxy\.temperature: expected `float` > 0"),
        ("[learner]\nlr = inf", r"c\.toml: learner\.lr is inf, nan or holds a NUL character; give a finite"),
        ('[sandbox]\nrootfs = "a\\u0000"', r"sandbox\.rootfs is inf, nan or holds a NUL"),
        ('[engines]\nurls = ["a", "\\u0000"]', r"engines\.urls\.1 is inf, nan or holds a NUL"),
        (
            "[learner.lr_schedule]\nkind = 'step'",
            r"learner\.lr_schedule\.kind: .*write one of constant, cosine, linear",
        ),
        ("[learner.lr_schedule]\nkind = 'cosine'", r"key `decay_updates` is missing in learner\.lr_schedule; add it"),
        (
            "[learner.lr_schedule]\nkind = 'linear'\ndecay_updates = 5\nmin_lr = 1e-3",
            r"learner: lr_schedule\.min_lr = 0\.001 is above lr = 1e-06, and the rate only falls; lower min_lr",
        ),
        (
            "[checkpoint]\nevery_updates = 10\nkeep_every = 25",
            r"checkpoint: keep_every = 25 is not a multiple of every_updates = 10: most of what it is to keep",
        ),
        ("[modle]\n", r"unknown key `modle` in the top level"),
        ("[model]\npath = 'x'", r"model: set exactly one of `path` and \[model\.tiny\]"),
        ("[learner.parallel]\nprocesses = 3\ntensor = 2", r"processes = 3 is not a multiple"),
        ("[learner.parallel]\nprocesses = 2\ntensor = 2", r"set expert_tensor = 2"),
        ("[learner.parallel]\nprocesses = 4\ntensor = 2\nexpert = 2\nexpert_tensor = 2", r"set expert_tensor = 1"),
        ("[[harness]]\nkind = 'agentloop'", r"two \[\[harness\]\] entries share a name"),
        (
            "[[harness]]\nkind = 'codex'" + 2 * "\n[[harness.mcp]]\nname = 'a'\ncommand = ['x']",
            r"harness\[1\]: two \[\[harness\.mcp\]\] entries are called 'a'",
        ),
        (
            "[[harness]]\nkind = 'codex'\n[[harness.mcp]]\nname = 'a'",
            r"harness\[1\]\.mcp\[0\]: set exactly one of `command` and `documents` for the server 'a'",
        ),
        (
            "[[harness]]\nkind = 'codex'\n[[harness.mcp]]\nname = 'a'\ncommand = ['']",
            r"harness\[1\]\.mcp\[0\]: the `command` of the server 'a' is empty; begin it with a program",
        ),
        ("[[harness]]\nkind = 'codex'\nport = 0", r"harness\[1\]\.port: expected `int` >= 1"),
        ("[[harness]]\nname = 'b'\nkind = 'agentloop'\nport = 0", r"harness\[1\]\.port: expected `int` >= 1"),
        ("[[harness]]\nkind = 'codex'\nenv = {'A=B' = 'c'}", r"a key of harness\[1\]\.env: expected `str` matching"),
        ("[[harness]]\nkind = 'codex'\nenv = {\"A\\n\" = 'c'}", r"a key of harness\[1\]\.env: expected"),
        (
            "[[harness]]\nkind = 'codex'\n[[harness.mcp]]\nname = 'a'\ncommand = ['x']\nenv = {1A = 'c'}",
            r"a key of harness\[1\]\.mcp\[0\]\.env: expected `str` matching",
        ),
        (
            "[[harness]]\nkind = 'aider'",
            r"harness\[1\]\.kind: invalid value 'aider'; write one of agentloop, claude_code, codex, openclaw, "
            r"opencode, qwen_code$",
        ),
        ("[[harness]]\nname = 'b'", r"key `kind` is missing in harness\[1\]; add it: one of agentloop, claude_code"),
        ("[learner]\ndtype = 'int8'", r"learner\.dtype: invalid enum value 'int8'; write one of bfloat16, float32$"),
        (
            "[[harness]]\nkind = 'openclaw'\napi = 'x'",
            r"harness\[1\]\.api: .* 'x'; write one of anthropic-messages, op",
        ),
        ("[algorithm]\nkind = 'dpo'", r"algorithm\.kind: invalid value 'dpo'; write one of grpo, ppo$"),
        (
            "[correction]\nkind = 'gspo'",
            r"correction\.kind: invalid value 'gspo'; write one of binary_tv, cispo, decoupled, geometric_mask, "
            r"icepop, none, topr, truncated$",
        ),
        ("[correction]\nkind = 'icepop'\ncap = 2.0", r"unknown key `cap` in correction; remove it"),
        ("[correction]\nkind = 'none'\ndecay = 0.5", r"unknown key `decay` in correction; remove it"),
        ("[correction]\ncap = 0.5", r"correction\.cap: expected `float` >= 1"),
        ("[correction]\nkind = 'icepop'\nlow = 1.5", r"correction\.low: expected `float` <= 1"),
        ("[correction]\nkind = 'icepop'\nlow = 0", r"correction\.low: expected `float` > 0"),
        ("[correction]\nkind = 'geometric_mask'\nhigh = 0.9", r"correction\.high: expected `float` >= 1"),
        (
            "[correction]\nkind = 'icepop'\nlow = 1.0\nhigh = 1.0",
            r"correction: low = 1\.0 is not below high = 1\.0: every token would be left out; raise high",
        ),
        ("[correction]\nkind = 'decoupled'\nmask_above = 0.5", r"correction\.mask_above: expected `float` >= 1"),
        ("[correction]\nkind = 'binary_tv'\ndelta = 0", r"correction\.delta: expected `float` > 0"),
        (
            "[correction]\nkind = 'none'\n[correction.auto_throttle]",
            r"correction: kind = \"none\" gives every token the weight 1, .* remove \[correction\.auto_throttle\]",
        ),
        (
            "[correction]\nkind = 'cispo'\n[correction.auto_throttle]\nfor_updates = 0",
            r"correction\.auto_throttle\.for_updates: expected `int` >= 1",
        ),
    ],
)
def test_a_wrong_key_is_one_line_that_names_it(tmp_path, addition, message):
    text = MINIMAL.replace("[model.tiny]", "[model.tiny]\n") + addition
    with pytest.raises(ConfigError, match=message):
        configuration.load(written(tmp_path, text))


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ConfigError, match="key `harness` is missing in the top level"):
        configuration.load(written(tmp_path, "[model.tiny]\n[[tasks]]\nkind = 'filing'"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        configuration.load(tmp_path / "nowhere.toml")


def test_text_that_is_not_toml_is_refused_with_its_place(tmp_path):
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 1"):
        configuration.load(written(tmp_path, "a = = 1"))


def test_overrides_replace_nested_keys_and_list_items(tmp_path):
    text = MINIMAL + "[[tasks]]\nkind = 'clawgym'\npath = 'a.jsonl'\n"
    overrides = parse_overrides(["learner.lr=2e-5", "tasks.1.path=/b.jsonl", "run.name=night"])
    loaded = configuration.load(written(tmp_path, text), overrides)
    assert loaded.learner.lr == 2e-5
    assert loaded.tasks[1].path == "/b.jsonl"
    assert loaded.run.name == "night"


def test_documents_of_an_mcp_server_are_relative_to_the_configuration(tmp_path):
    text = MINIMAL.replace('kind = "agentloop"', "kind = 'codex'\n[[harness.mcp]]\nname = 'a'\ndocuments = 'books'")
    loaded = configuration.load(written(tmp_path, text))
    assert loaded.harness[0].mcp[0].documents == str(tmp_path / "books")


@pytest.mark.parametrize("assignment", ["tasks.7.path=x", "tasks.first.path=x", "run.name.deeper=x"])
def test_an_override_of_something_that_is_not_there_is_refused(tmp_path, assignment):
    with pytest.raises(ConfigError, match="--set"):
        configuration.load(written(tmp_path, MINIMAL + "[run]\nname = 'n'\n"), parse_overrides([assignment]))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("", configuration.TruncatedConfig(cap=2.0, decay=1.0)),
        ("[correction]", configuration.TruncatedConfig()),
        ("[correction]\ndecay = 0.5", configuration.TruncatedConfig(decay=0.5)),
        ("[correction]\nkind = 'none'", configuration.UncorrectedConfig()),
        ("[correction]\nkind = 'truncated'\ncap = 3", configuration.TruncatedConfig(cap=3.0)),
        ("[correction]\nkind = 'decoupled'", configuration.DecoupledConfig(mask_above=5.0)),
        ("[correction]\nkind = 'icepop'\nhigh = 2.0", configuration.IcePopConfig(low=0.5, high=2.0)),
        (
            "[correction]\nkind = 'geometric_mask'\nlow = 0.9",
            configuration.GeometricMaskConfig(low=0.9, high=1.01, veto_below=1e-4, cap=2.0),
        ),
        ("[correction]\nkind = 'cispo'\ncap = 4.0", configuration.CispoConfig(cap=4.0)),
        ("[correction]\nkind = 'topr'", configuration.ToprConfig()),
        ("[correction]\nkind = 'binary_tv'\ndelta = 0.3", configuration.BinaryTvConfig(delta=0.3, kl_coef=1e-3)),
        (
            "[correction]\n[correction.auto_throttle]\ness_below = 0.3",
            configuration.TruncatedConfig(auto_throttle=configuration.AutoThrottle(ess_below=0.3, for_updates=3)),
        ),
    ],
)
def test_every_kind_of_correction_loads_and_reads_back(tmp_path, table, expected):
    loaded = configuration.load(written(tmp_path, MINIMAL + table))
    assert loaded.correction == expected
    stored = tmp_path / "config.json"
    stored.write_bytes(configuration.dump(loaded))
    assert configuration.restore(stored) == loaded


def test_overrides_of_a_correction_need_not_name_its_kind(tmp_path):
    loaded = configuration.load(written(tmp_path, MINIMAL), {"correction.cap": 3.0})
    assert loaded.correction == configuration.TruncatedConfig(cap=3.0)


def test_relative_paths_are_relative_to_the_file(tmp_path):
    text = MINIMAL + "[[tasks]]\nkind = 'clawgym'\npath = 'data/a.jsonl'\n"
    assert configuration.load(written(tmp_path, text)).tasks[1].path == str(tmp_path / "data" / "a.jsonl")


def test_a_value_model_is_relative_to_the_file_and_absent_by_default(tmp_path):
    file = written(tmp_path, MINIMAL + "\n[algorithm]\nkind = 'ppo'\n")
    assert configuration.load(file).algorithm.value_path == ""
    given = configuration.load(file, {"algorithm.value_path": "values"})
    assert given.algorithm.value_path == str(tmp_path / "values")


def test_a_stored_configuration_reads_back_the_same(tmp_path):
    loaded = configuration.load(written(tmp_path, MINIMAL))
    stored = tmp_path / "config.json"
    stored.write_bytes(configuration.dump(loaded))
    assert configuration.restore(stored) == loaded


def test_every_shipped_configuration_passes_the_offline_check():
    found = sorted((Path(__file__).parents[2] / "configs").rglob("*.toml"))
    assert [path.stem for path in found] == [
        *("clawgym", "mix_harness", "quickstart", "quickstart_ppo"),
        *("agentloop_grpo", "claude_code_grpo", "claude_code_ppo", "mix_harness", "openclaw_grpo", "openclaw_ppo"),
    ]
    for path in found:
        assert run_checks(configuration.load(path), offline=True).problems == (), path
