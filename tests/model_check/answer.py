"""What a request must get, worked out without batch, blocks or steps."""

from model_check.fake_worker import next_token
from nvserve.core.limits import Limits
from nvserve.protocol.messages import FinishReason, Submit, unpack_ids


class EveryThird:
    """A grammar: the id at output index i is i modulo 3, or the end from index 4 on; 9 at most."""

    error = ""

    def __init__(self, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids
        self.num_tokens = 0
        self.is_over = False

    def allows(self, token: int) -> bool:
        if token in self.stop_ids:
            return self.num_tokens >= 4
        return token % 3 == self.num_tokens % 3

    def mask(self) -> bytes:
        assert not self.is_over
        bits = sum(1 << token for token in range(self.vocab_size) if self.allows(token))
        return bits.to_bytes(4 * -(-self.vocab_size // 32), "little")

    def advance(self, token_id: int) -> None:
        assert self.allows(token_id), f"{token_id} at {self.num_tokens}"
        self.num_tokens += 1
        self.is_over = token_id in self.stop_ids or self.num_tokens == 9


def completes_a_word(words: list[list[int]], tokens: list[int], token: int) -> bool:
    """Would this id be the last of a forbidden word of several ids?"""
    text = [*tokens, token]
    return any(len(word) > 1 and text[-len(word) :] == word for word in words)


def reference(submit: Submit, limits: Limits) -> tuple[list[int], FinishReason]:
    """All tokens the request must get when nobody ends it from outside, and why it ends."""
    sampling = submit.sampling
    tokens = unpack_ids(submit.prompt)
    stop_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids |= limits.eos_token_ids
    max_output = min(sampling.max_tokens, limits.max_model_len - len(tokens))
    output: list[int] = []
    grammar = EveryThird(limits.vocab_size, limits.eos_token_ids) if sampling.grammar else None

    def is_allowed(token: int) -> bool:
        if completes_a_word(sampling.bad_words, tokens + output, token):
            return False
        is_ignored = sampling.ignore_eos and token in limits.eos_token_ids - stop_ids
        return grammar is None or (grammar.allows(token) and not is_ignored)

    while len(output) < max_output:
        output.append(next_token(tokens + output, submit.seed, limits.vocab_size, is_allowed))
        if output[-1] in stop_ids and len(output) >= sampling.min_tokens:
            return output, FinishReason.STOP
        if grammar is not None:
            grammar.advance(output[-1])
            if grammar.is_over:
                return output, FinishReason.STOP
    return output, FinishReason.LENGTH
