"""A core process over real sockets, and its launcher, frontend and workers played by a test."""

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from nvserve.protocol import channel
from nvserve.protocol.channel import ControlChannel, Inbox, Outbox
from nvserve.protocol.codec import decode_from_child, decode_to_frontend, decode_to_worker, encode
from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.control import (
    EpochReady,
    FromChild,
    Peers,
    Ready,
    Role,
    Searching,
    Setup,
    StartEpoch,
)
from nvserve.protocol.messages import (
    CoreStats,
    Hello,
    Message,
    ModelOutput,
    SchedulerOutput,
    StepDone,
    Submit,
    ToFrontend,
    pack_ids,
)
from nvserve.protocol.sampling import SamplingParams

LIMIT_S = 60.0  # for whatever surely comes, the start of an interpreter included
CORE_LIFE = 4
SOURCE = Path(__file__).parent.parent / ".src"
T = TypeVar("T")


def wait_for(poll: Callable[[], T | None]) -> T:
    """The first result of `poll` that is not None."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        result = poll()
        if result is not None:
            return result
    raise TimeoutError(f"nothing within {LIMIT_S} s")


class Rig:
    """A core process and everybody it talks to."""

    def __init__(self, launch_dir: Path, **changes: object) -> None:
        self.launch_dir = str(launch_dir)
        self.model = f"{launch_dir}/m"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.control, theirs = ControlChannel.pair()
        os.set_inheritable(theirs.fileno(), True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nvserve.core.main", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONSAFEPATH": "1"},
        )
        theirs.close()
        self.epoch = -1
        self.sockets: list[Outbox | Inbox] = []
        facts = ModelFacts("X", vocab_size=100, num_layers=1, num_kv_heads=1, context_len=64)
        config = Config(
            model=self.model,
            facts=facts,
            served_model_names=["m"],
            max_model_len=64,
            block_size=4,
        )
        config = msgspec.structs.replace(config, **changes)
        self.searches: list[int] = []
        self.tell(Setup(config, Role.CORE, CORE_LIFE, self.launch_dir))
        self.expect_control(Ready)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for link in self.sockets:
            link.close()
        self.context.term()
        self.control.close()

    def block_compiler(self) -> None:
        """No grammar is ever compiled: the compiler waits for somebody to write the tokenizer."""
        os.mkdir(self.model)
        os.mkfifo(f"{self.model}/tokenizer.json")

    def compile_for_ever(self, request_id: int) -> None:
        """Submit a request whose grammar is being compiled, without end, once this returns."""
        self.block_compiler()
        self.submit(request_id, max_tokens=1, grammar="json:")

        def poll() -> bool | None:
            return True if self.expect_reply(CoreStats).unanswered_ids == [request_id] else None

        wait_for(poll)

    # -- launcher

    def tell(self, message: Message) -> None:
        assert self.control.send(encode(message))

    def expect_control(self, kind: type[T]) -> T:
        def poll() -> FromChild | None:
            frame = self.control.receive()
            message = None if frame is None else decode_from_child(frame)
            if isinstance(message, Searching):
                self.searches.append(message.num_suspects)
                return None
            return message

        message = wait_for(poll)
        assert isinstance(message, kind), message
        return message

    # -- frontend

    def meet(self, life: int) -> None:
        lives = (self.launch_dir, life, CORE_LIFE)
        self.life = life
        self.from_core = Inbox(self.context, channel.core_to_frontend(*lives))
        self.to_core = Outbox(self.context, channel.frontend_to_core(*lives))
        self.sockets += [self.from_core, self.to_core]
        self.to_core.send(encode(Hello(life)))
        self.tell(Peers(life, CORE_LIFE))
        assert self.expect_reply(Hello).life == CORE_LIFE

    def submit(
        self,
        request_id: int,
        *,
        max_tokens: int,
        core_life: int = CORE_LIFE,
        grammar: str = "",
        bad_words: list[list[int]] | None = None,
        timeout_s: float = 0.0,
        prompt: Sequence[int] = (1, 2, 3),
    ) -> None:
        now = time.time()
        submit = Submit(
            self.life,
            core_life,
            request_id,
            pack_ids(prompt),
            b"",
            SamplingParams(max_tokens=max_tokens, grammar=grammar, bad_words=bad_words or []),
            seed=0,
            arrival=now,
            deadline=now + timeout_s if timeout_s else 0.0,
        )
        self.to_core.send(encode(submit))

    def next_reply(self) -> ToFrontend:
        return decode_to_frontend(wait_for(lambda: self.from_core.receive(timeout_ms=50)))

    def expect_reply(self, kind: type[T]) -> T:
        """The next reply of this kind; CoreStats may come between."""
        while not isinstance(message := self.next_reply(), kind):
            assert isinstance(message, CoreStats), message
        return message

    # -- workers

    def start_epoch(self, tp_size: int, *, is_blamed: bool = False) -> None:
        self.epoch += 1
        self.step_inboxes = [
            Inbox(self.context, channel.core_to_worker(self.launch_dir, self.epoch, rank))
            for rank in range(tp_size)
        ]
        address = channel.worker_to_core(self.launch_dir, self.epoch)
        self.reports = [Outbox(self.context, address) for _ in range(tp_size)]
        self.sockets += [*self.step_inboxes, *self.reports]
        self.tell(StartEpoch(self.epoch, tp_size, num_kv_blocks=40, is_blamed=is_blamed))
        for rank, outbox in enumerate(self.reports):
            outbox.send(encode(Hello(self.epoch, rank)))
        for inbox in self.step_inboxes:
            assert self.expect_step_message(inbox) == Hello(CORE_LIFE)
        assert self.expect_control(EpochReady).epoch == self.epoch

    def expect_step_message(self, inbox: Inbox) -> Hello | SchedulerOutput:
        return decode_to_worker(wait_for(lambda: inbox.receive(timeout_ms=50)))

    def run_step(self, tokens: list[int]) -> SchedulerOutput:
        """All ranks take the next step and answer with these ids."""
        steps = [self.expect_step_message(inbox) for inbox in self.step_inboxes]
        step = steps[0]
        assert isinstance(step, SchedulerOutput)
        assert all(other == step for other in steps)
        self.answer(step, tokens)
        return step

    def answer(self, step: SchedulerOutput, tokens: list[int]) -> None:
        column = pack_ids(tokens)
        checksum = zlib.crc32(column)
        self.reports[0].send(encode(ModelOutput(self.epoch, step.step, column, checksum=checksum)))
        for rank, outbox in enumerate(self.reports[1:], start=1):
            outbox.send(encode(StepDone(self.epoch, step.step, rank, checksum)))
