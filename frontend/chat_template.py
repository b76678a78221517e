"""A model's chat template: messages -> prompt text, in jinja2's sandbox, by Hugging Face's rules.

The template comes with the model and never from a request. A failure to render is the client's
error: the template refuses the messages, or cannot handle their shape.
"""

import datetime
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nvserve.frontend.errors import ApiError, StartFailure, invalid

MAX_RENDERED_CHARS: Final = 16 << 20
MAX_RENDER_S: Final = 2.0  # of CPU time


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text; serving ignores it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(Exception):
    """The template called raise_exception."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(template: str) -> str:
    return datetime.datetime.now().strftime(template)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML, which would change the prompt."""
    separators = more.get("separators")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,
        sort_keys=bool(more.get("sort_keys", False)),
    )


class ChatTemplate:
    """One compiled template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise StartFailure(
                f"chat template, line {error.lineno}: {error.message}; repair or remove it"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self.knows_tools: Final = "tools" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt text; a 400 when the template refuses or cannot render the messages."""
        chat = [self._adapt(message) for message in messages]
        given = {
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            try:
                return _joined_in_time(self._template.generate(messages=chat, **given))
            except (TypeError, jinja2.UndefinedError):
                # Of None, perhaps: a turn of calls has no content.
                if all(message.get("content") is not None for message in chat):
                    raise
                filled = [message | {"content": message.get("content") or ""} for message in chat]
                return _joined_in_time(self._template.generate(messages=filled, **given))
        except ApiError:
            raise
        except _Refusal as error:
            raise invalid("messages", f"refused by the chat template: {error}") from error
        except Exception as error:  # a template may raise anything; none of it is our fault
            raise invalid("messages", "the chat template cannot render these messages") from error

    def _adapt(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Name the developer's role as the template does: most know it as system."""
        adapted = dict(message)
        if adapted["role"] == "developer" and not self._knows_developer:
            adapted["role"] = "system"
        return adapted


def _joined_in_time(pieces: Iterator[str]) -> str:
    """The text of a template at work, or a 400 when there is too much of it or it takes long."""
    begun_s = time.thread_time()
    taken: list[str] = []
    num_chars = 0
    for piece in pieces:
        taken.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise invalid("messages", f"render to more than {MAX_RENDERED_CHARS} characters")
        if time.thread_time() - begun_s > MAX_RENDER_S:
            raise invalid("messages", f"take more than {MAX_RENDER_S:g} s to render")
    return "".join(taken)
