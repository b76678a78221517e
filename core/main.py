"""The core process: sockets around the Scheduler.

All I/O and the clock of core are here, and no decision about requests.
"""

import logging
import os
import sys
import time
from typing import Final, NoReturn

import msgspec
import zmq

from nvserve.core.compile_queue import CompileQueue
from nvserve.core.errors import EpochFault, RequestRefused
from nvserve.core.grammar_loader import GrammarLoader
from nvserve.core.limits import Limits
from nvserve.core.links import FrontendLink, WorkerLinks
from nvserve.core.replies import Replies
from nvserve.core.scheduler import Scheduler
from nvserve.core.stats import core_stats
from nvserve.protocol.child import Child, bootstrap, freeze_start
from nvserve.protocol.control import (
    Condition,
    Drain,
    EpochBroken,
    EpochReady,
    Exit,
    Held,
    Hold,
    Peers,
    Ready,
    Searching,
    Setup,
    StartEpoch,
    shorten,
)
from nvserve.protocol.messages import Abort, CoreStats, Finish, FinishReason, Submit
from nvserve.protocol.progress import Phase

logger = logging.getLogger(__name__)

IDLE_MS: Final = 250  # the longest wait for messages; keeps the page beating and deadlines close
RETRY_MS: Final = 10  # the same while the frontend does not take what it must get
STATS_MIN_S: Final = 0.25  # between two CoreStats while something changes
STATS_MAX_S: Final = 1.0  # between two CoreStats at all
FAULT: Final = 1  # exit status


class Core:
    """The loop; one instance a process."""

    def __init__(self, child: Child) -> None:
        setup = child.setup
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._child: Final = child
        self._life: Final = setup.life
        self._replies: Final = Replies(setup.life)
        self._scheduler: Final = Scheduler(
            Limits.of(setup.config), self._replies, hash_key=os.urandom(32)
        )
        self._frontend: Final = FrontendLink(context, setup.launch_dir, setup.life)
        self._workers: Final = WorkerLinks(context, setup.launch_dir, setup.life)
        self._grammars: Final = GrammarLoader(setup.config)
        if setup.life == 0:  # later ones have requests that wait
            child.page.beat(Phase.LOADING)
            self._grammars.load()
        self._compiling: Final = CompileQueue(self._grammars.compile)
        self._epoch_to_announce = -1  # EpochReady is due when its workers are connected
        self._is_held = False  # no step is planned until the next epoch
        self._owes_held = False
        self._was_searching = False  # what the launcher was told last
        self._poller = zmq.Poller()
        self._watch()
        self._last_stats: CoreStats | None = None
        self._last_stats_s = 0.0  # monotonic

    def run(self) -> None:
        """Serve until the launcher says Exit."""
        self._child.send(Ready())
        while True:
            is_busy = bool(self._scheduler.requests)
            self._child.page.beat(Phase.SERVING if is_busy else Phase.WAITING)
            self._poller.poll(RETRY_MS if len(self._replies) else IDLE_MS)
            if self._read_control():
                return
            now = time.time()
            self._read_frontend()
            uncompiled = self._compiling.pop_passed(now)
            self._read_compiled()
            self._read_workers(now)
            self._scheduler.expire(now, uncompiled)
            self._tell_search()
            self._send_steps()
            self._replies.flush(self._frontend.send)
            self._send_stats(now)
            if self._workers.is_connected:
                is_busy = bool(self._scheduler.requests)
                self._grammars.load_soon(time.monotonic(), is_busy=is_busy)

    # -- in

    def _read_control(self) -> bool:
        """Obey the launcher; True when it says Exit."""
        while (message := self._child.receive()) is not None:
            match message:
                case Exit():
                    return True
                case Peers():
                    self._meet_frontend(message)
                case StartEpoch():
                    self._start_epoch(message)
                case Hold():
                    self._is_held = self._owes_held = True
                case Setup() | Condition() | Drain():
                    logger.error("%s is not for core", type(message).__name__)
        return False

    def _meet_frontend(self, peers: Peers) -> None:
        if peers.core_life != self._life or peers.frontend_life <= self._frontend.life:
            return  # meant for another life
        self._scheduler.drop_frontend()
        self._compiling.clear()
        self._replies.restart(peers.frontend_life)
        self._frontend.connect(peers.frontend_life)
        self._last_stats = None
        self._watch()

    def _start_epoch(self, start: StartEpoch) -> None:
        if start.epoch <= self._workers.epoch:
            return
        self._workers.connect(start.epoch, start.tp_size)
        self._watch()
        self._is_held = False
        self._scheduler.start_epoch(
            epoch=start.epoch,
            tp_size=start.tp_size,
            num_kv_blocks=start.num_kv_blocks,
            is_blamed=start.is_blamed,
        )
        self._epoch_to_announce = start.epoch
        self._child.page.epoch, self._child.page.step = start.epoch, -1
        logger.info("epoch %s with %s KV blocks", start.epoch, start.num_kv_blocks)

    def _read_frontend(self) -> None:
        for message in self._frontend.receive():
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    self._end(message.request_ids, FinishReason.ABORT)
                case Finish():
                    self._end(message.request_ids, FinishReason.STOP)

    def _submit(self, submit: Submit) -> None:
        """Hand it to the scheduler; with a grammar it goes to the compiler first."""
        num_compiling = len(self._compiling)
        if submit.request_id in self._compiling or self._scheduler.holds(submit.request_id):
            self._scheduler.counters.dropped += 1
        elif not submit.sampling.grammar:
            self._scheduler.submit(submit, num_compiling=num_compiling)
        else:
            try:
                self._scheduler.check_load(submit, num_compiling)
            except RequestRefused as refusal:
                self._scheduler.refuse(submit.request_id, refusal)
            else:
                self._compiling.add(submit, time.monotonic())

    def _end(self, request_ids: list[int], reason: FinishReason) -> None:
        """One whose grammar is being compiled is not accepted yet, so nobody waits for a word."""
        for request_id in request_ids:
            if request_id in self._compiling:
                self._compiling.drop(request_id)
            else:
                self._scheduler.end([request_id], reason)

    def _read_compiled(self) -> None:
        if self._compiling.is_idle:
            return
        for submit, result in self._compiling.take(time.monotonic()):
            if isinstance(result, RequestRefused):
                self._scheduler.refuse(submit.request_id, result)
            else:
                self._scheduler.submit(submit, result)

    def _read_workers(self, now: float) -> None:
        for message in self._workers.receive():
            broken = self._scheduler.report(message, now)
            if broken is not None:
                self._tell_broken(broken)
        if self._epoch_to_announce >= 0 and self._workers.is_connected:
            self._child.send(EpochReady(self._epoch_to_announce))
            self._epoch_to_announce = -1

    # -- out

    def _send_steps(self) -> None:
        """Plan until enough steps are in flight."""
        if not self._workers.is_connected:
            return
        if self._is_held:
            if self._owes_held and self._scheduler.is_idle:
                self._owes_held = False
                self._child.send(Held())
            return
        while (step := self._scheduler.plan()) is not None:
            self._child.page.step = step.step
            rank = self._workers.send(step)
            if rank is not None:
                fault = EpochFault(rank, step.step, f"rank {rank} takes no steps", is_blamed=False)
                self._tell_broken(self._scheduler.fail_epoch(fault))

    def _tell_search(self) -> None:
        """Deaths while requests are on trial are part of the search, which the launcher must know.

        Told before any step of the trial is sent.
        """
        num_suspects = len(self._scheduler.suspects)
        if bool(num_suspects) != self._was_searching:
            self._was_searching = bool(num_suspects)
            if num_suspects:
                logger.warning("%d requests are suspected of a crash", num_suspects)
            self._child.send(Searching(num_suspects))

    def _tell_broken(self, broken: EpochBroken) -> None:
        logger.error("epoch %s broke in step %s: %s", broken.epoch, broken.step, broken.reason)
        self._child.send(msgspec.structs.replace(broken, reason=shorten(broken.reason)))

    def _send_stats(self, now: float) -> None:
        """CoreStats, at once when something changed a while after the last, else once a second."""
        age_s = time.monotonic() - self._last_stats_s
        if age_s < STATS_MIN_S or len(self._replies) or not self._frontend.is_connected:
            return
        stats = core_stats(
            self._scheduler,
            core_life=self._life,
            frontend_life=self._frontend.life,
            epoch=self._workers.epoch,
            now=now,
            num_dropped_frames=self._frontend.num_dropped + self._workers.num_dropped,
            compiling_ids=self._compiling.request_ids,
            are_ids_told=self._frontend.is_drained,  # else what is unread would look lost
        )
        if age_s < STATS_MAX_S and _is_same(stats, self._last_stats):
            return
        if self._frontend.send(stats):
            self._last_stats = stats
            self._last_stats_s = time.monotonic()

    def _watch(self) -> None:
        """Poll the sockets of the present lives."""
        self._poller = zmq.Poller()
        self._poller.register(self._child.control.fileno(), zmq.POLLIN)
        self._poller.register(self._compiling.fileno(), zmq.POLLIN)
        for inbox in (self._frontend.inbox, self._workers.inbox):
            if inbox is not None:
                self._poller.register(inbox.socket, zmq.POLLIN)


def _is_same(stats: CoreStats, other: CoreStats | None) -> bool:
    """Do two snapshots differ in their time only?"""
    if other is None:
        return False
    fields = (name for name in stats.__struct_fields__ if name != "time")
    return all(getattr(stats, name) == getattr(other, name) for name in fields)


def main(argv: list[str]) -> NoReturn:
    """Serve, and end the process at once: no thread that compiles a grammar holds it up."""
    core = Core(bootstrap(argv))
    freeze_start()
    try:
        core.run()
    except Exception:
        logger.critical("core ends with a fault of its own", exc_info=True)
        os._exit(FAULT)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)
