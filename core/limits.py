"""The few values of Config that scheduling depends on."""

from dataclasses import dataclass

from nvserve.protocol.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds requests and steps; token counts unless named otherwise."""

    vocab_size: int
    max_model_len: int  # prompt + output of one request
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # budget of one step
    max_queued_requests: int
    block_size: int
    eos_token_ids: frozenset[int] = frozenset()
    has_prefix_cache: bool = True
    max_bypasses: int = 32  # younger requests that may overtake one that waits for blocks

    @staticmethod
    def of(config: Config) -> "Limits":
        return Limits(
            vocab_size=config.facts.vocab_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queued_requests=config.max_queued_requests,
            block_size=config.block_size,
            eos_token_ids=frozenset(config.facts.eos_token_ids),
            has_prefix_cache=config.enable_prefix_caching,
        )
