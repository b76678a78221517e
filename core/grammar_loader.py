"""When the grammar compiler is imported and loaded: before the first request, or with a grammar.

Loading a large vocabulary holds the interpreter for a second, in which no stream of core's goes on.
A server's first core has the time, since weights take longer; one that follows a death has not, and
loads what a grammar needs when one comes. Knows no request.
"""

import threading
from typing import TYPE_CHECKING, Final

from nvserve.core.constraint import Matcher
from nvserve.core.errors import RequestRefused
from nvserve.protocol.config import Config

if TYPE_CHECKING:
    from nvserve.core.grammar import GrammarCompiler


class GrammarLoader:
    """The one compiler of a process; safe to use from several threads."""

    def __init__(self, config: Config) -> None:
        self._config: Final = config
        self._lock: Final = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def load(self) -> None:
        """Be ready for the first grammar; a tokenizer that does not serve is told in the log."""
        if self._config.device == "sim":  # has no logits, and so no grammars
            return
        try:
            self._loaded().load_tokenizer()
        except RequestRefused:
            return  # said already; each request with a grammar is refused by the same words

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
