"""One chat choice's output in OpenAI's shapes: stream deltas, or the whole message.

Knows documents; what the text's parts are is decided by its splitter.
"""

import uuid
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

from nvserve.frontend.chat_parts import ForcedCall, Part, Splitter

Document = dict[str, Any]


class ChatOutput:
    """The state of one choice."""

    def __init__(self, splitter: Splitter) -> None:
        self._splitter: Final = splitter
        self._call_ids: Final[list[str]] = []

    def deltas(self, text: str, *, is_last: bool) -> list[Document]:
        """What this text adds, each a stream's `delta`."""
        deltas: list[Document] = []
        for (field, call, name), parts in groupby(self._parts(text, is_last), _kind):
            joined = "".join(part.text for part in parts)
            if call >= 0:
                deltas.append({"tool_calls": [self._call_delta(call, name, joined)]})
            elif joined:
                deltas.append({field: joined})
        return deltas

    def message(self, text: str) -> Document:
        """The whole message, from the whole text."""
        parts = list(self._parts(text, True))
        content = "".join(part.text for part in parts if part.call < 0 and not part.is_reasoning)
        reasoning = "".join(part.text for part in parts if part.is_reasoning)
        message: Document = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = self._calls(parts)
        if calls:
            message["tool_calls"] = calls
            message["content"] = content or None
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """A choice that ends with calls says so, but for the one that was asked for by name."""
        is_by_name = isinstance(self._splitter, ForcedCall)
        return "tool_calls" if reason == "stop" and self._call_ids and not is_by_name else reason

    def _parts(self, text: str, is_last: bool) -> Iterable[Part]:
        yield from self._splitter.feed(text)
        if is_last:
            yield from self._splitter.flush()

    def _call_delta(self, call: int, name: str | None, arguments: str) -> Document:
        if name is None:
            return {"index": call, "function": {"arguments": arguments}}
        return {"index": call, **self._new_call(name, arguments)}

    def _new_call(self, name: str, arguments: str) -> Document:
        self._call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
        function = {"name": name, "arguments": arguments}
        return {"id": self._call_ids[-1], "type": "function", "function": function}

    def _calls(self, parts: list[Part]) -> list[Document]:
        calls: list[Document] = []
        for part in parts:
            if part.name is not None:
                calls.append(self._new_call(part.name, part.text))
            elif part.call >= 0:
                calls[part.call]["function"]["arguments"] += part.text
        return calls


def _kind(part: Part) -> tuple[str, int, str | None]:
    """Parts of the same kind, one behind the other, make one delta."""
    field = "reasoning_content" if part.is_reasoning else "content"
    return field, part.call, part.name
