"""The launcher's loop: polls children, signals and the control socket, does what recovery.py says.

All deciding is there; here is all the doing. Imports no torch and touches no request.
"""

import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Final

import msgspec

from nvserve.protocol.child import set_title
from nvserve.protocol.codec import BadFrame
from nvserve.protocol.config import Config
from nvserve.protocol.control import (
    EpochReady,
    FromChild,
    Progress,
    Ready,
    Role,
    Setup,
    StartEpoch,
    State,
)
from nvserve.scripts import listener
from nvserve.scripts.actions import Action, End, Kill, Note, Send, Start
from nvserve.scripts.awake_clock import AwakeClock
from nvserve.scripts.children import PROGRAMS, Child, Programs
from nvserve.scripts.control_socket import ControlSocket, Reply, Request
from nvserve.scripts.crash_report import Accident, write_report
from nvserve.scripts.display import Display
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.formation import Stage
from nvserve.scripts.hangs import ChildId, Observation
from nvserve.scripts.injection import Injection
from nvserve.scripts.launch_dir import LaunchDir
from nvserve.scripts.launch_status import describe_launch
from nvserve.scripts.limits import Limits
from nvserve.scripts.oom import OomWatch
from nvserve.scripts.recovery import Recovery
from nvserve.scripts.startup import StartTimes, describe_start

PAGE_PERIOD_S: Final = 0.25  # between readings of the progress pages
SILENT_S: Final = 1.0  # from here on it is worth asking /proc
LAST_REAP_S: Final = 5.0  # at the very end, for each child
MAX_ACCIDENTS: Final = 5  # told in a crash report


class Supervisor:
    """One launch, from the bound socket to the last child reaped."""

    def __init__(
        self,
        config: Config,
        *,
        http: socket.socket,
        directory: LaunchDir,
        display: Display,
        api_key: str = "",
        programs: Programs = PROGRAMS,
    ) -> None:
        self.config: Final = config
        self.policy: Final = Recovery(Limits.of(config))
        self._http: Final = http
        self._directory: Final = directory
        self._display: Final = display
        self._api_key: Final = api_key
        self._programs: Final = programs
        self._children: Final[dict[ChildId, Child]] = {}
        self._accidents: Final[deque[Accident]] = deque(maxlen=MAX_ACCIDENTS)
        self._oom: Final = OomWatch()
        self._times: Final = StartTimes(time.monotonic())
        self._selector: Final = selectors.DefaultSelector()
        self._control: Final = ControlSocket(directory.path, self._selector, self._answer)
        self._begun: Final = time.monotonic()
        self._clock: Final = AwakeClock(PAGE_PERIOD_S)
        self._end: End | None = None
        self._is_announced = False
        self._injection: Final = Injection(is_allowed=config.enable_faults)
        self._pruned_for: frozenset[ChildId] = frozenset()

    def run(self) -> ExitCode:
        """Serve until told to stop or unable to go on; everything is gone afterwards."""
        set_title("launcher")
        woken, waker = socket.socketpair()
        waker.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._interrupt(woken))
        handlers = {n: signal.signal(n, _ignore) for n in (signal.SIGINT, signal.SIGTERM)}
        # Inherited as ignored, it would leave nobody who can tell what has ended a child.
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        old_fd = signal.set_wakeup_fd(waker.fileno())
        try:
            self._execute(self.policy.start(self._clock.now()))
            while self._end is None:
                self._wait()
                self._tick()
        finally:
            self._clean_up()
            signal.set_wakeup_fd(old_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            woken.close()
            waker.close()
        assert self._end is not None, "the loop ends with an End"
        return self._conclude(self._end)

    # -- the loop --------------------------------------------------------------------------------

    def _wait(self) -> None:
        now = self._clock.now()
        timeout_s = min(PAGE_PERIOD_S, max(0.0, self.policy.next_deadline() - now))
        for key, _ in self._selector.select(timeout_s):
            # not taken away in this turn, nor its number given to another
            if self._selector.get_map().get(key.fileobj) == key:
                key.data()

    def _tick(self) -> None:
        now = self._clock.now()
        observations = [self._observe(child, now) for child in self._children.values()]
        awake_since = self._clock.awake_since
        self._execute(self.policy.tick(now, observations, awake_since=awake_since))
        if self.policy.state is not State.READY:
            return
        self._display.settle()
        self._prune()
        if not self._is_announced:
            self._is_announced = True
            self._announce()

    def _prune(self) -> None:
        """Once after each change: the files of the dead go."""
        ids = frozenset(self._children)
        if ids == self._pruned_for:
            return
        self._pruned_for = ids
        lives = {child.role: child.life for child in ids}
        self._directory.prune(
            epoch=self.policy.formation.epoch,
            frontend_life=lives[Role.FRONTEND],
            core_life=lives[Role.CORE],
            pages={f"{child.role.value}{child.life}.page" for child in ids},
        )

    def _observe(self, child: Child, now: float) -> Observation:
        page = child.page()
        if page is not None:
            page = page._replace(time_s=self._clock.convert(page.time_s))
        is_silent = page is None or now - page.time_s > SILENT_S
        member = self.policy.members[child.id]
        return Observation(
            child=child.id,
            rank=member.rank,
            page=page,
            started_s=member.started_s,
            is_stopped=is_silent and child.is_stopped(),
            is_exiting=(self.policy.is_broken or is_silent) and child.is_exiting(),
            is_serving=member.is_worker and self.policy.formation.stage is Stage.SERVING,
        )

    # -- events ----------------------------------------------------------------------------------

    def _hear(self, child: Child) -> None:
        """Everything the child has sent."""
        while (message := child.receive()) is not None:
            if isinstance(message, BadFrame):
                self._display.note(f"{child.name} sent a malformed control message: {message}")
                continue
            self._record(child, message)
            self._execute(self.policy.received(child.id, message, self._clock.now()))
        if child.has_hung_up:  # or its end would wake the loop without a pause
            self._unregister(child.control.fileno())

    def _record(self, child: Child, message: FromChild) -> None:
        """Keep what the person at the terminal wants to know of a start."""
        match message:
            case Progress(phase, done):
                self._show_progress(child, phase, done)
            case Ready():
                self._times.ready.setdefault(child.name, time.monotonic())
                self._times.zmq_endpoint = message.zmq_endpoint or self._times.zmq_endpoint
                if child.id.role is not Role.WORKER:
                    self._show_progress(child, "ready", 1.0)
            case EpochReady() if child.id.role is Role.WORKER:
                self._times.phases[child.name] = message.phases
                self._times.attention_backend = message.attention_backend
                self._show_progress(child, "ready", 1.0)
            case _:
                pass

    def _show_progress(self, child: Child, phase: str, done: float) -> None:
        """While people wait for it; the spare's start interests nobody."""
        if self.policy.state in (State.LOADING, State.RECOVERING):
            self._display.progress(child.name, phase, done)

    def _show(self, child: Child) -> None:
        for line in child.read_lines():
            self._display.log(child.name, line)
        if child.has_closed_output:
            self._unregister(child.output)

    def _bury(self, child: Child) -> None:
        """Its pidfd is readable: hear its last words, reap it, tell the policy."""
        self._hear(child)
        self._show(child)
        death = child.reap()
        is_crash = death.is_crash(has_oom_struck=self._oom.has_struck())
        now = self._clock.now()
        self._execute(self.policy.died(child.id, now, death.text, is_crash=is_crash))
        self._forget(child)

    def _interrupt(self, woken: socket.socket) -> None:
        for _ in woken.recv(64):
            self._execute(self.policy.interrupt(self._clock.now()))

    # -- actions ---------------------------------------------------------------------------------

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(child_id, name):
                    self._start(child_id, name)
                case Send(child_id, message):
                    child = self._children[child_id]
                    if isinstance(message, StartEpoch) and message.rank >= 0:
                        child.name = f"worker {message.rank}"
                        self._injection.arm(child)
                    child.send(message)  # one that does not read is dead or will be found hung
                case Kill(child_id, wants_stacks):
                    self._children[child_id].kill(wants_stacks=wants_stacks)
                case Note(text, accident):
                    self._note(text, accident)
                case End():
                    self._end = action

    def _start(self, child_id: ChildId, name: str) -> None:
        is_frontend = child_id.role is Role.FRONTEND
        # A later frontend opens the ZMQ door at the port of the first, where clients look for it.
        zmq_endpoint = self._times.zmq_endpoint or self.config.zmq_endpoint
        setup = Setup(
            config=msgspec.structs.replace(self.config, zmq_endpoint=zmq_endpoint),
            role=child_id.role,
            life=child_id.life,
            launch_dir=str(self._directory.path),
            api_key=self._api_key if is_frontend else "",
            listen_fd=self._http.fileno() if is_frontend else -1,
            name=name,
        )
        child = Child(child_id, name, setup, self._programs)
        self._children[child_id] = child
        self._injection.arm(child)
        callbacks: list[tuple[int, Callable[[Child], None]]] = [
            (child.control.fileno(), self._hear),
            (child.output, self._show),
            (child.pidfd, self._bury),
        ]
        for fd, callback in callbacks:
            self._selector.register(fd, selectors.EVENT_READ, lambda c=callback: c(child))

    def _note(self, text: str, accident: ChildId | None) -> None:
        self._display.note(text, is_urgent=accident is not None)
        if accident is None:
            return
        child = self._children[accident]
        self._accidents.append(Accident(text, child.name, child.pid, child.page(), child.tail))

    def _forget(self, child: Child) -> None:
        for fd in (child.control.fileno(), child.output, child.pidfd):
            self._unregister(fd)
        self._injection.forget(child)
        child.close()
        del self._children[child.id]

    def _unregister(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    # -- telling ---------------------------------------------------------------------------------

    def _announce(self) -> None:
        """The server is ready for the first time."""
        total_s = time.monotonic() - self._begun
        line, details = describe_start(
            self.config,
            listener.url(self._http),
            self._times,
            total_s=total_s,
            num_kv_blocks=self.policy.formation.num_kv_blocks,
            needs_key=bool(self._api_key),
        )
        self._display.announce(line, details)

    def _answer(self, request: Request) -> Reply:
        """One request on the launch directory's control socket."""
        match request:
            case {"command": "status"}:
                return describe_launch(
                    self.policy,
                    self._children.values(),
                    url=listener.url(self._http),
                    model=self.config.model,
                )
            case {"command": "restart", "name": str(name)}:
                return self._restart(name)
            case {"command": "fault", "name": str(name), "fault": list(fault)}:
                return self._injection.inject(self._children.values(), name, fault)
        return {"error": f"unknown command {request.get('command')!r}"}

    def _restart(self, name: str) -> Reply:
        number, actions = self.policy.restart(name, self._clock.now())
        if number is None:
            return {"error": f"{name!r} cannot be restarted now: {self._why_no_restart(name)}"}
        self._execute(actions)
        return {"number": number}

    def _why_no_restart(self, name: str) -> str:
        if self.policy.state is not State.READY:
            return f"the server is {self.policy.state.value}"
        names = {member.name for member in self.policy.members.values() if not member.is_spare}
        if name in names:
            return "another restart is going on"
        return f"there are {', '.join(sorted(names))}"

    def _clean_up(self) -> None:
        """Kill and reap what is left, also after an error of our own."""
        self._display.settle()
        for child in self._children.values():
            child.kill()
        for child in list(self._children.values()):
            if child.wait(LAST_REAP_S):
                self._show(child)
            self._forget(child)
        self._control.close()
        self._selector.close()
        self._http.close()
        self._directory.remove()

    def _conclude(self, end: End) -> ExitCode:
        if end.code in (ExitCode.OK, ExitCode.INTERRUPTED):
            self._display.note("stopped")
        else:
            for line in write_report(end.code, end.reason, list(self._accidents)):
                self._display.error(line)
        return end.code


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wake-up socket tells the loop."""
