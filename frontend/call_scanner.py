"""Reads one tool call, a JSON object with a name and arguments, from text that comes in pieces.

The arguments are passed on as they come, in the very text of the model. Pure; knows no markers
around the object.
"""

import enum
import json
from typing import Final

NAME_KEYS: Final = ("name",)
ARGUMENT_KEYS: Final = ("arguments", "parameters")
SPACE: Final = " \t\r\n"
MAX_NAME_CHARS: Final = 256


class State(enum.Enum):
    """How far the object is."""

    READING = "reading"
    DONE = "done"
    BAD = "bad"  # not such an object; all its text is in `raw`


class CallScanner:
    """Feed it characters from the object's brace on; it takes none behind the closing one."""

    def __init__(self) -> None:
        self.state = State.READING
        self.raw = ""  # everything taken
        self.name: str | None = None
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_value = False  # behind the colon of the outer object
        self._key: str | None = None
        self._text = ""  # of the key or value that is being read, at the outer level
        self._arguments = ""
        self._num_shown = 0  # characters of the arguments handed out

    def feed(self, text: str) -> int:
        """Take characters until the object ends or is none; how many."""
        for index, char in enumerate(text):
            self.raw += char
            self._step(char)
            if self.state is not State.READING:
                return index + 1
        return len(text)

    def take_arguments(self) -> str:
        """New text of the arguments; nothing before the name is known."""
        if self.name is None:
            return ""
        fresh = self._arguments[self._num_shown :]
        self._num_shown = len(self._arguments)
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
            self._key, self._text, self._is_value = _decoded(self._text), "", True
            if self._key is None:
                self.state = State.BAD
        elif char in ",}":
            self._end_value()
            if char == "}" and self.state is State.READING:
                self.state = State.DONE if self.name is not None else State.BAD
        elif char in "{[" and self._is_value:
            self._depth += 1
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
        self._text += char
        if self._is_value and self._key in ARGUMENT_KEYS and self._text[0] == "{":
            self._arguments += char

    def _end_value(self) -> None:
        if self._is_value and self._key in NAME_KEYS:
            self.name = _decoded(self._text)
            if not self.name or len(self.name) > MAX_NAME_CHARS:
                self.state = State.BAD
        elif self._is_value and self._key in ARGUMENT_KEYS and self._text[:1] != "{":
            self._arguments = _decoded(self._text) or self._text  # arguments as a string of JSON
        self._key, self._text, self._is_value = None, "", False


def _decoded(text: str) -> str | None:
    """The string that this JSON text is, if it is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
