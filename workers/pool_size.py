"""How many KV blocks a pool gets when nobody asked for a number. Free of torch."""

from typing import Final

from nvserve.protocol.config import Config
from nvserve.workers.step_result import ModelRefused

TOKENS_PER_REQUEST: Final = 1024  # room for max_num_seqs requests of this length,
WHOLE_CONTEXTS: Final = 4  # and for at least this many of the longest


def num_wanted_blocks(config: Config) -> int:
    """Usable blocks that serve the limits of the launch well, where memory does not matter."""
    num_tokens = max(
        config.max_num_seqs * min(TOKENS_PER_REQUEST, config.max_model_len),
        WHOLE_CONTEXTS * config.max_model_len,
    )
    return -(-num_tokens // config.block_size)


def with_scratch(config: Config, num_usable: int) -> int:
    """The pool's size, scratch block included; ModelRefused when no whole request fits."""
    needed = -(-config.max_model_len // config.block_size)
    if num_usable < needed:
        raise ModelRefused(
            f"only {num_usable} KV blocks fit in memory, one request of --max-model-len"
            f" {config.max_model_len} needs {needed}"
        )
    return num_usable + 1
