"""The engine by itself: listeners that raise, and a core that is behind."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import zmq
from api.frontend_process import make_config

from nvserve.frontend.engine import Engine
from nvserve.frontend.errors import ApiError
from nvserve.frontend.listener import EmitExtras
from nvserve.protocol.channel import Inbox, Outbox, core_to_frontend, frontend_to_core
from nvserve.protocol.codec import decode_to_core, encode
from nvserve.protocol.control import Peers
from nvserve.protocol.messages import CoreStats, FinishReason, Hello, Submit, ToCore, pack_ids
from nvserve.protocol.sampling import SamplingParams

LIFE, CORE_LIFE = 1, 2
LIMIT_S = 30.0


class Recorder:
    """Remembers the last call, and may raise at it first."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.end: FinishReason | Exception | None = None

    def on_accepted(self) -> None:
        pass

    def on_refused(self, error: ApiError) -> None:
        self.end = error

    def on_tokens(
        self, tokens: Sequence[int], finish: FinishReason, cached: int, emit: EmitExtras | None
    ) -> None:
        if self.is_broken:
            raise RuntimeError("broken")
        self.end = finish

    def on_failure(self, error: Exception) -> None:
        self.end = error


def submit(engine: Engine, listener: Recorder, timeout_s: float = 0.0) -> None:
    sampling = SamplingParams(max_tokens=3)
    engine.submit(listener, prompt=pack_ids([5]), sampling=sampling, seed=0, timeout_s=timeout_s)


def run(folder: Path, story: Callable[[Engine], Awaitable[None]]) -> None:
    async def within() -> None:
        with zmq.Context() as context:
            config = make_config(max_queued_requests=5_000)
            engine = Engine(config, life=LIFE, launch_dir=str(folder), context=context)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await story(engine)
            finally:
                engine.close()

    asyncio.run(within())


def stats(time_s: float) -> CoreStats:
    """Of a core that has nothing, unread submits neither."""
    numbers = {name: 0 for name in CoreStats.__struct_fields__}
    fields = numbers | {
        "core_life": CORE_LIFE,
        "frontend_life": LIFE,
        "time": time_s,
        "finished_totals": [0] * len(FinishReason),
        "request_ids": [],
        "unanswered_ids": [],
    }
    return CoreStats(**fields)  # type: ignore[arg-type]  # fields by name


def test_a_listener_that_raises_at_its_deadline_takes_no_other_along(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        listeners = [Recorder(is_broken=number == 0) for number in range(3)]
        for listener in listeners:
            submit(engine, listener, timeout_s=0.01)
        engine.expire(time.time() + 1.0)
        assert isinstance(listeners[0].end, RuntimeError)
        assert [one.end for one in listeners[1:]] == [FinishReason.DEADLINE] * 2
        assert not len(engine.journal)

    run(tmp_path, story)


def test_what_core_has_no_room_for_is_not_taken_for_lost(tmp_path: Path) -> None:
    num_sent = 2_500  # more than the socket holds
    up, down = (way(str(tmp_path), LIFE, CORE_LIFE) for way in (frontend_to_core, core_to_frontend))

    async def story(
        engine: Engine, outbox: Outbox, context: "zmq.Context[zmq.Socket[bytes]]"
    ) -> None:
        async def tell(time_s: float) -> None:
            outbox.send(encode(stats(time_s)))
            while engine.stats is None or engine.stats.time != time_s:
                await asyncio.sleep(0.001)

        engine.connect(Peers(LIFE, CORE_LIFE))
        outbox.send(encode(Hello(CORE_LIFE)))
        while not engine.is_connected:
            await asyncio.sleep(0.001)
        for _ in range(num_sent):
            submit(engine, Recorder())
        await tell(time.time() + 3_600.0)
        assert engine.num_gaps == 0
        early_s = time.time()
        with contextlib.closing(Inbox(context, up)) as inbox:
            received: list[ToCore] = []
            while len(received) <= num_sent:  # a Hello and the submits
                await asyncio.sleep(0.001)
                while (frame := inbox.receive()) is not None:
                    received.append(decode_to_core(frame))
        assert sum(isinstance(message, Submit) for message in received) == num_sent
        for entry in engine.journal:
            entry.sent_s -= 60.0  # it waited for room so long
        await tell(early_s)
        assert engine.num_gaps == 0
        await tell(time.time() + 60.0)
        assert engine.num_gaps == num_sent

    with zmq.Context() as context, contextlib.closing(Outbox(context, down)) as outbox:
        run(tmp_path, lambda engine: story(engine, outbox, context))
