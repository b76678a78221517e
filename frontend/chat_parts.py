"""A chat's output text as its parts: reasoning, content and tool calls, piece by piece.

What has been put out after some text depends on that text alone, however it was cut; text that may
still become a marker waits, and is not looked at again with every piece that follows. Every stage
takes text and gives parts. Pure; knows text only.
"""

import enum
from collections.abc import Iterator, Set
from typing import Final, Protocol

import msgspec

from nvserve.frontend.call_scanner import SPACE, CallScanner, State

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
PIECE_CHARS: Final = 4096  # of a longer text, taken at once: what is left of it is copied often


class Part(msgspec.Struct, frozen=True):
    """Some output. Of a `call`, `name` begins it and `text` continues its arguments."""

    text: str
    is_reasoning: bool = False
    call: int = -1  # index of the tool call
    name: str | None = None


class Splitter(Protocol):
    """One stage."""

    def feed(self, text: str) -> Iterator[Part]: ...

    def flush(self) -> Iterator[Part]:
        """The end of the text."""
        ...


def num_held(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class Plain:
    """Everything is content."""

    def feed(self, text: str) -> Iterator[Part]:
        if text:
            yield Part(text)

    def flush(self) -> Iterator[Part]:
        yield from ()


class _Mode(enum.Enum):
    START = "start"  # undecided
    THINKING = "thinking"
    CONTENT = "content"
    CALL = "call"
    BEHIND = "behind"  # a marker or a call, where blanks and separators are dropped


class Reasoning:
    """Takes what stands between <think> and </think> out; the rest goes to the next stage.

    `is_open` says that the prompt itself ends with the opening marker.
    """

    def __init__(self, following: Splitter, *, is_open: bool) -> None:
        self._following: Final = following
        self._mode = _Mode.THINKING if is_open else _Mode.START
        self._blanks: Final[list[str]] = []  # before all other text
        self._text = ""  # not passed on yet

    def feed(self, text: str) -> Iterator[Part]:
        self._text += text
        if self._mode is _Mode.START:
            self._start()
        if self._mode is _Mode.THINKING:
            yield from self._think()
        if self._mode is _Mode.BEHIND:
            self._text = self._text.lstrip(SPACE)
            if self._text:
                self._mode = _Mode.CONTENT
        if self._mode is _Mode.CONTENT:
            passed, self._text = self._text, ""
            yield from self._following.feed(passed)

    def flush(self) -> Iterator[Part]:
        if self._text and self._mode is _Mode.THINKING:
            yield Part(self._text, is_reasoning=True)
        elif self._mode is _Mode.START:
            yield from self._following.feed("".join(self._blanks) + self._text)
        yield from self._following.flush()

    def _start(self) -> None:
        """The opening marker can only stand at the very start."""
        if not self._text.strip(SPACE):
            self._blanks.append(self._text)
            self._text = ""
            return
        stripped = self._text.lstrip(SPACE)
        if stripped.startswith(THINK):
            self._text = stripped[len(THINK) :]
            self._mode = _Mode.THINKING
        elif not THINK.startswith(stripped):
            self._text = "".join(self._blanks) + self._text
            self._mode = _Mode.CONTENT

    def _think(self) -> Iterator[Part]:
        thought, marker, after = self._text.partition(END_THINK)
        if marker:
            self._text, self._mode = after, _Mode.BEHIND
        else:
            cut = len(self._text) - num_held(self._text, END_THINK)
            thought, self._text = self._text[:cut], self._text[cut:]
        if thought:
            yield Part(thought, is_reasoning=True)


class _Calls:
    """What both ways of writing calls share: the text, and the call that is being read."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls: Final = max_calls  # the others are dropped
        self._mode = _Mode.START
        self._skipped: list[str] = []  # content, unless a call follows
        self._text = ""  # behind it, not decided yet
        self._opening = ""  # what stood before the call that is being read
        self._scanner = CallScanner()
        self._num_calls = 0
        self._is_named = False

    def feed(self, text: str) -> Iterator[Part]:
        for start in range(0, len(text), PIECE_CHARS):
            self._text += text[start : start + PIECE_CHARS]
            before = None
            while self._text and before != (len(self._text), self._mode):
                before = (len(self._text), self._mode)
                yield from self._scan() if self._mode is _Mode.CALL else self._seek()

    def _seek(self) -> Iterator[Part]:
        """Outside a call: pass content on, and find the next call."""
        raise NotImplementedError

    def _begin(self, marker: str, rest: str, names: Set[str] | None = None) -> None:
        self._opening, self._text, self._mode = self._unskipped() + marker, rest, _Mode.CALL
        self._scanner, self._is_named = CallScanner(names), False

    def _unskipped(self) -> str:
        """What was skipped, which is decided now."""
        skipped, self._skipped = "".join(self._skipped), []
        return skipped

    def _scan(self) -> Iterator[Part]:
        scanner = self._scanner
        num_taken = scanner.feed(self._text)
        self._text = self._text[num_taken:]
        if scanner.name is not None and scanner.state is not State.BAD and not self._is_named:
            self._is_named = True
            self._num_calls += 1
            if self._num_calls <= self._max_calls:
                yield Part("", call=self._num_calls - 1, name=scanner.name)
        arguments = scanner.take_arguments()
        if arguments and self._is_named and self._num_calls <= self._max_calls:
            yield Part(arguments, call=self._num_calls - 1)
        if scanner.state is State.READING:
            return
        self._mode = _Mode.BEHIND
        if not self._is_named:  # no call after all
            self._mode = _Mode.CONTENT
            yield Part(self._opening + scanner.raw)

    def flush(self) -> Iterator[Part]:
        if self._mode is _Mode.CALL and not self._is_named:
            yield Part(self._opening + self._scanner.raw)
        elif self._mode in (_Mode.START, _Mode.CONTENT):
            rest = self._unskipped() + self._text
            if rest:
                yield Part(rest)


class MarkedCalls(_Calls):
    """Hermes and Qwen: each call between <tool_call> markers, content around them."""

    def _seek(self) -> Iterator[Part]:
        if self._mode is _Mode.BEHIND:
            self._text = self._text.lstrip(SPACE)
            if END_CALL.startswith(self._text) and self._text != END_CALL:
                return
            self._text = self._text.removeprefix(END_CALL).lstrip(SPACE)
            self._mode = _Mode.START if self._text else _Mode.BEHIND
            return
        content, marker, rest = self._text.partition(CALL)
        if not marker:
            cut = len(content) - num_held(content, CALL)
            content, rest = content[:cut], content[cut:]
        shown = content.rstrip(SPACE)  # blanks before a call are no content
        if shown:
            yield Part(self._unskipped() + shown)
        self._skipped.append(content[len(shown) :])
        if marker:
            self._begin(CALL, rest)
        else:
            self._text = rest


class BareCalls(_Calls):
    """Llama 3: the output is calls from its start on, or none. `is_list`: as a list, by grammar.

    Without a marker, an object with another name than one of `names` (None: any) is an answer in
    JSON.
    """

    def __init__(
        self, max_calls: int, *, names: Set[str] | None = None, is_list: bool = False
    ) -> None:
        super().__init__(max_calls)
        self._names: Final = names
        self._marker: Final = "[" if is_list else PYTHON_TAG
        self._separators: Final = SPACE + ";," + ("]" if is_list else "")
        self._is_marked = False

    def _seek(self) -> Iterator[Part]:
        if self._mode is _Mode.CONTENT:
            content, self._text = self._unskipped() + self._text, ""
            yield Part(content)
            return
        is_start = self._mode is _Mode.START
        self._skip(SPACE if is_start else self._separators)
        if is_start and not self._is_marked:
            if self._text != self._marker and self._marker.startswith(self._text):
                return
            if self._text.startswith(self._marker):
                self._is_marked = True
                self._skipped.append(self._marker)
                self._text = self._text[len(self._marker) :]
                self._skip(SPACE)
        if self._text.startswith("{"):
            self._begin("", self._text, None if self._is_marked else self._names)
        elif self._text:
            self._mode = _Mode.CONTENT

    def _skip(self, blanks: str) -> None:
        rest = self._text.lstrip(blanks)
        self._skipped.append(self._text[: len(self._text) - len(rest)])
        self._text = rest


class ForcedCall:
    """The output is the arguments of one call, by grammar."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._is_begun = False

    def feed(self, text: str) -> Iterator[Part]:
        if not self._is_begun:
            self._is_begun = True
            yield Part("", call=0, name=self._name)
        if text:
            yield Part(text, call=0)

    def flush(self) -> Iterator[Part]:
        yield from ()
