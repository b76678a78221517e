"""Faults of workers and of core: nothing is lost, repeated or believed."""

import zlib

import pytest
from model_check.cases import assert_all_as_expected, first_tokens, make_world
from model_check.world import World

from nvserve.core.request import Phase
from nvserve.protocol.messages import (
    FinishReason,
    Gap,
    ModelOutput,
    StepDone,
    StepFailed,
    pack_ids,
)

# -- epochs


def test_a_new_epoch_goes_on_from_the_tokens_with_nothing_repeated() -> None:
    world = make_world(tp_size=2)
    ids = [world.submit([k] * 9, max_tokens=20, ignore_eos=True) for k in range(6)]
    for _ in range(5):
        world.send()
        world.send()
        world.work()
        world.deliver(0)
        world.deliver(1)
    world.start_epoch()
    assert world.num_in_phase(Phase.RUNNING) == 0
    output = world.scheduler.plan()
    assert output is not None
    assert (output.epoch, output.step) == (1, 0)
    world.sent.append(output)
    world.run()
    assert_all_as_expected(world, ids)
    assert world.scheduler.counters.recovered > 0


def test_reports_of_an_older_epoch_are_dropped_and_counted() -> None:
    world = make_world()
    world.submit([2, 3], max_tokens=9, ignore_eos=True)
    world.send()
    world.work()
    late = world.reports[0][0]
    world.start_epoch()
    assert world.scheduler.report(late, world.now) is None
    assert world.scheduler.counters.dropped == 1
    world.run()


def test_a_replay_continues_after_the_tokens_its_client_has() -> None:
    world = make_world()
    ids = [world.submit([k] * 9, max_tokens=20, ignore_eos=True) for k in range(6)]
    for _ in range(7):
        world.step()
    arrivals = [world.request(k).order for k in ids if k in world.scheduler.requests]
    world.restart_core()
    assert [request.order for request in world.scheduler.requests.values()] == arrivals
    world.run()  # the journal asserts that every emit starts at its own length
    assert_all_as_expected(world, ids)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_replay_that_is_complete_finishes_at_once(is_stopped: bool) -> None:
    tokens = first_tokens(6)
    world = make_world()
    stop = {"stop_token_ids": [tokens[5]], "max_tokens": 30} if is_stopped else {"max_tokens": 6}
    request_id = world.submit([5], ignore_eos=True, **stop)
    while world.entry(request_id).emitted != tokens[:5]:
        world.step()
    world.entry(request_id).emitted.append(tokens[5])
    world.restart_core()
    expected = FinishReason.STOP if is_stopped else FinishReason.LENGTH
    assert world.outcome(request_id) == (tokens, expected)
    assert world.scheduler.plan() is None


# -- answers no correct worker gives


def ready_output(world: World) -> ModelOutput:
    """The right answer to step 0, of one row, not delivered yet."""
    world.submit([2, 3], max_tokens=9, ignore_eos=True)
    world.send()
    world.work()
    output = world.reports[0].popleft()
    assert isinstance(output, ModelOutput)
    return output


def answer(tokens: list[int], *, step: int = 0, checksum: int | None = None) -> ModelOutput:
    column = pack_ids(tokens)
    return ModelOutput(
        0, step, column, checksum=zlib.crc32(column) if checksum is None else checksum
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (answer([5], checksum=1), "checksum"),
        (answer([]), "0 ids for 1 rows"),
        (answer([5, 6]), "2 ids for 1 rows"),
        (answer([97]), "97"),
        (answer([-1]), "-1"),
        (answer([5], step=1), "step 1 where 0 is due"),
        (StepDone(0, 0, 0, 5), "no such rank"),
        (StepDone(0, 0, 7, 5), "no such rank"),
        (StepFailed(0, 0, 1, "CUDA error"), "CUDA error"),
        (Gap(0, 5, 0, 1), "expected 0"),
    ],
)
def test_an_impossible_answer_breaks_the_epoch_and_loses_nobody(
    wrong: ModelOutput | StepDone | StepFailed | Gap, words: str
) -> None:
    world = make_world(tp_size=2)
    ready_output(world)
    broken = world.scheduler.report(wrong, world.now)
    assert broken is not None
    assert words in broken.reason
    assert broken.epoch == 0
    assert broken.suspects == [1]
    assert world.scheduler.plan() is None
    world.start_epoch()
    world.run()
    assert_all_as_expected(world, [1])


def test_ranks_that_sampled_other_ids_break_the_epoch() -> None:
    world = make_world(tp_size=2)
    output = ready_output(world)
    assert world.scheduler.report(output, world.now) is None
    broken = world.scheduler.report(StepDone(0, 0, 1, output.checksum + 1), world.now)
    assert broken is not None
    assert broken.rank == 1
    assert world.scheduler.requests[1].num_output == 0  # nothing of the step was taken


@pytest.mark.parametrize("odd", [1, 2, 3])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]])
def test_the_rank_that_sampled_otherwise_is_at_fault_whoever_reports_first(
    odd: int, order: list[int]
) -> None:
    world = make_world(tp_size=4)
    output = ready_output(world)
    reports = {
        rank: StepDone(0, 0, rank, output.checksum + (rank == odd)) if rank else output
        for rank in range(4)
    }
    told = [world.scheduler.report(reports[rank], world.now) for rank in order]
    assert told[:-1] == [None] * 3
    assert told[-1] is not None
    assert told[-1].rank == odd


def test_a_repeated_report_is_dropped_and_counted() -> None:
    world = make_world()
    output = ready_output(world)
    world.scheduler.report(output, world.now)
    assert world.scheduler.report(output, world.now) is None
    assert world.scheduler.counters.dropped == 1
    assert world.scheduler.requests[1].num_output == 1


def test_without_an_epoch_core_accepts_aborts_and_emits() -> None:
    world = make_world()
    ready_output(world)
    world.scheduler.report(StepFailed(0, 0, 0, "x"), world.now)
    second = world.submit([4, 5], max_tokens=3, ignore_eos=True)
    world.end(1, FinishReason.ABORT)
    assert world.outcome(1) == ([], FinishReason.ABORT)
    world.start_epoch()
    world.run()
    assert_all_as_expected(world, [second])
