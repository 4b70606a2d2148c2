"""Fixtures for every room that needs a real engine: a tiny random model, and one running vLLM per session.

`tests/conftest.py` loads this module as a plugin. A test that asks for `engine` gets it with the weights of
`tiny_model_dir` in it; a test may push others, and the next test gets the first ones again, under a new version.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from clawpipe.actors.engines.server import ServerSettings, running
from clawpipe.actors.engines.transfer import apply, init_transfer
from clawpipe.pipeline.config import EnginesConfig
from clawpipe.pipeline.processes import free_port
from clawpipe.pipeline.records import WeightVersion

MODEL_NAME = "policy"
CONTEXT_TOKENS = 2048
VOCAB_SIZE = 768
PUSH_TIMEOUT_S = 120.0
SAMPLING = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
ENGINES = EnginesConfig(dtype="float32", eager=True, max_num_seqs=32, start_timeout_s=400.0)

CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{{ messages[0].content if messages[0].role == "system" }}
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif -%}
{%- for message in messages if not (tools and loop.first and message.role == "system") -%}
<|im_start|>{{ "user" if message.role == "tool" else message.role }}
{% if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content or "" }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_model(folder: Path, *, seed: int, tied: bool = True) -> Path:
    """A random fp32 Qwen3-MoE of 0.2 M parameters with a byte-level tokenizer, as a Hugging Face folder."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=65536,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def build_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_level = Tokenizer(models.BPE())
    bytes_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_level.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    visible = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    words = " ".join("".join(letters) for letters in product("bdgkmprst", "aeiou", "lnrs", "aeiou"))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special) - len(visible),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bytes_level.train_from_iterator([words], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_level,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in visible])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class RunningEngine:
    """A vLLM server, and what it serves now."""

    def __init__(self, url: str, model_dir: Path, portal: BlockingPortal) -> None:
        self.url = url
        self.model_name = MODEL_NAME
        self.model_dir = model_dir
        self.version = -1
        self.weights = model_dir
        self._portal = portal

    def push(self, folder: Path, *, clear_cache: bool = True, **init_info: Any) -> float:
        """Puts the weights of a Hugging Face folder into the engine under the next version; returns pause_s."""
        [path] = folder.glob("*.safetensors")
        weights = WeightVersion(
            version=self.version + 1, path=str(path), num_bytes=path.stat().st_size, created_s=time.time()
        )

        async def transfer() -> float:
            async with httpx.AsyncClient(base_url=self.url, timeout=None) as client:
                await init_transfer(client, PUSH_TIMEOUT_S, **init_info)
                return await apply(client, weights, clear_cache=clear_cache, timeout_s=PUSH_TIMEOUT_S)

        pause_s = self._portal.call(transfer)
        self.version, self.weights = weights.version, folder
        return pause_s


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny random Qwen3-MoE, fp32, tied embeddings."""
    return build_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def _engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    run_dir = tmp_path_factory.mktemp("engine")
    settings = ServerSettings(
        name="vllm-0",
        url=f"http://127.0.0.1:{free_port()}",
        model_dir=str(tiny_model_dir),
        model_name=MODEL_NAME,
        context_tokens=CONTEXT_TOKENS,
        config=ENGINES,
        seed=0,
    )
    with start_blocking_portal() as portal:
        server = running(settings, run_dir, f"test-engine-{settings.url.rpartition(':')[2]}")
        with portal.wrap_async_context_manager(server):
            yield RunningEngine(settings.url, tiny_model_dir, portal)


@pytest.fixture
def engine(_engine: RunningEngine) -> RunningEngine:
    """The session's vLLM with the weights of `tiny_model_dir`; `engine.version` is their version."""
    if _engine.version < 0 or _engine.weights != _engine.model_dir:
        _engine.push(_engine.model_dir)
    return _engine


@dataclass
class Answer:
    """What the engine says about one completion."""

    ids: list[int]
    logprobs: np.ndarray
    spans: list[tuple[str, int, int]]
    finish_reason: str
    cached_tokens: int


def prompt(seed: int, length: int = 300) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def generate(
    client: httpx.Client,
    url: str,
    ids: list[int],
    *,
    salt: str = "",
    temperature: float = 1.0,
    n: int = 64,
) -> Answer:
    sampling = {**SAMPLING, "temperature": temperature, "max_tokens": n}
    body: dict[str, Any] = {"token_ids": ids, "sampling_params": sampling}
    if salt:
        body["cache_salt"] = salt
    response = client.post(f"{url}/inference/v1/generate", json=body)
    assert response.status_code == 200, response.text
    data = response.json()
    [choice] = data["choices"]
    return Answer(
        ids=choice["token_ids"],
        logprobs=np.array([entry["logprob"] for entry in choice["logprobs"]["content"]]),
        spans=spans(choice),
        finish_reason=choice["finish_reason"],
        cached_tokens=(data["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
    )


def spans(choice: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]


class Oracle:
    """transformers' own forward pass in float32 over the weights of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import Qwen3MoeForCausalLM

        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
        self._model = model.eval()

    def logprobs(self, ids: list[int], completion: list[int], temperature: float = 1.0) -> np.ndarray:
        """log softmax(logits / T) of each token of `completion` after the prompt `ids`: float32 [C]."""
        import torch

        with torch.no_grad():
            logits = self._model(torch.tensor([ids + completion])).logits[0, len(ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, -1)
        return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()


def worst(engine_logprobs: np.ndarray, other: np.ndarray) -> float:
    """The largest difference between two lists of logprobs."""
    assert len(engine_logprobs) == len(other)
    return float(np.abs(engine_logprobs - other).max())
