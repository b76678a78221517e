"""The frontend's search for a request that kills core, and what it mends after lost messages."""

import math
import random
from array import array

import pytest

from nvserve.frontend.journal import Entry, Journal, Standing
from nvserve.frontend.quarantine import Quarantine
from nvserve.frontend.resync import UNANSWERED_S, compare
from nvserve.protocol.messages import FinishReason
from nvserve.protocol.sampling import SamplingParams


def make_journal(count: int) -> Journal:
    journal = Journal()
    for number in range(count):
        journal.add(
            Entry(
                number, b"\1\0\0\0", SamplingParams(), seed=0, arrival=float(number), deadline=0.0
            )
        )
    return journal


@pytest.mark.parametrize("seed", range(20))
def test_the_poisonous_requests_fail_alone_and_everybody_else_goes_on(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(1, 40)
    poison = set(chance.sample(range(count), min(count, chance.randrange(1, 3))))
    journal, quarantine = make_journal(count), Quarantine()
    failed: set[int] = set()
    num_crashes = 0
    is_new_life = True
    while True:
        quarantine.open_trial(is_new_life=is_new_life)
        is_new_life = False
        held = [entry for entry in journal if quarantine.admits(entry)]
        if not held:
            break
        if poison & {entry.request_id for entry in held}:
            num_crashes += 1
            is_new_life = True
            condemned = quarantine.accuse(held)
            if condemned is not None:
                failed.add(condemned.request_id)
                journal.close(condemned.request_id)
                quarantine.absolve(journal)
            continue
        for entry in held:
            entry.emitted.extend([0] * 5)
        quarantine.absolve(journal)
        if not len(quarantine):
            break
    assert failed == poison
    assert num_crashes <= 2 + len(poison) * 2 * count.bit_length()


def test_a_trial_lasts_until_each_of_it_has_passed_the_crash_position() -> None:
    journal, quarantine = make_journal(4), Quarantine()
    entries = list(journal)
    quarantine.accuse(entries)
    quarantine.open_trial()
    on_trial = [entry for entry in entries if quarantine.admits(entry)]
    assert on_trial == entries[:2]
    on_trial[0].emitted.extend([1] * 4)
    assert not quarantine.absolve(journal)
    on_trial[1].emitted.extend([1] * 3)
    assert not quarantine.absolve(journal)
    on_trial[1].emitted.append(1)
    assert quarantine.absolve(journal)


def test_who_was_on_trial_with_one_that_left_was_not_alone() -> None:
    journal, quarantine = make_journal(4), Quarantine()
    quarantine.accuse(list(journal))
    quarantine.open_trial(is_new_life=True)
    innocent, guilty = (entry for entry in journal if quarantine.admits(entry))
    journal.close(guilty.request_id)  # core has crashed of it, but the next one is not ready yet
    quarantine.absolve(journal)
    assert quarantine.accuse([innocent]) is None
    quarantine.open_trial(is_new_life=True)
    assert [entry for entry in journal if quarantine.admits(entry)] == [innocent]
    assert quarantine.accuse([innocent]) is innocent  # now it was


def test_nor_is_one_whose_trial_began_in_a_life_that_had_seen_others() -> None:
    journal, quarantine = make_journal(2), Quarantine()
    guilty, innocent = journal
    quarantine.accuse([guilty, innocent])
    quarantine.open_trial(is_new_life=True)
    assert not quarantine.admits(innocent)
    journal.close(guilty.request_id)  # as before: its trial is over by that
    assert quarantine.absolve(journal)
    quarantine.open_trial()
    assert quarantine.admits(innocent)
    assert quarantine.accuse([innocent]) is None


@pytest.mark.parametrize("seed", range(40))
def test_whoever_leaves_nobody_else_is_condemned(seed: int) -> None:
    chance = random.Random(seed)
    journal, quarantine = make_journal(16), Quarantine()
    poison = set(chance.sample(list(journal), 4))
    failed: list[Entry] = []

    def leave(likelihood: float) -> None:
        remaining = poison & set(journal)
        if remaining and chance.random() < likelihood:
            journal.close(chance.choice(sorted(remaining, key=_id)).request_id)
            if quarantine.absolve(journal):
                quarantine.open_trial()

    def live() -> set[Entry]:
        """A life of core up to its crash: all that it held; nothing when it goes on."""
        held: set[Entry] = set()
        quarantine.open_trial(is_new_life=True)
        while poison & set(journal):
            held |= {entry for entry in journal if quarantine.admits(entry)}
            if held & poison:
                return held
            for entry in chance.sample(sorted(held, key=_id), len(held) // 2):
                entry.emitted.extend([0] * 5)
                if chance.random() < 0.3:
                    journal.close(entry.request_id)
            leave(0.1)
            if quarantine.absolve(journal):
                quarantine.open_trial()
        return set()

    for _ in range(40):
        held = live()
        if not held:
            break
        leave(0.3)  # core is dead, and nobody knows yet: one more may be sent to it
        held |= {entry for entry in journal if quarantine.admits(entry)}
        condemned = quarantine.accuse(sorted(held & set(journal), key=_id))
        if condemned is not None:
            failed.append(condemned)
            journal.close(condemned.request_id)
            quarantine.absolve(journal)
    assert not poison & set(journal), "the search has no end"
    assert set(failed) <= poison


def _id(entry: Entry) -> int:
    return entry.request_id


def test_new_requests_wait_while_suspects_are_on_trial() -> None:
    journal, quarantine = make_journal(2), Quarantine()
    quarantine.accuse(list(journal))
    quarantine.open_trial()
    newcomer = Entry(9, b"", SamplingParams(), seed=0, arrival=9.0, deadline=0.0)
    assert not quarantine.admits(newcomer)


def test_what_core_no_longer_holds_was_lost_and_what_only_it_holds_is_an_orphan() -> None:
    journal = make_journal(3)
    for entry in journal:
        entry.standing = Standing.SENT
        journal.accept(entry.request_id)
    found = compare(journal, [0, 1, 7], 1_000.0)
    assert [entry.request_id for entry in found.lost] == [2]
    assert found.orphans == [7]
    assert not found.unsent
    assert not found.accepted


def test_an_unanswered_submit_is_sent_again_only_after_a_while() -> None:
    journal = make_journal(2)
    for entry in journal:
        entry.standing, entry.sent_s = Standing.SENT, 1_000.0
    early = compare(journal, [1], 1_000.0 + UNANSWERED_S)
    assert not early.unsent
    assert not early.accepted
    late = compare(journal, [1], 1_001.0 + UNANSWERED_S)
    assert [entry.request_id for entry in late.unsent] == [0]
    assert late.accepted == [1]


def test_a_submit_that_core_has_and_cannot_answer_yet_is_not_sent_again() -> None:
    """Its grammar is being compiled, or no epoch has begun."""
    journal = make_journal(2)
    for entry in journal:
        entry.standing, entry.sent_s = Standing.SENT, 1_000.0
    found = compare(journal, [], 1_001.0 + UNANSWERED_S, unanswered_ids=[0, 7])
    assert [entry.request_id for entry in found.unsent] == [1]
    assert not found.accepted
    assert found.orphans == [7]


def test_a_submit_that_waited_for_room_counts_as_sent_when_the_last_one_was() -> None:
    journal = make_journal(1)
    for entry in journal:
        entry.standing, entry.sent_s = Standing.SENT, 1_000.0
    for settled_s, is_lost in ((math.inf, False), (1_006.0, False), (1_004.0, True)):
        found = compare(journal, [], 1_005.0 + UNANSWERED_S, settled_s=settled_s)
        assert bool(found.unsent) is is_lost


def test_a_finished_request_is_not_missed() -> None:
    journal = make_journal(1)
    [entry] = journal
    entry.standing = Standing.SENT
    journal.accept(0)
    journal.append(0, 0, array("i", [5]), FinishReason.STOP)
    assert not compare(journal, [], 1_000.0).lost
