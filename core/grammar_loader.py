"""When the grammar compiler is imported and loaded: so that no grammar and no stream waits for it.

Loading a large vocabulary holds the interpreter for a second, in which no stream of core's goes on.
A server's first core has the time before it serves, since weights take longer. One that follows a
death has not: it loads in its first quiet moment, or soon all the same. Knows no request.
"""

import threading
from typing import TYPE_CHECKING, Final

from nvserve.core.constraint import Matcher
from nvserve.core.errors import RequestRefused
from nvserve.protocol.config import Config

if TYPE_CHECKING:
    from nvserve.core.grammar import GrammarCompiler

QUIET_S: Final = 0.5  # without a request, before it is taken for a quiet moment
BUSY_LIMIT_S: Final = 10.0  # a core that is never quiet loads after this time


class GrammarLoader:
    """The one compiler of a process; safe to use from several threads."""

    def __init__(self, config: Config) -> None:
        self._config: Final = config
        self._lock: Final = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._has_begun = False  # or is done
        self._serving_s = self._busy_s = 0.0  # when core was first, and last, told to be so

    def load(self) -> None:
        """Be ready for the first grammar; a tokenizer that does not serve is told in the log."""
        self._has_begun = True
        if self._config.device == "sim":  # has no logits, and so no grammars
            return
        try:
            self._loaded().load_tokenizer()
        except RequestRefused:
            return  # said already; each request with a grammar is refused by the same words

    def load_soon(self, now_s: float, *, is_busy: bool) -> None:
        """Told in each turn of a core that serves: load in a thread when the moment has come."""
        if self._has_begun:
            return
        self._serving_s = self._serving_s or now_s
        if is_busy or not self._busy_s:
            self._busy_s = now_s
        if now_s - self._busy_s >= QUIET_S or now_s - self._serving_s >= BUSY_LIMIT_S:
            self._has_begun = True
            threading.Thread(target=self.load, name="grammar-loader", daemon=True).start()

    def compile(self, grammar: str) -> Matcher:
        """A fresh matcher, or RequestRefused with the reason."""
        return self._loaded().compile(grammar)

    def _loaded(self) -> "GrammarCompiler":
        with self._lock:
            if self._compiler is None:
                # A shared library of its own, which a core without grammars does without.
                from nvserve.core.grammar import GrammarCompiler

                self._compiler = GrammarCompiler(
                    self._config.model,
                    vocab_size=self._config.facts.vocab_size,
                    eos_token_ids=self._config.facts.eos_token_ids,
                )
            return self._compiler
