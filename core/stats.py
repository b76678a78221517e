"""The CoreStats snapshot of a scheduler."""

from collections.abc import Sequence

from nvserve.core.scheduler import Scheduler
from nvserve.protocol.messages import CoreStats


def core_stats(
    scheduler: Scheduler,
    *,
    core_life: int,
    frontend_life: int,
    epoch: int,
    now: float,
    num_dropped_frames: int,
    compiling_ids: Sequence[int] = (),
    are_ids_told: bool = True,
) -> CoreStats:
    """Counters and gauges now; at every moment accepted = finished + running + waiting.

    `are_ids_told`: with the ids of requests, to be compared with those of the frontend.
    """
    counters, batch, ledger = scheduler.counters, scheduler.batch, scheduler.ledger
    tables = batch.tables if batch is not None else None
    live = tables if ledger is not None else None  # else its counts are in the totals already
    return CoreStats(
        core_life,
        frontend_life,
        epoch,
        step=ledger.num_opened - 1 if ledger is not None else -1,
        time=now,
        last_step_time=scheduler.last_step_time,
        num_running=len(batch) if batch is not None else 0,
        num_waiting=len(scheduler.waiting),
        num_blocks=tables.pool.num_usable if tables is not None else 0,
        num_free_blocks=tables.pool.num_free if tables is not None else 0,
        accepted_total=counters.accepted,
        finished_totals=list(counters.finished),
        refused_total=counters.refused,
        preempted_total=counters.preempted,
        prompt_tokens_total=counters.prompt_tokens,
        generated_tokens_total=counters.generated_tokens,
        prefix_queries_total=counters.looked_up_tokens
        + (live.num_looked_up_tokens if live is not None else 0),
        prefix_hits_total=counters.hit_tokens + (live.num_hit_tokens if live is not None else 0),
        dropped_total=counters.dropped + num_dropped_frames,
        recovered_total=counters.recovered,
        request_ids=list(scheduler.requests) if are_ids_told else None,
        unanswered_ids=[*compiling_ids, *scheduler.held_ids] if are_ids_told else None,
    )
