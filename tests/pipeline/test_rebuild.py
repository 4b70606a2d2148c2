"""A run of the service on a real nats-server, replayed from its store when it has ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sqlite3
from pathlib import Path

import anyio
import msgspec
import nats
import pytest
from pipeline_scripts import Script, configuration, entry, two_turns

from clawpipe.pipeline import config as configurations
from clawpipe.pipeline import entries
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.audit import audit
from clawpipe.pipeline.errors import ClawpipeError
from clawpipe.pipeline.forest import Batch
from clawpipe.pipeline.holdings import make_assembler
from clawpipe.pipeline.leaf_caps import LeafCaps
from clawpipe.pipeline.ledger import Ledger
from clawpipe.pipeline.ledger_file import Stored, reading
from clawpipe.pipeline.rebuild import Rebuild
from clawpipe.pipeline.records import CallRecord, Infra, Role, float_bytes, int_bytes
from clawpipe.pipeline.replay_command import lines, replay

STREAM = "clawpipe-RECORDS"


def play(request, attempt, *, version):
    """Two turns, a sub-agent and a compacted conversation; one rollout is lost to infrastructure."""
    *calls, _ = two_turns(request, attempt, version=version)
    script = Script(request.rollout_id, attempt, request.harness, request.task_id, list(calls))
    script.texts = {call.call_id: ([], []) for call in calls}
    script.call([8, 8], [9, 9, 9], role=Role.SUBAGENT, version=version, parent=None)
    script.call([1, 2, 7], [5], version=version, parent=None)
    lost = Infra(boundary="sandbox", message="gone") if request.rollout_id == "r-000000-1" else None
    return [*script.records, script.manifest(lost, version=request.version)]


def train(run, play=play, *, to_the_end=False):
    """A run up to the learner's last checkpoint, where the service is killed; `to_the_end`: until it ends by itself,
    which takes it 2 s, since the learner might say something more."""

    async def main():
        async with run.around(play) as (_, tasks):
            if to_the_end:
                tasks.start_soon(run.learner.hello_and_train)
                await run.serve()
            else:
                await run.serve_until(run.learner.hello_and_train)

    anyio.run(main)
    folder = Path(run.runtime.run_dir)
    (folder / "config.json").write_bytes(configurations.dump(run.config))
    runtimes.save(run.runtime)
    return folder


def files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def alter(run, change):
    """`change` gets the context of the stream while the server runs; then the server is stopped."""

    async def main():
        client = await nats.connect(run.server.url, token=run.server.token)
        await change(client.jetstream())
        await client.close()

    anyio.run(main)
    run.server.kill()


async def replace_record(js, sequence, **fields):
    """The record with other fields, at the end of the stream instead of at its place."""
    message = await js.get_msg(STREAM, sequence)
    record = msgspec.msgpack.decode(message.data)
    assert fields.keys() <= record.keys()
    await js.delete_msg(STREAM, sequence)
    await js.publish(message.subject, msgspec.msgpack.encode({**record, **fields}))


@pytest.mark.parametrize("auxiliary", ["exclude", "own_group"])
def test_a_run_that_ended_is_rebuilt_bit_for_bit(run, tmp_path, auxiliary):
    run = run(replay={"auxiliary": auxiliary})
    folder = train(run, to_the_end=True)
    run.server.kill()
    audited = audit(folder, goes_on=False)
    assert audited.wrong is None
    assert audited.accounts[""].rollouts == {"trained": 12, "dropped: infra": 1}
    # Of each rollout 2 + 1 tokens of its turns, 3 of its sub-agent, 1 after the compaction.
    assert audited.accounts[""].tokens == {
        "sampled": 13 * 7,
        "trained": 12 * (7 if auxiliary == "own_group" else 4),
        "dropped: infra": 7,
        **({} if auxiliary == "own_group" else {"dropped: auxiliary_subagent": 36}),
    }
    before = files(folder / "nats")
    found = replay(folder, goes_on=False, batches_dir=tmp_path / "bodies")
    assert found.first is None
    assert (found.batches.equal, found.batches.different, found.batches.gone) == (3, 0, 0)
    assert (found.rollouts.equal, found.rollouts.different, found.rollouts.gone) == (13, 0, 0)
    assert (found.trees.equal, found.trees.different, found.trees.gone) == (12, 0, 0)
    assert lines(found)[-1] == "all that could be rebuilt is equal"
    assert files(folder / "nats") == before
    bodies = {path.stem: path.read_bytes() for path in (tmp_path / "bodies").iterdir()}
    assert len(bodies) == 3
    for _, batch in run.learner.trained:
        assert msgspec.msgpack.decode(bodies[batch.batch_id], type=Batch) == batch
    with reading(folder / "ledger.sqlite") as ledger:
        assert {each.batch_id: each.digest for each in ledger.read().batches} == {
            name: hashlib.blake2b(body).hexdigest() for name, body in bodies.items()
        }


def replay_first(folder):
    return replay(folder, goes_on=False).first


def edit_first_batch(folder, **fields):
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        batch_id, row = db.execute("SELECT batch_id, row FROM batches ORDER BY rowid").fetchone()
        changed = json.loads(row) | fields
        db.execute("UPDATE batches SET row = ? WHERE batch_id = ?", (json.dumps(changed).encode(), batch_id))


def test_a_batch_row_that_no_run_wrote_is_a_difference(run):
    run = run()
    folder = train(run)
    run.server.kill()
    edit_first_batch(folder, version=-1)
    assert re.search(r"it is of version -1, and its rollout r-\S+ has tokens of a later", replay_first(folder))
    with reading(folder / "ledger.sqlite") as ledger:
        members = ledger.read().batches[0].rollouts
    edit_first_batch(folder, version=0, rollouts=[*members, members[0]])
    assert re.search(r"its body had digest \w+, and has \w+ when rebuilt", replay_first(folder))


def test_a_stream_whose_newest_record_is_gone_is_read_up_to_there(run):
    run = run()
    folder = train(run)

    async def change(js):
        assert await js.delete_msg(STREAM, (await js.stream_info(STREAM)).state.last_seq)

    alter(run, change)
    assert re.search(r"the stream ends with record \d+, .* the store is damaged", replay_first(folder))


def test_a_record_of_which_one_byte_changed_shows(run):
    run = run()
    folder = train(run)

    async def change(js):
        """The first call of the first trained rollout: its first sampled token is another."""
        for sequence in range(1, 99):
            message = await js.get_msg(STREAM, sequence)
            record = msgspec.msgpack.decode(message.data)
            if message.subject == "clawpipe.records.call.r-000001-1":
                completion = bytes([record["completion_ids"][0] ^ 1]) + record["completion_ids"][1:]
                await replace_record(js, sequence, completion_ids=completion)
                return

    alter(run, change)
    found = replay(folder, goes_on=False)
    assert (found.batches.equal, found.batches.different, found.batches.gone) == (2, 1, 0)
    assert (found.rollouts.equal, found.rollouts.different) == (12, 1)
    with reading(folder / "ledger.sqlite") as ledger:
        [batch] = [each for each in ledger.read().batches if "r-000001-1" in each.rollouts]
    assert found.first.startswith(f"batch {batch.batch_id}: its body had digest {batch.digest[:16]}, and has ")
    assert lines(found)[-1].startswith(f"batch {batch.batch_id}: ")


def test_a_rollout_that_is_in_no_batch_is_compared_by_its_calls(run):
    run = run()
    folder = train(run)

    async def change(js):
        message = await js.get_last_msg(STREAM, "clawpipe.records.call.r-000000-1")
        longer = {
            "completion_ids": int_bytes([5, 6]),
            "logprobs": float_bytes([-1.0, -1.0]),
            "versions": [{"version": 0, "start": 0, "end": 2}],
        }
        await replace_record(js, message.seq, **longer)

    alter(run, change)
    found = replay(folder, goes_on=False)
    assert (found.batches.equal, found.batches.different) == (3, 0)
    assert (found.rollouts.equal, found.rollouts.different) == (12, 1)
    assert re.fullmatch(
        r"rollout r-000000-1: call r-000000-1\.a\d+\.c3 was 1 tokens \(0 kept, 1 infra\), "
        r"and is 2 tokens \(0 kept, 2 infra\) when rebuilt",
        found.first,
    )


def test_records_that_are_purged_are_said(run):
    run = run(nats={"keep_records_bytes": 0})
    folder = train(run)
    run.server.kill()
    found = replay(folder, goes_on=False)
    assert found.records == 0
    assert (found.batches.equal, found.batches.different, found.batches.gone) == (0, 0, 3)
    assert lines(found) == [
        "records: none are kept",
        "rollouts: 0 rebuilt equal, 0 different, 13 cannot be rebuilt",
        "trees: 0 rebuilt equal, 0 different, 12 cannot be rebuilt",
        "batches: 0 rebuilt equal, 0 different, 3 cannot be rebuilt",
        "not all records are there; [nats] keep_records_bytes says how many are kept",
        "nothing could be rebuilt",
    ]


def test_a_store_that_is_damaged_is_not_taken_for_one_that_was_purged(run):
    run = run()
    folder = train(run)
    run.server.kill()
    [block] = (folder / "nats" / "store").rglob(f"{STREAM}/msgs/*.blk")
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes(content)
    found = replay(folder, goes_on=False)
    assert found.rollouts.different == found.batches.different == 0
    assert found.rollouts.gone > 0
    assert re.fullmatch(
        r"the stream ends with record \d+, and the ledger has rollouts up to \d+: the store is damaged", found.first
    )


def test_what_is_left_of_records_that_are_partly_purged_is_rebuilt(run):
    run = run()
    folder = train(run)

    async def purge(js):
        await js.purge_stream(STREAM, seq=4)

    alter(run, purge)
    found = replay(folder, goes_on=False)
    assert found.first is None
    assert found.first_sequence == 4
    assert found.rollouts.gone >= 1
    assert found.rollouts.equal + found.rollouts.gone == 13
    assert found.batches.gone >= 1
    assert found.batches.equal + found.batches.gone == 3


def test_rollouts_that_are_trained_twice_are_rebuilt_in_both_batches(run):
    run = run(replay={"max_reuse": 2}, run={"updates": 4}, schedule={"max_staleness": 8})
    folder = train(run, two_turns)
    run.server.kill()
    found = replay(folder, goes_on=False)
    assert found.first is None
    assert (found.batches.equal, found.batches.gone) == (4, 0)
    assert audit(folder, goes_on=False).wrong is None


def test_a_run_that_goes_on_is_not_replayed(tmp_path):
    with pytest.raises(ClawpipeError, match="the run goes on"):
        replay(tmp_path, goes_on=True)


def test_a_store_without_the_run_s_stream_is_an_error_that_says_so(run):
    run = run()
    folder = train(run)
    prefix = msgspec.structs.replace(run.config.nats, prefix="other")
    (folder / "config.json").write_bytes(configurations.dump(msgspec.structs.replace(run.config, nats=prefix)))
    run.server.kill()
    with pytest.raises(ClawpipeError, match="other-RECORDS"):
        replay(folder, goes_on=False)


def test_a_run_on_a_server_of_the_users_own_is_read_from_there(run):
    run = run()
    run.config = msgspec.structs.replace(run.config, nats=msgspec.structs.replace(run.config.nats, url=run.server.url))
    folder = train(run)
    found = replay(folder, goes_on=False)
    assert (found.batches.equal, found.first) == (3, None)
    assert json.loads(json.dumps(msgspec.to_builtins(found)))["rollouts"] == {"equal": 13, "different": 0, "gone": 0}


# Without a server -------------------------------------------------------------------------------------------


def books(scripts, *, leaf_cap=16, spoil=()):
    """What a run that read the scripts' records one after the other has in its ledger, and these records."""
    ledger, read = Ledger(), []
    assembler = make_assembler(configuration(), LeafCaps(leaf_cap))
    for script in scripts:
        records = [*script.records, script.manifest()]
        for record in records:
            read.append(entry(len(read) + 1, record))
            if getattr(record, "call_id", "") in spoil:
                read[-1] = entries.read(len(read), read[-1].subject, record.call_id, b"cut sho")
                rollout = assembler.spoil(record.rollout_id, record.call_id)
            else:
                rollout = assembler.add(record, 0.0).rollout
                if isinstance(record, CallRecord):
                    ledger.sampled(record, "g-000000")
        ledger.settled(rollout, "g-000000", rollout.dropped, len(read))
    changes = ledger.changes()
    calls = {row.rollout_id: [c for c in changes.calls if c.rollout_id == row.rollout_id] for row in changes.rows}
    return Stored(rows=changes.rows, batches=(), updates=(), standing=None), calls, read


def rebuilt(stored, calls, read, last=None, **tables):
    rebuilding = Rebuild(configuration(**tables), stored, lambda rollout_id: calls[rollout_id], keep=[].append)
    for each in read:
        rebuilding.take(each)
    return rebuilding.end(last or len(read))


def forked():
    """Two leaves that both count."""
    script = Script("r-000000-0")
    script.call([1], [2, 3])
    script.call([1, 2, 3, 4], [5])
    script.call([1, 2, 3, 6], [7])
    return script


def test_a_rollout_is_judged_by_the_leaf_cap_that_was_decided_in_the_run():
    stored, calls, read = books([forked()], leaf_cap=1)
    assert stored.rows[0].reason == "over_branched"
    found = rebuilt(stored, calls, read)
    assert (found.first, found.rollouts.equal) == (None, 1)
    forgotten = [msgspec.structs.replace(row, leaf_cap=0) for row in stored.rows]
    found = rebuilt(Stored(tuple(forgotten), (), (), None), calls, read)
    assert found.first == "rollout r-000000-0: 0 tokens were kept, 3 are when rebuilt"


def test_a_rollout_with_a_record_that_cannot_be_read_is_rebuilt_as_it_was():
    other = Script("r-000000-1")
    other.call([1], [2])
    stored, calls, read = books([forked(), other], spoil={"r-000000-0.a1.c1"})
    assert [row.reason for row in stored.rows] == ["malformed", ""]
    found = rebuilt(stored, calls, read)
    assert (found.records, found.first) == (6, None)
    assert (found.rollouts.equal, found.rollouts.gone) == (2, 0)
    assert (found.trees.equal, found.trees.gone) == (1, 0)


def test_records_of_rollouts_that_the_ledger_does_not_know_are_passed_over():
    stored, calls, read = books([forked()])
    stranger = Script("r-000009-0")
    stranger.call([1], [2])
    found = rebuilt(stored, calls, [*read, entry(5, stranger.records[0]), entry(6, stranger.manifest())])
    assert (found.records, found.rollouts.equal, found.first) == (6, 1, None)


def test_records_that_are_missing_in_the_middle_are_said():
    other = Script("r-000000-1")
    other.call([1], [2])
    stored, calls, read = books([forked(), other])
    found = rebuilt(stored, calls, [read[0], *read[3:]], last=6)
    assert (found.rollouts.equal, found.rollouts.gone) == (1, 1)
    assert found.first == "records 2 to 3 are missing, and only the oldest are ever purged"


def test_records_that_are_missing_at_the_end_are_said():
    stored, calls, read = books([forked()])
    found = rebuilt(stored, calls, read[:2], last=2)
    assert found.first == "the stream ends with record 2, and the ledger has rollouts up to 4: the store is damaged"
    assert rebuilt(stored, calls, [], last=4).first is None
