"""One generation as a stream of events: openings, deltas, usage, and the error that may end it.

A delta is written from within the step's fan-out. Only before every choice is open are events held:
the opening of an echo with logprobs is made in turns, since that of a long prompt takes long, and
is written no faster than its reader takes it, since it is large. Knows events; never their form.
"""

import asyncio
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Final

from nvserve.frontend.errors import ApiError
from nvserve.frontend.exchange import EventStream, Exchange
from nvserve.frontend.generation import Choice, Delta, Generation
from nvserve.frontend.responses import DONE, Chunks
from nvserve.frontend.turns import Turns

OPENING_LIMIT_S: Final = 300.0  # for which all openings wait for the long work of others
# Of a stream's deltas. They wait for our own work too, so more than an open one may have unsent.
MAX_HELD_BYTES: Final = 8 << 20

Making = Generator[None, None, bytes]  # of one event, in steps


class Streaming:
    """The events of one generation, to whose exchange nothing has been sent yet."""

    def __init__(
        self,
        exchange: Exchange,
        generation: Generation,
        chunks: Chunks,
        echoed: Sequence[str],
        turns: Turns,
    ) -> None:
        """`echoed` prompts by choice, or empty. An ApiError when the client takes no streams."""
        self._exchange: Final = exchange
        self._generation: Final = generation
        self._chunks: Final = chunks
        self._echoed: Final = echoed
        self._turns: Final = turns
        self._patience: Final = turns.patience(exchange, OPENING_LIMIT_S)
        self._stream: Final[EventStream] = exchange.event_stream(generation.abort)
        # With the bytes of those that are deltas; None once all choices are open.
        self._held: deque[tuple[bytes | Making, int]] | None = deque()
        self._num_held_bytes = 0
        self._news: Final = asyncio.Event()  # something is held, or the generation is over
        # Choices that wait for the scores of their echo.
        self._unopened: Final = {one.index for one in generation.choices if one.scores is not None}
        for choice in generation.choices:
            if choice.scores is None:
                self._open(choice)
        generation.on_over(lambda _: self._news.set())

    def sink(self, choice: Choice, delta: Delta) -> None:
        """Put out what a delta says."""
        if choice.index in self._unopened:
            if not delta.token_ids and delta.finish_reason is None:
                return
            self._unopened.remove(choice.index)
            self._open(choice)
        event = self._chunks.delta(choice, delta)
        self._put(event, len(event))

    async def run(self) -> None:
        """Send all events, once core has taken the request; raises why it has not."""
        await self._generation.accepted()
        self._exchange.is_started = True
        await self._stream.open(self._exchange.own_headers())
        try:
            await self._write_held()
            await self._generation.done()
        except ApiError as error:
            self._generation.abort(error)  # core is not to wait for the reader
            self._stream.write(b"data: %b\n\n" % error.body())
        else:
            self._put(self._chunks.usage(self._generation))
        self._stream.write(DONE)
        await self._stream.close()

    def _open(self, choice: Choice) -> None:
        prompt = self._generation.plan.prompts[choice.index // self._generation.plan.num_choices]
        text = self._echoed[choice.index] if self._echoed else ""
        if self._echoed and choice.scores is not None:  # special tokens alone have no text
            # What is put out behind it needs its place in the text.
            self._chunks.begin_behind(choice, text)
            self._hold(self._chunks.making_opening(choice, text, prompt))
        else:
            self._put(self._chunks.opening(choice, text, prompt))

    def _put(self, event: bytes, num_counted: int = 0) -> None:
        if not event:
            return
        if self._held is None:
            self._stream.write(event)
        else:
            self._hold(event, num_counted)

    def _hold(self, event: "bytes | Making", num_counted: int = 0) -> None:
        assert self._held is not None, "some choice is not open yet"
        self._held.append((event, num_counted))
        self._num_held_bytes += num_counted
        self._news.set()
        if self._num_held_bytes > MAX_HELD_BYTES:
            self._held.clear()
            self._stream.cut()

    async def _write_held(self) -> None:
        """Until every choice is open or there is nothing to wait for; then none is held any more.

        Raises what `Turns.work_off` does.
        """
        assert self._held is not None, "called once"
        while True:
            while self._held:
                event, num_bytes = self._held.popleft()
                self._num_held_bytes -= num_bytes
                await self._stream.send(await self._made(event))
            if not self._unopened or self._generation.is_over:
                self._held = None
                return
            self._news.clear()
            await self._news.wait()

    async def _made(self, event: "bytes | Making") -> bytes:
        if isinstance(event, bytes):
            return event
        made = b""

        def work() -> Iterator[None]:
            nonlocal made
            made = yield from event

        await self._turns.work_off(work(), self._exchange, self._patience)
        return made
