"""Compiles grammars into matchers: which token ids may follow, one request at a time.

Owns the tokenizer's form for the compiler, loaded on its first use, and a cache of compiled
ones. `GrammarCompiler.compile` is called in helper threads (CompileQueue). Knows no request.
"""

import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from nvserve.core.errors import RequestRefused
from nvserve.core.grammar_lark import to_lark
from nvserve.core.grammar_limits import (
    COMPILER_LIMITS,
    FREE_S,
    MAX_MEAN_TOKEN_S,
    MAX_TOKEN_S,
    NUM_TRIAL_TOKENS,
    STACK_BYTES,
)
from nvserve.protocol.grammars import BadGrammar
from nvserve.protocol.messages import RefusalKind

logger = logging.getLogger(__name__)

CACHE_ENTRIES: Final = 64  # compiled grammars, and refusals; up to a few MB each
GIVE_UP_S: Final = 60.0  # no grammar within the limits takes a hundredth of it
MAX_REASON_CHARS: Final = 400  # of the compiler's message, which quotes the grammar

_QUOTE: Final = re.compile(r"\n\s*\d+ \| ")  # where lines of the grammar follow, ours among them
_STACK_LOCK: Final = threading.Lock()


class GrammarMatcher:
    """A compiled grammar, behind the ids it was advanced over. Not for use by two threads."""

    __slots__ = ("_free_s", "_matcher", "_num_bytes", "_slow")

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._matcher: Final = matcher
        self._num_bytes: Final = num_bytes  # of the mask
        self._slow = False  # a token, or all together, took too much CPU time
        self._free_s = FREE_S  # CPU time left

    def mask(self) -> bytes:
        """The ids that may follow: int32 [ceil(vocab / 32)], least bit first, at least one set.

        End-of-sequence ids are among them exactly when the text is complete, or the matcher is
        over. Ids without a token never are.
        """
        started_s = time.thread_time()
        mask: bytes = self._matcher.compute_bitmask()
        self._pay(started_s)
        return mask[: self._num_bytes].ljust(self._num_bytes, b"\0")

    def advance(self, token_id: int) -> None:
        """Take an id; one that the mask does not allow makes the matcher over, with an error."""
        started_s = time.thread_time()
        self._matcher.consume_token(token_id)
        self._free_s += MAX_MEAN_TOKEN_S
        self._pay(started_s)

    @property
    def is_over(self) -> bool:
        """Nothing may follow: the text is complete, or the grammar cannot go on."""
        return self._slow or bool(self._matcher.is_stopped())

    @property
    def is_complete(self) -> bool:
        """What was taken so far is a whole text of the grammar."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can, and when it is complete."""
        if self._slow:
            return "the grammar costs too much time a token"
        return _shortened(self._matcher.get_error())

    def copy(self) -> "GrammarMatcher":
        """The same place in the same grammar; costs microseconds."""
        return GrammarMatcher(self._matcher.deep_copy(), self._num_bytes)

    def _pay(self, started_s: float) -> None:
        spent_s = time.thread_time() - started_s
        self._free_s -= spent_s
        self._slow |= spent_s > MAX_TOKEN_S or self._free_s < 0


class GrammarCompiler:
    """Grammars for one model; safe to call from several threads.

    `vocab_size` is the model's, which may exceed the tokenizer's.
    """

    def __init__(self, model: str, *, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._path: Final = Path(model) / "tokenizer.json"
        self._vocab_size: Final = vocab_size
        self._eos_token_ids: Final = sorted(set(eos_token_ids))
        self._tokenizer: LLTokenizer | RequestRefused | None = None
        self._tokenizer_lock: Final = threading.Lock()
        self._cache: Final[OrderedDict[str, GrammarMatcher | str]] = OrderedDict()  # oldest first
        self._cache_lock: Final = threading.Lock()

    def compile(self, grammar: str) -> GrammarMatcher:
        """A fresh matcher, or RequestRefused with the reason. Deterministic, but for memory."""
        compiled = self._cached(grammar)
        if compiled is None:
            compiled = _on_deep_stack(lambda: self._compile(grammar))
            self._remember(grammar, compiled)
        if isinstance(compiled, str):
            raise RequestRefused("grammar", f"grammar: {compiled}")
        return compiled.copy()

    def load_tokenizer(self) -> LLTokenizer:
        """The tokenizer, loaded once; RequestRefused where the model has none that serves.

        Loading holds the interpreter for 0.3 s or more with a large vocabulary.
        """
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            if isinstance(self._tokenizer, RequestRefused):
                raise self._tokenizer
            return self._tokenizer

    def _load(self) -> LLTokenizer | RequestRefused:
        try:
            source = self._path.read_text("utf-8")
            return LLTokenizer(
                source, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
            )
        except (OSError, ValueError) as error:
            logger.warning("no grammars: %s does not serve: %s", self._path, error)
            return RequestRefused(
                "grammar",
                "grammar: structured output is not available with this model's tokenizer",
                RefusalKind.INVALID,
            )

    def _compile(self, grammar: str) -> GrammarMatcher | str:
        """A matcher at its start, or why there is none."""
        tokenizer = self.load_tokenizer()
        try:
            lark = to_lark(grammar)
        except BadGrammar as error:
            return str(error)
        compiled = LLMatcher(tokenizer, lark, log_level=0, limits=COMPILER_LIMITS)
        matcher = GrammarMatcher(compiled, 4 * -(-self._vocab_size // 32))
        reason = matcher.error or _try(matcher.copy())
        return _reason(reason) if reason else matcher

    # -- cache -----------------------------------------------------------------------------------

    def _cached(self, grammar: str) -> GrammarMatcher | str | None:
        with self._cache_lock:
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
            return compiled

    def _remember(self, grammar: str, compiled: GrammarMatcher | str) -> None:
        with self._cache_lock:
            self._cache[grammar] = compiled
            self._cache.move_to_end(grammar)
            if len(self._cache) > CACHE_ENTRIES:
                self._cache.popitem(last=False)


def _on_deep_stack(compile_grammar: Callable[[], GrammarMatcher | str]) -> GrammarMatcher | str:
    """Run the compiler, which recurses as deeply as a grammar nests, where that cannot overflow."""
    outcome: Future[GrammarMatcher | str] = Future()

    def run() -> None:
        try:
            outcome.set_result(compile_grammar())
        except BaseException as error:
            outcome.set_exception(error)

    with _STACK_LOCK:  # the size is the process's, and counts when a thread starts
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar-compiler", daemon=True).start()
        finally:
            threading.stack_size(before)
    try:
        return outcome.result(GIVE_UP_S)
    except TimeoutError as error:
        raise RequestRefused("grammar", "grammar: takes too long to compile") from error


def _try(matcher: GrammarMatcher) -> str:
    """Take some tokens; why that fails, else nothing.

    The first masks build much of the lexer: here, not in core's loop.
    """
    for turn in range(NUM_TRIAL_TOKENS):
        mask = int.from_bytes(matcher.mask(), "little")
        if matcher.is_over:
            break
        first, last = (mask & -mask).bit_length() - 1, mask.bit_length() - 1
        matcher.advance(first if turn % 2 else last)
    return matcher.error


def _reason(error: str) -> str:
    """The compiler's message for a client."""
    if "NoExtension" in error:
        return "no text can match it"
    if "panic" in error:
        return "is too large for the compiler"
    return f"is not valid: {_shortened(_QUOTE.split(error)[0])}"


def _shortened(error: str) -> str:
    error = " ".join(error.replace("<non-verbose/>", "").split())
    return error if len(error) <= MAX_REASON_CHARS else error[:MAX_REASON_CHARS] + "..."
