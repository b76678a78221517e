"""Where the `nvserve` command begins: Ctrl-C is answered before anything else is imported.

Until a command has something to put away (interrupts.py), an interrupt is one line and exit status
130. Imports next to nothing: what is imported before `main` runs goes unanswered.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

INTERRUPTED = 130  # exit status, as ExitCode has it; that module takes long to import
FAREWELL = "\nnvserve: interrupted\n"  # behind the ^C of a terminal


def main() -> None:
    """Entry point of the console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the parent ignores it
        signal.signal(signal.SIGINT, leave)
    from nvserve.scripts.cli import main as run  # a tenth of a second or more

    run()


def leave(number: int, frame: FrameType | None) -> None:
    """End now, between any two instructions."""
    with suppress(OSError):  # nobody reads it
        os.write(2, FAREWELL.encode())
    os._exit(INTERRUPTED)
