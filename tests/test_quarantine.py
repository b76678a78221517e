"""The frontend's search for a request that kills core, and what it mends after lost messages."""

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
    while True:
        quarantine.open_trial()
        held = [entry for entry in journal if quarantine.admits(entry)]
        if not held:
            break
        if poison & {entry.request_id for entry in held}:
            num_crashes += 1
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


def test_a_finished_request_is_not_missed() -> None:
    journal = make_journal(1)
    [entry] = journal
    entry.standing = Standing.SENT
    journal.accept(0)
    journal.append(0, 0, array("i", [5]), FinishReason.STOP)
    assert not compare(journal, [], 1_000.0).lost
