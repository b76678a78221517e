"""Virtual time, processes that can die and stop, and pipes between them that belong to one life."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their virtual times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), action))

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Until it is over, or the time has come."""
        while self._events and not is_over():
            if self._events[0][0] > until:
                return
            self.now, _, action = heapq.heappop(self._events)
            action()


@dataclass(eq=False)
class Process:
    """Somebody who acts only while alive, and catches up after having been stopped."""

    clock: Clock
    is_alive: bool = True
    stopped_at: float | None = None
    backlog: deque[Action] = field(default_factory=deque)

    def do(self, action: Action) -> None:
        if not self.is_alive:
            return
        if self.stopped_at is not None:
            self.backlog.append(action)
        else:
            action()

    def later(self, delay_s: float, action: Action) -> None:
        self.clock.after(delay_s, lambda: self.do(action))

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped_at = None
        while self.backlog and self.is_alive and self.stopped_at is None:
            self.backlog.popleft()()


class Pipe:
    """A socket path: frames wait until it is bound, and are lost once the receiver closed it."""

    def __init__(self, clock: Clock, chance: random.Random, faults: "MessageFaults") -> None:
        self._clock = clock
        self._chance = chance
        self._faults = faults
        self._waiting: list[Any] = []
        self._receiver: tuple[Process, Callable[[Any], None]] | None = None
        self._is_closed = False
        self._last = 0.0  # arrival of the latest frame: the order is kept

    def bind(self, process: Process, handle: Callable[[Any], None]) -> None:
        self._receiver = (process, handle)
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._arrive(message)

    def close(self) -> None:
        self._is_closed = True
        self._receiver = None

    def send(self, message: Any) -> None:
        delay_s = self._chance.uniform(0.0005, 0.004)
        match self._faults.draw(message):
            case "drop":
                return
            case "duplicate":
                self._post(message, delay_s)
            case "delay":
                late_s = delay_s + self._chance.uniform(0.05, 3.0)
                self._clock.after(late_s, lambda: self._arrive(message))  # others overtake it
                return
            case _:
                pass
        self._post(message, delay_s)

    def _post(self, message: Any, delay_s: float) -> None:
        self._last = max(self._last, self._clock.now + delay_s)
        self._clock.after(self._last - self._clock.now, lambda: self._arrive(message))

    def _arrive(self, message: Any) -> None:
        if self._is_closed:
            return
        if self._receiver is None:
            self._waiting.append(message)
            return
        process, handle = self._receiver
        process.do(lambda: None if self._is_closed else handle(message))


@dataclass
class MessageFaults:
    """Faults armed for the next messages of a kind."""

    armed: list[tuple[str, str]] = field(default_factory=list)  # kind of fault, name of message

    def draw(self, message: Any) -> str:
        name = type(message).__name__
        for entry in self.armed:
            if entry[1] == name:
                self.armed.remove(entry)
                return entry[0]
        return ""
