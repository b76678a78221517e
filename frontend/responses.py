"""OpenAI's documents: whole responses, and the chunks of a stream as byte templates.

A chunk of plain text is a prefix made once per choice, the text as JSON, and a fixed suffix; only
the chunks that carry more are built piece by piece. Knows formats only; sends nothing.
"""

import os
import time
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from nvserve.frontend.chat_output import ChatOutput
from nvserve.frontend.detokenizer import Vocabulary
from nvserve.frontend.generation import Choice, Delta, Generation
from nvserve.frontend.logprob_form import Document, LogprobForm
from nvserve.protocol.client_messages import TokenLogprob

DONE: Final = b"data: [DONE]\n\n"
INLINE_SCORES: Final = 100  # tokens with logprobs; the document of more is made in a thread

_encode: Final = msgspec.json.Encoder().encode


class Shape(msgspec.Struct, frozen=True):
    """What tells the two endpoints' documents apart, and what this client asked for."""

    id: str
    model: str
    created: int
    is_chat: bool
    is_stream: bool = False
    has_token_ids: bool = False
    has_usage: bool = False  # chunks carry a usage field, null but in the last
    num_prompt_logprobs: int = -1  # in a field of their own, beside an echo's; -1 without one
    echoes_special: bool = False  # tokens, as one of ids may; one of a text is that text

    @staticmethod
    def new(
        *,
        model: str,
        is_chat: bool,
        is_stream: bool = False,
        has_token_ids: bool = False,
        has_usage: bool = False,
        num_prompt_logprobs: int = -1,
        echoes_special: bool = False,
    ) -> "Shape":
        """The shape of one response, with an id of its own."""
        prefix = "chatcmpl-" if is_chat else "cmpl-"
        return Shape(
            id=prefix + os.urandom(16).hex(),
            model=model,
            created=int(time.time()),
            is_chat=is_chat,
            is_stream=is_stream,
            has_token_ids=has_token_ids,
            has_usage=has_usage,
            num_prompt_logprobs=num_prompt_logprobs,
            echoes_special=echoes_special,
        )

    def head(self, kind: str) -> Document:
        """The fields every document and chunk starts with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def event(document: Document) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % _encode(document)


# -- streams ---------------------------------------------------------------------------------------


class Chunks:
    """The events of one streamed response."""

    def __init__(
        self, shape: Shape, vocabulary: Vocabulary, outputs: Sequence[ChatOutput] | None = None
    ) -> None:
        """`outputs` take the choices' texts apart; None when all of it is content."""
        self._shape: Final = shape
        self._outputs: Final = outputs
        self._kind: Final = "chat.completion.chunk" if shape.is_chat else "text_completion"
        self._logprobs: Final = _logprob_form(shape, vocabulary)
        self._is_plain: Final = not shape.has_token_ids
        self._prefixes: dict[int, bytes] = {}
        usage = b',"usage":null' if shape.has_usage else b""
        after_text = b"}" if shape.is_chat else b""
        self._suffix: Final = (
            after_text + b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"
        )

    def opening(self, choice: Choice, echoed: str, prompt_ids: Sequence[int]) -> bytes:
        """The first event of a choice: the role, or the echoed prompt; empty when there is none."""
        shape = self._shape
        if not (shape.is_chat or echoed or shape.has_token_ids):
            return b""
        return self._event(choice, self._opening_body(echoed, prompt_ids), None, None)

    def begin_behind(self, choice: Choice, echoed: str) -> None:
        """The choice's text begins with its prompt; to be told before its first delta is made."""
        self._logprobs.begin_behind(choice, echoed)

    def making_opening(
        self, choice: Choice, echoed: str, prompt_ids: Sequence[int]
    ) -> Generator[None, None, bytes]:
        """Make the first event of a choice: its prompt with the logprobs it has by now.

        In as many steps as there are strides of tokens.
        """
        columns: dict[str, list[bytes]] = {}
        for stride in self._logprobs.prompt_columns(choice, prompt_ids, echoed):
            for name, values in stride.items():
                columns.setdefault(name, []).append(_encode(values)[1:-1])
            yield
        logprobs = {
            name: msgspec.Raw(b"[%b]" % b",".join(pieces)) for name, pieces in columns.items()
        }
        body = self._opening_body(echoed, prompt_ids)
        return self._event(choice, body, logprobs, None)

    def _opening_body(self, echoed: str, prompt_ids: Sequence[int]) -> Document:
        shape = self._shape
        body: Document = (
            {"delta": {"role": "assistant", "content": ""}} if shape.is_chat else {"text": echoed}
        )
        if shape.has_token_ids:
            body |= {"prompt_token_ids": list(prompt_ids), "token_ids": []}
        return body

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        """The event of one delta; empty when it has nothing to say."""
        if not (delta.text or delta.token_ids or delta.finish_reason):
            return b""
        if self._outputs is not None:
            return self._chat_delta(choice, delta, self._outputs[choice.index])
        if delta.logprobs is None and delta.finish_reason is None and self._is_plain:
            if not delta.text:
                return b""
            prefix = self._prefixes.get(choice.index) or self._prefix(choice)
            return prefix + _encode(delta.text) + self._suffix
        body: Document = (
            {"delta": {"content": delta.text} if delta.text else {}}
            if self._shape.is_chat
            else {"text": delta.text}
        )
        if self._shape.has_token_ids:
            body["token_ids"] = list(delta.token_ids)
        logprobs = None if delta.logprobs is None else self._logprobs.form(choice, delta.logprobs)
        return self._event(choice, body, logprobs, delta.finish_reason)

    def _chat_delta(self, choice: Choice, delta: Delta, output: ChatOutput) -> bytes:
        """The events of one delta of text that has parts."""
        bodies = output.deltas(delta.text, is_last=delta.finish_reason is not None)
        finish = output.finish_reason(delta.finish_reason)
        logprobs = None if delta.logprobs is None else self._logprobs.form(choice, delta.logprobs)
        if not bodies and (finish or logprobs or self._shape.has_token_ids):
            bodies = [{}]
        events = b""
        for number, body in enumerate(bodies, 1):
            document: Document = {"delta": body}
            if self._shape.has_token_ids:
                document["token_ids"] = list(delta.token_ids) if number == 1 else []
            is_last = number == len(bodies)
            events += self._event(choice, document, logprobs, finish if is_last else None)
            logprobs = None
        return events

    def usage(self, generation: Generation) -> bytes:
        """The one event with the usage, behind all others; empty unless the client asked."""
        if not self._shape.has_usage:
            return b""
        head = self._shape.head(self._kind)
        return event({**head, "choices": [], "usage": usage_of(generation)})

    def _prefix(self, choice: Choice) -> bytes:
        head = _encode(self._shape.head(self._kind))[:-1]
        text = b'"delta":{"content":' if self._shape.is_chat else b'"text":'
        prefix = b'data: %b,"choices":[{"index":%d,%b' % (head, choice.index, text)
        self._prefixes[choice.index] = prefix
        return prefix

    def _event(
        self, choice: Choice, body: Document, logprobs: Document | None, finish: str | None
    ) -> bytes:
        content = {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": finish}
        document = {**self._shape.head(self._kind), "choices": [content]}
        if self._shape.has_usage:
            document["usage"] = None
        return event(document)


# -- whole responses -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Output:
    """A choice's deltas so far. One object for each of them would make garbage collections long."""

    texts: list[str] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None


class Collector:
    """The sink of a response that is sent whole: every choice's deltas, joined at the end."""

    def __init__(self, num_choices: int) -> None:
        self._outputs: Final = [_Output() for _ in range(num_choices)]

    def sink(self, choice: Choice, delta: Delta) -> None:
        """Add a delta to its choice."""
        output = self._outputs[choice.index]
        output.texts.append(delta.text)
        output.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs += delta.logprobs
        output.finish_reason = delta.finish_reason

    def joined(self, choice: Choice) -> Delta:
        """A finished choice as one delta."""
        output = self._outputs[choice.index]
        text = "".join(output.texts)
        return Delta(text, output.token_ids, output.logprobs, output.finish_reason)


def whole_response(
    shape: Shape,
    generation: Generation,
    collector: Collector,
    echoed: Sequence[str],
    outputs: Sequence[ChatOutput] | None = None,
) -> bytes:
    """The document of a response without streaming; `echoed` prompts by choice, or empty."""
    form = _logprob_form(shape, generation.vocabulary)
    choices = []
    for choice in generation.choices:
        joined = collector.joined(choice)
        text = (echoed[choice.index] if echoed else "") + joined.text
        content: Document = {"index": choice.index}
        reason = joined.finish_reason
        if outputs is not None:
            content["message"] = outputs[choice.index].message(text)
            reason = outputs[choice.index].finish_reason(reason)
        elif shape.is_chat:
            content["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            content["text"] = text
        prompt = generation.plan.prompts[choice.index // generation.plan.num_choices]
        logprobs: Document | None = None
        if joined.logprobs is not None:
            logprobs = {}
            if echoed:
                form.begin_behind(choice, echoed[choice.index])
                for stride in form.prompt_columns(choice, prompt, echoed[choice.index]):
                    _extend(logprobs, stride)
            _extend(logprobs, form.form(choice, joined.logprobs))
        content |= {"logprobs": logprobs, "finish_reason": reason}
        if shape.has_token_ids:
            content["token_ids"] = list(joined.token_ids)
            content["prompt_token_ids"] = prompt.tolist()
        if shape.num_prompt_logprobs >= 0 and not shape.is_chat:
            content["prompt_logprobs"] = form.prompt_dicts(choice, shape.num_prompt_logprobs)
        choices.append(msgspec.Raw(_encode(content)))  # in a thread, others run between them
    kind = "chat.completion" if shape.is_chat else "text_completion"
    document = {**shape.head(kind), "choices": choices, "usage": usage_of(generation)}
    if shape.num_prompt_logprobs >= 0 and shape.is_chat:  # one prompt, whatever n is
        first = generation.choices[0]
        document["prompt_logprobs"] = form.prompt_dicts(first, shape.num_prompt_logprobs)
    return _encode(document)


def _logprob_form(shape: Shape, vocabulary: Vocabulary) -> LogprobForm:
    return LogprobForm(vocabulary, is_chat=shape.is_chat, echoes_special=shape.echoes_special)


def _extend(columns: Document, more: Document) -> None:
    """Put what is more of each column behind it."""
    for name, values in more.items():
        columns.setdefault(name, []).extend(values)


def is_laborious(generation: Generation) -> bool:
    """Whether the whole response takes long to make: one with the logprobs of many tokens."""
    num_scores = sum(choice.num_scored for choice in generation.choices)
    if generation.needs_logprobs:
        num_scores += sum(choice.num_output_tokens for choice in generation.choices)
    return num_scores > INLINE_SCORES


def usage_of(generation: Generation) -> Document:
    """Token counts; a prompt counts once, however many choices it has."""
    firsts = generation.choices[:: generation.plan.num_choices]
    num_prompt = sum(choice.num_prompt_tokens for choice in firsts)
    num_output = sum(choice.num_output_tokens for choice in generation.choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in firsts)},
    }
