"""A simulated frontend: the real journal, quarantine and comparison, with clients that count."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.clock import Process

from nvserve.frontend.journal import Entry, Gap, Journal, Standing
from nvserve.frontend.quarantine import Quarantine
from nvserve.frontend.resync import compare
from nvserve.protocol.control import Peers, Searching
from nvserve.protocol.messages import (
    Abort,
    Accepted,
    CoreStats,
    Emits,
    FinishReason,
    Hello,
    Refused,
    Strikes,
    make_request_id,
    unpack_ids,
)
from nvserve.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from simulation.cluster import Cluster


@dataclass(eq=False)
class Client:
    """One request as its owner sees it."""

    prompt: list[int]
    sampling: SamplingParams
    seed: int
    ids: list[int] = field(default_factory=list)
    finishes: list[FinishReason] = field(default_factory=list)
    is_broken: bool = False  # its frontend died
    is_refused: bool = False

    @property
    def is_open(self) -> bool:
        return not (self.finishes or self.is_broken or self.is_refused)


@dataclass(eq=False)
class Frontend(Process):
    """One life of the frontend."""

    cluster: "Cluster" = None  # type: ignore[assignment]  # dataclass fields with defaults precede
    tell: Callable[[Any], None] = print  # to the launcher
    life: int = 0
    core_life: int = -1
    is_connected: bool = False
    num_gaps: int = 0
    counter: int = 0
    journal: Journal = field(default_factory=Journal)
    quarantine: Quarantine = field(default_factory=Quarantine)
    clients: dict[Entry, Client] = field(default_factory=dict)

    def submit(self, client: Client) -> None:
        entry = Entry(
            self.next_id(),
            b"".join(token.to_bytes(4, "little") for token in client.prompt),
            client.sampling,
            client.seed,
            arrival=self.clock.now,
            deadline=0.0,
        )
        self.journal.add(entry)
        self.clients[entry] = client
        if self.is_connected and self.quarantine.admits(entry):
            self.send_submit(entry)

    def next_id(self) -> int:
        self.counter += 1
        return make_request_id(self.life, self.counter)

    def send(self, message: Any) -> None:
        self.cluster.pipe("up", self.life, self.core_life).send(message)

    def send_submit(self, entry: Entry) -> None:
        entry.standing, entry.sent_s = Standing.SENT, self.clock.now
        self.send(entry.submit(self.life, self.core_life))

    def meet(self, peers: Peers) -> None:
        if peers.frontend_life != self.life or peers.core_life == self.core_life:
            return
        held = [entry for entry in self.journal if entry.standing is not Standing.QUEUED]
        self.cluster.pipe("down", self.life, self.core_life).close()
        self.journal.requeue_all()
        self.is_connected = False
        if peers.is_blamed:
            condemned = self.quarantine.accuse(held)
            self.tell(Searching(len(self.quarantine)))
            if condemned is not None:
                self.journal.close(condemned.request_id)
                self.clients[condemned].finishes.append(FinishReason.ENGINE_FAULT)
                self.review()
        self.core_life = peers.core_life
        self.cluster.pipe("down", self.life, self.core_life).bind(self, self.hear)
        self.send(Hello(self.life))

    def review(self) -> None:
        if not len(self.quarantine) or not self.quarantine.absolve(self.journal):
            return
        self.quarantine.open_trial()
        if not len(self.quarantine):
            self.tell(Searching(0))
        self.send_admitted()

    def send_admitted(self) -> None:
        if self.is_connected:
            for entry in self.journal:
                if entry.standing is Standing.QUEUED and self.quarantine.admits(entry):
                    self.send_submit(entry)

    def hear(self, message: Any) -> None:
        match message:
            case Hello():
                self.is_connected = True
                self.quarantine.open_trial(is_new_life=True)
                self.send_admitted()
            case Accepted():
                for request_id in message.request_ids:
                    self.journal.accept(request_id)
            case Refused():
                entry = self.journal.close(message.request_id)
                if entry is not None:
                    self.clients[entry].is_refused = True
            case Emits():
                self.take(message)
            case Strikes():
                for request_id, count in zip(message.request_ids, message.counts, strict=True):
                    self.journal.strike(request_id, count)
            case CoreStats():
                self.mend(message)

    def take(self, emits: Emits) -> None:
        tokens, start = unpack_ids(emits.tokens), 0
        for row, request_id in enumerate(emits.request_ids):
            end = start + emits.counts[row]
            entry = self.journal.get(request_id)
            try:
                fresh = self.journal.append(
                    request_id, emits.firsts[row], tokens[start:end], emits.finishes[row]
                )
            except Gap:
                self.restart(request_id)
            else:
                if fresh is not None and entry is not None:
                    client = self.clients[entry]
                    client.ids += fresh
                    if emits.finishes[row]:
                        client.finishes.append(emits.finishes[row])
            start = end
        self.review()

    def restart(self, request_id: int) -> None:
        self.num_gaps += 1
        self.send(Abort(self.life, self.core_life, [request_id]))
        entry = self.journal.reissue(request_id, self.next_id())
        assert entry is not None
        self.send_submit(entry)

    def mend(self, stats: CoreStats) -> None:
        assert stats.request_ids is not None
        found = compare(
            self.journal,
            stats.request_ids,
            stats.time,
            unanswered_ids=stats.unanswered_ids or [],
        )
        for entry in found.lost:
            self.restart(entry.request_id)
        for entry in found.unsent:
            self.send_submit(entry)
        for request_id in found.accepted:
            self.journal.accept(request_id)
        if found.orphans:
            self.send(Abort(self.life, self.core_life, found.orphans))

    def die(self) -> None:
        for client in self.clients.values():
            client.is_broken |= client.is_open
