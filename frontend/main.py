"""The frontend process: HTTP and ZMQ doors in front of core, on one event loop.

Does all the I/O of the frontend: control messages in and out, the progress page, the sockets. The
launcher starts it as `python -m nvserve.frontend.main FD PARENT_PID`.
"""

import asyncio
import logging
import os
import socket
import sys
import time
from typing import Final

import uvloop
import zmq

from nvserve.frontend import metrics
from nvserve.frontend.engine import Engine
from nvserve.frontend.errors import StartFailure
from nvserve.frontend.http import application
from nvserve.frontend.http_server import Server
from nvserve.frontend.service import Service
from nvserve.frontend.tokenizer import Tokenizer
from nvserve.frontend.tools import markers
from nvserve.frontend.zmq_api import Door
from nvserve.protocol.child import Child, bootstrap, freeze_start
from nvserve.protocol.control import (
    Condition,
    Drain,
    Drained,
    Exit,
    Failed,
    Peers,
    Progress,
    Ready,
    Searching,
    ToChild,
    shorten,
)
from nvserve.protocol.descriptors import raise_limit
from nvserve.protocol.progress import Phase

logger = logging.getLogger(__name__)

BEAT_S: Final = 0.2
START_FAILURE: Final = 2  # exit status


class Frontend:
    """What the loop holds: the service, its doors, and the launcher's messages."""

    def __init__(self, child: Child, tokenizer: Tokenizer) -> None:
        setup = child.setup
        self._child: Final = child
        self._context: Final = zmq.Context()
        self._engine: Final = Engine(
            setup.config, life=setup.life, launch_dir=setup.launch_dir, context=self._context
        )
        self._engine.on_search = lambda num_suspects: child.send(Searching(num_suspects))
        self._service: Final = Service(setup.config, tokenizer, self._engine)
        self._server: Final = Server(application(self._service, setup.api_key))
        self._door: Final = Door(self._service, setup.api_key)
        self._exit: Final = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None
        metrics.register(
            metrics.Sources(
                model_name=setup.config.served_model_names[0],
                stats=lambda: self._engine.stats,
                last_step_age_s=lambda: self._engine.last_step_age_s,
                condition=lambda: self._service.condition,
                own_totals=self._own_totals,
                num_open=lambda: len(self._engine.journal),
            )
        )

    async def run(self) -> None:
        """Serve until told to exit."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._child.control.fileno(), self._on_control)
        self._beat()
        listener = socket.socket(fileno=self._child.setup.listen_fd)
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.is_serving.wait()
        endpoint = await self._open_door(self._child.setup.config.zmq_endpoint)
        port = int(listener.getsockname()[1])
        freeze_start()
        self._child.send(Ready(port=port, zmq_endpoint=endpoint))
        self._on_control()
        await self._exit.wait()
        await self._end_all()
        self._door.close()
        self._engine.close()
        serving.cancel()  # what is still open ends with the process
        self._context.destroy(linger=0)

    async def _open_door(self, endpoint: str) -> str:
        try:
            return await self._door.open(endpoint)
        except OSError as error:
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror  # < 0: of a look-up
            raise StartFailure(f"cannot open the ZMQ door at {endpoint}: {reason}") from error

    def _beat(self) -> None:
        self._child.page.beat(Phase.SERVING)
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)
        self._engine.expire(time.time())

    def _on_control(self) -> None:
        while (message := self._child.receive()) is not None:
            self._obey(message)

    def _obey(self, message: ToChild) -> None:
        match message:
            case Peers():
                self._engine.connect(message)
            case Condition():
                self._service.condition = message
            case Drain():
                if self._drain is not None:  # the server ends while its frontend is restarted
                    self._drain.cancel()
                self._drain = asyncio.create_task(self._drain_all(message))
            case Exit():
                self._exit.set()
            case _:
                logger.error("%s is no message for a frontend", type(message).__name__)

    async def _end_all(self) -> None:
        """Tell whoever waits for an answer that none will come."""
        if self._drain is not None:
            self._drain.cancel()
        await self._service.drain(0.0)

    async def _drain_all(self, order: Drain) -> None:
        await self._service.drain(order.timeout_s, is_restart=order.is_restart)
        self._child.send(Drained())

    def _own_totals(self) -> dict[str, int]:
        return {
            "frontend_dropped_messages": self._engine.num_dropped,
            "frontend_gaps": self._engine.num_gaps,
            "frontend_replays": self._engine.num_replays,
            "frontend_zmq_dropped_frames": self._door.num_dropped,
        }


def main() -> None:
    """Load the tokenizer and serve; what the user can mend is told the launcher in one line."""
    child = bootstrap(sys.argv)
    config = child.setup.config
    child.page.beat(Phase.LOADING)
    raise_limit()
    child.send(Progress("tokenizer"))
    try:
        shown = markers(config.tool_call_parser, has_reasoning=bool(config.reasoning_parser))
        tokenizer = Tokenizer(config.model, config.max_model_len, shown)
        uvloop.run(_serve(child, tokenizer))
    except StartFailure as error:
        child.send(Failed(shorten(str(error))))
        sys.exit(START_FAILURE)


async def _serve(child: Child, tokenizer: Tokenizer) -> None:
    await Frontend(child, tokenizer).run()


if __name__ == "__main__":
    main()
