"""Reads one tool call, a JSON object with a name and arguments, from text that comes in pieces.

The arguments are passed on as they come, in the very text of the model; a call without any has
`{}`. Every character costs the same, however long the call is. Pure; knows no markers around the
object.
"""

import enum
import json
from collections.abc import Set
from typing import Final

NAME_KEYS: Final = ("name",)
ARGUMENT_KEYS: Final = ("arguments", "parameters")
NO_ARGUMENTS: Final = "{}"
SPACE: Final = " \t\r\n"
MAX_NAME_CHARS: Final = 256


class State(enum.Enum):
    """How far the object is."""

    READING = "reading"
    DONE = "done"
    BAD = "bad"  # not such an object; all its text is in `raw`


class CallScanner:
    """Feed it characters from the object's brace on; it takes none behind the closing one."""

    def __init__(self, names: Set[str] | None = None) -> None:
        """`names` that a call may have; None allows all."""
        self._names: Final = names
        self.state = State.READING
        self.name: str | None = None
        self._taken: Final[list[str]] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_value = False  # behind the colon of the outer object
        self._key: str | None = None
        self._text: list[str] = []  # of the key or value that is being read, at the outer level
        self._is_passing = False  # the value that is being read is the arguments, an object
        self._has_arguments = False  # the first ones count
        self._arguments: list[str] = []  # not handed out yet

    @property
    def raw(self) -> str:
        """Everything taken."""
        return "".join(self._taken)

    def feed(self, text: str) -> int:
        """Take characters until the object ends or is none; how many."""
        num_taken = len(text)
        for index, char in enumerate(text):
            self._step(char)
            if self.state is not State.READING:
                num_taken = index + 1
                break
        self._taken.append(text[:num_taken])
        return num_taken

    def take_arguments(self) -> str:
        """New text of the arguments; nothing before the name is known."""
        if self.name is None:
            return ""
        fresh = "".join(self._arguments)
        self._arguments.clear()
        return fresh

    def _step(self, char: str) -> None:
        if self._in_string:
            self._keep(char)
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif self._depth == 0:
            self._open(char)
        elif self._depth == 1:
            self._step_outer(char)
        else:
            self._step_inner(char)

    def _open(self, char: str) -> None:
        if char == "{":
            self._depth = 1
        elif char not in SPACE:
            self.state = State.BAD

    def _step_outer(self, char: str) -> None:
        """Between the keys and values of the object itself."""
        if char == '"':
            self._in_string = True
            self._keep(char)
        elif char == ":" and not self._is_value:
            self._key, self._is_value = _decoded("".join(self._text)), True
            self._text.clear()
            if self._key is None:
                self.state = State.BAD
        elif char in ",}":
            self._end_value()
            if char == "}" and self.state is State.READING:
                self._close()
        elif char in "{[" and self._is_value:
            self._depth += 1
            self._is_passing = (
                char == "{"
                and not self._text
                and self._key in ARGUMENT_KEYS
                and not self._has_arguments
            )
            self._keep(char)
        elif char not in SPACE:
            if not self._is_value:
                self.state = State.BAD
            self._keep(char)

    def _step_inner(self, char: str) -> None:
        self._keep(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _keep(self, char: str) -> None:
        (self._arguments if self._is_passing else self._text).append(char)

    def _end_value(self) -> None:
        text = "".join(self._text)
        if self._is_value and self._key in NAME_KEYS:
            self.name = _decoded(text)
            if not self.name or len(self.name) > MAX_NAME_CHARS or not self._allows(self.name):
                self.state = State.BAD
        elif self._is_passing:
            self._has_arguments = True
        elif self._is_value and self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._add_other(text)
        self._key, self._is_value, self._is_passing = None, False, False
        self._text.clear()

    def _allows(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _add_other(self, text: str) -> None:
        """Arguments that are no object: a string of JSON is taken out of its quotes."""
        inner = _decoded(text)
        arguments = text if inner is None else inner
        if arguments.strip(SPACE) not in ("", "null"):
            self._has_arguments = True
            self._arguments.append(arguments)

    def _close(self) -> None:
        if self.name is None:
            self.state = State.BAD
            return
        self.state = State.DONE
        if not self._has_arguments:
            self._arguments.append(NO_ARGUMENTS)


def _decoded(text: str) -> str | None:
    """The string that this JSON text is, if it is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
