"""What must hold for every set of records, in whatever order they come. `make test-deep` tries 2,000 of each."""

from __future__ import annotations

from collections import Counter

from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from pipeline_scripts import common, entry
from random_rollouts import damaged, rollouts

from clawpipe.pipeline import entries
from clawpipe.pipeline.assembler import Arrival, Assembler
from clawpipe.pipeline.closing import close, num_sampled
from clawpipe.pipeline.leaf_caps import LeafCaps
from clawpipe.pipeline.records import CallRecord, Role, encode
from clawpipe.pipeline.segments import DropReason
from clawpipe.pipeline.tree import build, resolve


def joiner(auxiliary, *group):
    caps = {rollout.manifest.rollout_id: rollout.leaf_cap for rollout in group}
    return Assembler(close_timeout_s=10.0, leaf_caps=LeafCaps(1000, caps), auxiliary=auxiliary)


def expected(rollout, auxiliary):
    return close(rollout.manifest, rollout.calls, rollout.leaf_cap, auxiliary=auxiliary)


def content(rollout):
    """All of a closed rollout but the fates of single calls."""
    parts = [
        (
            part.role,
            [(b.tokens.tolist(), b.entries.tolist(), b.logprobs.tolist(), b.versions.tolist()) for b in part.branches],
        )
        for part in rollout.parts
    ]
    why = rollout.dropped, rollout.detail, rollout.num_leaves, rollout.leaf_cap
    return rollout.manifest, parts, why, rollout.tree_digest, rollout.orphans


def fates(rollout):
    return {fate.call_id: fate for fate in rollout.fates}


def assert_same(found, wanted, late=()):
    """Equal, but for calls that came after the end."""
    assert content(found) == content(wanted)
    assert fates(found) == {call_id: fate for call_id, fate in fates(wanted).items() if call_id not in late}


several = st.tuples(rollouts(0, max_calls=6), rollouts(1, max_calls=4))


@given(several, st.booleans(), st.randoms(use_true_random=False))
def test_any_order_duplication_and_interleaving_gives_the_identical_rollouts(group, auxiliary, random):
    records = [record for rollout in group for record in rollout.records]
    records += random.choices(records, k=random.randrange(4))
    random.shuffle(records)
    joining, closed, late = joiner(auxiliary, *group), {}, set()
    for record in records:
        verdict = joining.add(record, 0.0)
        if verdict.arrival is Arrival.LATE:
            late.add(record.call_id)
        if verdict.rollout:
            assert closed.setdefault(verdict.rollout.rollout_id, verdict.rollout) is verdict.rollout
    for rollout in group:
        assert_same(closed.pop(rollout.manifest.rollout_id), expected(rollout, auxiliary), late)
    assert not closed
    assert late <= {r.call_id for rollout in group for r in rollout.calls} - {
        listed.call_id for rollout in group for listed in rollout.manifest.calls
    }


@given(rollouts(), st.randoms(use_true_random=False))
def test_any_order_and_duplication_gives_the_identical_tree(rollout, random):
    records = rollout.script.records
    arrived = [*records, *random.choices(records, k=3)]
    random.shuffle(arrived)
    tree, again = build(resolve(records)), build(resolve(arrived))
    assert [t.tolist() for t in again.tokens] == [t.tolist() for t in tree.tokens]
    assert again.parent.tolist() == tree.parent.tolist()
    assert again.end.tolist() == tree.end.tolist()
    assert again.addresses() == tree.addresses()
    assert again.digest() == tree.digest()


def samples(script):
    """Number of a sample -> (call, context that the engine saw, token, version, role), from the script alone."""
    found = []
    for record in script.records:
        prompt, completion = script.texts[record.call_id]
        for k, token in enumerate(completion):
            found.append((record.call_id, prompt + completion[:k], token, record.versions[0].version, record.role))
    return found


def kept(parts):
    """(role, number of the sample, its position, the branch) of every entry."""
    for part in parts:
        for branch in part.branches:
            for at, logprob, version in zip(branch.entries, branch.logprobs, branch.versions, strict=True):
                yield part.role, round(-1024 * float(logprob)) - 1, branch.tokens[: at + 1].tolist(), int(version)


@given(rollouts(max_calls=12), st.booleans())
def test_flattening_the_kept_branches_gives_each_calls_exact_context(rollout, auxiliary):
    known = samples(rollout.script)
    for role, number, path, version in kept(expected(rollout, auxiliary).parts):
        _, context, token, sampled_by, of_role = known[number]
        assert (path, version, role) == ([*context, token], sampled_by, of_role)


@given(rollouts(max_calls=12), st.booleans())
def test_every_sampled_token_is_kept_once_or_dropped_for_one_reason(rollout, auxiliary):
    closed = expected(rollout, auxiliary)
    known = samples(rollout.script)
    numbers = [number for _, number, _, _ in kept(closed.parts)]
    assert len(set(numbers)) == len(numbers)
    by_call = Counter(known[number][0] for number in numbers)
    assert sorted(f.call_id for f in closed.fates) == sorted(record.call_id for record in rollout.calls)
    for record in rollout.calls:
        fate = fates(closed)[record.call_id]
        assert (fate.sampled, fate.role) == (num_sampled(record), record.role)
        assert fate.kept == by_call[record.call_id]
        assert fate.sampled == fate.kept + sum(fate.dropped.values())
        assert all(tokens > 0 for tokens in fate.dropped.values())
    roles = (Role.MAIN, Role.SUBAGENT, Role.COMPACTION) if auxiliary else (Role.MAIN,)
    assert {part.role for part in closed.parts} <= set(roles)


@given(rollouts(max_calls=12))
def test_training_auxiliary_calls_takes_nothing_from_the_main_conversation(rollout):
    without, together = expected(rollout, False), expected(rollout, True)
    assert [b.entries.tolist() for b in together.branches] == [b.entries.tolist() for b in without.branches]
    assert [b.logprobs.tolist() for b in together.branches] == [b.logprobs.tolist() for b in without.branches]
    assert together.tree_digest == without.tree_digest
    assert together.num_leaves == without.num_leaves


@given(rollouts(0, max_calls=5), rollouts(1, max_calls=5), st.data(), st.randoms(use_true_random=False))
def test_damage_never_raises_and_never_changes_another_rollout(victim, other, data, random):
    records = [*victim.records, *other.records]
    for record in data.draw(st.lists(st.sampled_from(victim.records), min_size=1, max_size=3)):
        records.append(data.draw(damaged(record)))
        if data.draw(st.booleans()) and record in records:
            records.remove(record)  # the damaged copy is the only one
    random.shuffle(records)
    auxiliary = data.draw(st.booleans())
    joining, closed, late, came = joiner(auxiliary, victim, other), [], set(), Counter()
    for record in records:
        verdict = joining.add(record, 0.0)
        closed += [verdict.rollout] if verdict.rollout else []
        assert bool(verdict.detail) == (verdict.arrival in (Arrival.UNSOUND, Arrival.CONFLICTING))
        if isinstance(record, CallRecord) and verdict.arrival is Arrival.NEW:
            came[record.rollout_id] += num_sampled(record)
        if verdict.arrival is Arrival.LATE:
            late.add(record.call_id)
    closed += joining.expire(11.0)
    found = {rollout.rollout_id: rollout for rollout in closed}
    assert len(found) == len(closed)
    assert_same(found[other.manifest.rollout_id], expected(other, auxiliary), late)
    for rollout in closed:
        assert sum(fate.sampled for fate in rollout.fates) == came[rollout.rollout_id]
        assert sum(f.kept for f in rollout.fates) == rollout.num_kept


@given(rollouts(0, max_calls=5), st.data())
def test_a_message_that_is_cut_short_or_altered_is_read_or_set_aside_and_never_raises(rollout, data):
    joining, closed = joiner(False, rollout), []
    for number, record in enumerate(rollout.records):
        message = entry(number, record)
        body = bytearray(encode(record))
        if data.draw(st.booleans()):
            del body[data.draw(st.integers(0, len(body))) :]
        elif data.draw(st.booleans()):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        read = entries.read(number, message.subject, message.message_id, bytes(body))
        if read.record is None:
            closed.append(joining.spoil(read.rollout_id, read.message_id))
        else:
            closed.append(joining.add(read.record, 0.0).rollout)
    closed += joining.expire(11.0)
    assert sum(rollout is not None for rollout in closed) <= 1


@given(rollouts(max_calls=5), st.data(), st.booleans(), st.randoms(use_true_random=False))
def test_what_is_set_aside_before_the_end_gives_the_same_rollout_in_any_order(rollout, data, auxiliary, random):
    bad = [data.draw(damaged(record)) for record in data.draw(st.lists(st.sampled_from(rollout.calls), max_size=3))]
    unreadable = data.draw(st.lists(st.sampled_from([record.call_id for record in rollout.calls]), max_size=1))

    def joined(order):
        joining = joiner(auxiliary, rollout)
        for record in order:
            if isinstance(record, str):
                assert joining.spoil(rollout.manifest.rollout_id, record) is None
            else:
                assert joining.add(record, 0.0).rollout is None
        closed = joining.add(rollout.manifest, 0.0).rollout or joining.expire(11.0)[0]
        return content(closed), {call_id: fate.dropped.keys() for call_id, fate in fates(closed).items()}

    arrived = [*rollout.calls, *bad, *unreadable]
    shuffled = random.sample(arrived, k=len(arrived))
    first, again = joined(arrived), joined(shuffled)
    assert first[0] == again[0]
    assert first[1].keys() == again[1].keys()


OTHERS = Role.SUBAGENT, Role.COMPACTION
CASES = {"delta against nothing", "delta against the wrong call", "another role sampled what main trains"}
REACHED = {
    DropReason.CUT,
    DropReason.UNDELIVERED,
    DropReason.DEAD_LEAF,
    DropReason.NOT_ADOPTED,
    DropReason.DUPLICATE,
    DropReason.OVER_BRANCHED,
    DropReason.AUXILIARY_SUBAGENT,
    DropReason.AUXILIARY_COMPACTION,
    DropReason.AUXILIARY_TITLE,
    DropReason.AUXILIARY_NUDGE,
    DropReason.AUXILIARY_MEMORY,
    DropReason.LOST_ATTEMPT,
    DropReason.UNLISTED,
    DropReason.INFRA,
}


def features(rollout):
    """What is in a rollout that the properties are meant for."""
    closed = expected(rollout, True)
    for fate in (*closed.fates, *expected(rollout, False).fates):
        yield from fate.dropped
    for part in closed.parts:
        yield part.role, "one branch" if len(part.branches) == 1 else "several branches"
    main = {tuple(path) for role, _, path, _ in kept(closed.parts) if role is Role.MAIN}
    if any((*context, token) in main for _, context, token, _, role in samples(rollout.script) if role in OTHERS):
        yield "another role sampled what main trains"
    for number, record in enumerate(rollout.script.records):
        prompt, _ = rollout.script.texts[record.call_id]
        earlier = [rollout.script.whole(other.call_id) for other in rollout.script.records[:number]]
        best = max((common(whole, prompt) for whole in earlier), default=0)
        if record.parent_tokens < best:
            yield "delta against nothing" if record.parent is None else "delta against the wrong call"


def test_the_random_rollouts_reach_every_case_that_the_properties_are_meant_for():
    found = Counter()

    @seed(4)
    @settings(max_examples=400, database=None, phases=[Phase.generate])
    @given(rollouts(max_calls=12))
    def collect(rollout):
        found.update(set(features(rollout)))

    collect()
    parts = {(role, number) for role in (Role.MAIN, *OTHERS) for number in ("one branch", "several branches")}
    wanted = REACHED | parts | CASES
    assert {case: found[case] for case in wanted if not found[case]} == {}
