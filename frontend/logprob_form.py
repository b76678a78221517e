"""Logprobs as OpenAI's documents have them: entries of a chat, columns of a completion.

Knows where in the text each token lies; sends nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from nvserve.frontend.detokenizer import Vocabulary
from nvserve.frontend.generation import Choice
from nvserve.protocol.client_messages import TokenLogprob

MIN_LOGPROB: Final = -9999.0  # JSON has no infinity
STRIDE_TOKENS: Final = 64  # of a prompt; half a millisecond or, with many alternatives, one

Document = dict[str, Any]


class LogprobForm:
    """Logprobs in the endpoint's form; keeps each choice's place in its text between chunks.

    A token is as wide as what it adds to the text: the last one of a character has all of it.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, is_chat: bool, echoes_special: bool = False
    ) -> None:
        """`echoes_special`: an echo is of ids, and has the special tokens among them."""
        self._vocabulary: Final = vocabulary
        self._skips_special: Final = not echoes_special
        self._is_chat: Final = is_chat
        self._offsets: dict[int, int] = {}
        self._feeds: dict[int, Callable[[int], str]] = {}

    def form(self, choice: Choice, logprobs: Iterable[TokenLogprob]) -> Document:
        """The document of some consecutive tokens."""
        if self._is_chat:
            return {"content": [self._chat_entry(entry) for entry in logprobs]}
        if choice.index not in self._feeds:
            self._feeds[choice.index] = choice.new_detokenizer().feed
        feed, offset = self._feeds[choice.index], self._offsets.get(choice.index, 0)
        entries, offsets = list(logprobs), []
        for entry in entries:
            offsets.append(offset)
            offset += len(feed(entry.token_id))
        self._offsets[choice.index] = offset
        return self._columns(entries) | {"text_offset": offsets}

    def begin_behind(self, choice: Choice, echoed: str) -> None:
        """The choice's text begins with its prompt."""
        self._offsets[choice.index] = len(echoed)

    def prompt_columns(
        self, choice: Choice, prompt: Sequence[int], echoed: str
    ) -> Iterator[Document]:
        """The columns of an echoed prompt in strides of STRIDE_TOKENS, each when it is asked for.

        The first token has nothing before it, and so no score.
        """
        assert choice.scores is not None, "an echo with logprobs has scores"
        entries = choice.scores.entries(choice.num_tops)
        offsets = self._echo_offsets(prompt, echoed)
        first = {
            "tokens": [self._text(prompt[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
        }
        yield first | {"text_offset": [next(offsets)]}
        while stride := list(islice(entries, STRIDE_TOKENS)):
            yield self._columns(stride) | {"text_offset": list(islice(offsets, len(stride)))}

    def _echo_offsets(self, prompt: Sequence[int], echoed: str) -> Iterator[int]:
        """Special tokens are in a text where the client wrote them; the others were added."""
        vocabulary = self._vocabulary
        feed = vocabulary.detokenizer((), skip_special=self._skips_special, is_start=True).feed
        offset = 0
        for token_id in prompt:
            yield offset
            text = feed(token_id)
            if token_id in vocabulary.special_ids and echoed.startswith(
                name := self._text(token_id), offset
            ):
                text = name
            offset = min(offset + len(text), len(echoed))  # a tokenizer may change its text

    def prompt_dicts(self, choice: Choice, num_tops: int) -> list[Document | None]:
        """By prompt token, its own logprob and the best ones, by token id; null for the first."""
        assert choice.scores is not None, "only for requests with prompt_logprobs"
        return [None, *map(self._by_id, choice.scores.entries(num_tops))]

    def _by_id(self, entry: TokenLogprob) -> Document:
        named: Document = {}
        for rank, (token_id, logprob) in enumerate(
            zip(entry.top_ids, entry.top_logprobs, strict=True), 1
        ):
            named[str(token_id)] = self._ranked(token_id, logprob, rank)
        named.setdefault(str(entry.token_id), self._ranked(entry.token_id, entry.logprob, None))
        return named

    def _ranked(self, token_id: int, logprob: float, rank: int | None) -> Document:
        return {
            "logprob": max(logprob, MIN_LOGPROB),
            "rank": rank,  # null: behind those that were asked for
            "decoded_token": self._text(token_id),
        }

    def _chat_entry(self, entry: TokenLogprob) -> Document:
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        return {
            **self._named(entry.token_id, entry.logprob),
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in tops],
        }

    def _named(self, token_id: int, logprob: float) -> Document:
        piece = self._vocabulary.token_bytes(token_id)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(piece),
        }

    def _columns(self, entries: Sequence[TokenLogprob]) -> Document:
        return {
            "tokens": [self._text(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in entries],
            "top_logprobs": [self._top_dict(entry) for entry in entries],
        }

    def _top_dict(self, entry: TokenLogprob) -> dict[str, float] | None:
        if not entry.top_ids:
            return None
        named: dict[str, float] = {}
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            named.setdefault(self._text(token_id), max(logprob, MIN_LOGPROB))  # best one first
        named.setdefault(self._text(entry.token_id), max(entry.logprob, MIN_LOGPROB))
        return named

    def _text(self, token_id: int) -> str:
        return self._vocabulary.token_bytes(token_id).decode("utf-8", "replace")
