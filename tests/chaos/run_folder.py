"""The folder and the streams of a run of the kill matrix, as `clawpipe up` prepares them."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import nats
from nats.js.api import ConsumerConfig

from clawpipe.actors.tasks.load import load_tasks
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import nats_server
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.config import Config
from clawpipe.pipeline.runtime import Runtime

UPDATES = 8
FIRST_UID = 330_000
UIDS = 100  # of one run
REDELIVERY_S = 4.0  # of what a killed proxy held; the broker's own is half a minute, which no run here has
BROKER_START_S = 20.0

CONFIG = """
[run]
name = "chaos"
updates = {updates}
seed = {seed}
drain_timeout_s = 20.0

[model]
path = "{model_dir}"
context_tokens = 4096

[nats]
max_store_bytes = 268435456
keep_records_bytes = 268435456

[proxy]
max_completion_tokens = 200
settle_timeout_s = 5.0

[sandbox]
slots = 4
first_uid = {first_uid}
wall_clock_s = 30.0
memory_bytes = 268435456

[[harness]]
kind = "agentloop"
max_turns = 2
max_tokens = 200

[[tasks]]
kind = "filing"
count = 50

[schedule]
groups_per_step = 2
group_size = 2
max_staleness = 6

[checkpoint]
every_updates = 2

[observe]
status_interval_s = 0.2
"""


def prepare(folder: Path, model_dir: Path, seed: int) -> tuple[Config, Runtime]:
    """The run folder as the launcher writes it."""
    first_uid = FIRST_UID + UIDS * secrets.randbelow(1000)  # two runs on one machine look only after their own
    text = CONFIG.format(updates=UPDATES, seed=seed, model_dir=model_dir, first_uid=first_uid)
    path = folder / "chaos.toml"
    path.write_text(text)
    config = configuration.load(path)
    server = nats_server.prepare(folder, port=0, token="", max_store_bytes=config.nats.max_store_bytes)
    for name in ("logs", "progress"):
        (folder / name).mkdir()
    (folder / "config.json").write_bytes(configuration.dump(config))
    (folder / "tasks.json").write_text(json.dumps(list(load_tasks(config.tasks))))
    runtime = Runtime(
        run_id=f"chaos-{seed}-{secrets.token_hex(4)}",
        run_dir=str(folder),
        nats_url=server.url,
        nats_token=server.token,
        init_model_dir=str(model_dir),
        start_model_dir=str(model_dir),
        push_dir=str(folder),
    )
    runtimes.save(runtime)
    return config, runtime


async def set_up(config: Config, runtime: Runtime) -> None:
    """The streams as the launcher makes them, but for the time after which an abandoned request comes again."""
    assert await nats_server.answers(runtime.nats_url, BROKER_START_S)
    async with Broker.of_run(runtime, config.nats) as broker:
        await broker.setup(config.nats.max_store_bytes)
    client = await nats.connect(runtime.nats_url, token=runtime.nats_token)
    try:
        stream = client.jetstream()
        requests = f"{config.nats.prefix}-REQUESTS"
        consumer = (await stream.consumer_info(requests, "runners")).config
        consumer.ack_wait = REDELIVERY_S
        await stream.add_consumer(requests, ConsumerConfig(**vars(consumer)))
    finally:
        await client.close()
