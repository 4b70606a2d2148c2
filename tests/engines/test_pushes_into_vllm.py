"""Against a running vLLM: what it says it sampled is what an independent model says, whatever is pushed into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import httpx
import numpy as np
import pytest

from engine_fixture import (
    SAMPLING,
    VOCAB_SIZE,
    Answer,
    Oracle,
    RunningEngine,
    build_model,
    generate,
    prompt,
    spans,
    worst,
)

pytestmark = pytest.mark.engine

NUM_STREAMS = 8
STREAM_TOKENS = 600


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return build_model(tmp_path_factory.mktemp("other") / "model", seed=1)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=300, limits=httpx.Limits(max_connections=64)) as client:
        yield client


def stream(client: httpx.Client, engine: RunningEngine, ids: list[int], samples: Barrier) -> Answer:
    """A streamed completion of STREAM_TOKENS tokens; meets the others at `samples` after its first five."""
    body = {"token_ids": ids, "sampling_params": {**SAMPLING, "max_tokens": STREAM_TOKENS}, "stream": True}
    answer = Answer(ids=[], logprobs=np.array([]), spans=[], finish_reason="", cached_tokens=0)
    logprobs: list[float] = []
    with client.stream("POST", f"{engine.url}/inference/v1/generate", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
                met = len(answer.ids) >= 5
                answer.ids += choice["token_ids"] or []
                logprobs += [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
                answer.spans = spans(choice) or answer.spans
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                if not met and len(answer.ids) >= 5:
                    samples.wait()
    answer.logprobs = np.array(logprobs)
    return answer


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution_before_and_after_a_push(
    engine: RunningEngine, client: httpx.Client, other_model_dir: Path, temperature: float
) -> None:
    first, other, ids = Oracle(engine.model_dir), Oracle(other_model_dir), prompt(1)
    before = generate(client, engine.url, ids, temperature=temperature)
    version = engine.version
    engine.push(other_model_dir)
    after = generate(client, engine.url, ids, temperature=temperature)

    assert before.spans == [(str(version), 0, 64)]
    assert after.spans == [(str(version + 1), 0, 64)]
    assert worst(before.logprobs, first.logprobs(ids, before.ids, temperature)) <= 1e-5
    assert worst(after.logprobs, other.logprobs(ids, after.ids, temperature)) <= 1e-5
    assert worst(after.logprobs, first.logprobs(ids, after.ids, temperature)) > 0.5


@pytest.mark.parametrize("fault", ["keep_expert_kernels", "keep_packed_heads"])
def test_without_its_workaround_each_fault_of_vllm_silently_gives_wrong_weights(
    engine: RunningEngine, client: httpx.Client, other_model_dir: Path, fault: str
) -> None:
    """When this fails in its first half, vLLM has mended the fault and the workaround can go."""
    other, ids = Oracle(other_model_dir), prompt(2)
    engine.push(other_model_dir, **{fault: True})
    faulty = generate(client, engine.url, ids)
    engine.push(other_model_dir)
    sound = generate(client, engine.url, ids)

    assert faulty.finish_reason == "length"
    assert worst(faulty.logprobs, other.logprobs(ids, faulty.ids)) > 0.05
    assert worst(sound.logprobs, other.logprobs(ids, sound.ids)) <= 1e-5


def test_a_push_into_running_streams_changes_the_version_per_token_and_aborts_none(
    engine: RunningEngine, client: httpx.Client, other_model_dir: Path
) -> None:
    """Keys and values are computed again (clear_cache), so that even the first new token has a wholly new past."""
    first, other = Oracle(engine.model_dir), Oracle(other_model_dir)
    prompts = [prompt(10 + index, 200 + 7 * index) for index in range(NUM_STREAMS)]
    old, new = str(engine.version), str(engine.version + 1)
    everyone_samples = Barrier(NUM_STREAMS + 1, timeout=60)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        running = [threads.submit(stream, client, engine, ids, everyone_samples) for ids in prompts]
        everyone_samples.wait()
        engine.push(other_model_dir)
        answers = [future.result() for future in running]

    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.finish_reason == "length"
        assert len(answer.ids) == STREAM_TOKENS
        switch = answer.spans[0][2]
        assert answer.spans == [(old, 0, switch), (new, switch, STREAM_TOKENS)]
        assert 0 < switch < STREAM_TOKENS
        assert worst(answer.logprobs[:switch], first.logprobs(ids, answer.ids)[:switch]) <= 1e-5
        assert worst(answer.logprobs[switch:], other.logprobs(ids, answer.ids)[switch:]) <= 1e-5


def test_a_new_salt_keeps_a_prompt_away_from_blocks_of_the_old_weights(
    engine: RunningEngine, client: httpx.Client, other_model_dir: Path
) -> None:
    other, ids = Oracle(other_model_dir), prompt(3)
    old_salt = f"test-{engine.version}"
    generate(client, engine.url, ids, salt=old_salt, n=1)
    engine.push(other_model_dir, clear_cache=False)
    stale = generate(client, engine.url, ids, salt=old_salt)
    fresh = generate(client, engine.url, ids, salt=f"test-{engine.version}")

    assert stale.cached_tokens > 0
    assert worst(stale.logprobs, other.logprobs(ids, stale.ids)) > 0.05
    assert fresh.cached_tokens == 0
    assert worst(fresh.logprobs, other.logprobs(ids, fresh.ids)) <= 1e-5


def test_a_token_that_ends_the_turn_is_sampled_like_any_other(engine: RunningEngine, client: httpx.Client) -> None:
    """The learner trains it, so it must come with its id and its logprob."""
    ends = list(range(VOCAB_SIZE // 4))
    sampling = {**SAMPLING, "max_tokens": 200, "stop_token_ids": ends}
    body = {"token_ids": prompt(4), "sampling_params": sampling}
    [choice] = client.post(f"{engine.url}/inference/v1/generate", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] in ends
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
