"""From logits to token ids: noise keyed by (seed, position, token id), truncation, penalties.

The noise of a token depends on nothing else, so a row samples the same token beside any
neighbours, in any slot, after a preemption or a restart, and whatever the number of ranks.

**Noise.** Gumbel, from Philox-4x32-10 with the 64-bit seed as key and (id // 4, position, 0) as
counter; lane id % 4. The largest logit / temperature + noise is a sample of the softmax.
**Greedy.** A temperature under 1e-5 takes the largest logit. Ties go to the lowest id.
**Truncation**, on float32 logits * (1 / temperature), by value: tokens with equal ones are kept or
dropped together, so a tie at a threshold is kept entirely and may keep more than k tokens.
  top_k  values at or above the k-th largest; off when <= 0 or >= V
  top_p  values such that what lies strictly above them has less than p of the mass that top_k
         left; off when >= 1; the largest value always stays
  min_p  values whose probability is at least min_p times the largest one; off when <= 0
A token must pass all three.

R rows of the step, V tokens of this vocabulary shard, S slots.
"""

import torch

from nvserve.kernels import reference_sampling as reference
from nvserve.kernels.dispatch import uses_triton
from nvserve.kernels.reference_sampling import GREEDY_BELOW as GREEDY_BELOW


def gumbel_argmax(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_token_id: int = 0,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest perturbed logit, float32 [R], and its global token id, int64 [R].

    Over vocabulary shards, the shard with the largest value (then the lowest id) holds the row's
    sample. logits [R, V] any float dtype, rows contiguous; temperature [R] float32; seeds and
    positions [R] int64; first_token_id is the id of column 0. With slots [R] int64, temperature and
    seeds are those of all slots [S].
    """
    if not uses_triton(logits):
        if slots is not None:
            temperature, seeds = temperature[slots], seeds[slots]
        return reference.gumbel_argmax(logits, temperature, seeds, positions, first_token_id)
    # Triton is absent from CPU-only installs, so its kernels load with their first use.
    from nvserve.kernels import sampling_triton

    arguments = (logits, temperature, seeds, positions, first_token_id, slots)
    return sampling_triton.gumbel_argmax(*arguments)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    first_token_id: int = 0,
) -> torch.Tensor:
    """One token id for each row, int64 [R], after truncation (see the module).

    logits [R, V] any float dtype, rows contiguous, the whole vocabulary; temperature, top_p and
    min_p [R] float32; top_k [R] int32; seeds and positions [R] int64. No host synchronization.
    """
    arguments = (logits, temperature, top_k, top_p, min_p, seeds, positions)
    if not uses_triton(logits):
        return reference.sample(*arguments, first_token_id=first_token_id)
    from nvserve.kernels import sampling_triton

    return sampling_triton.sample(*arguments, first_token_id=first_token_id)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under the float32 softmax of logits [R, V], whole vocabulary.

    Returns those of token_ids [R] int64, float32 [R]; and the num_top most likely tokens of each
    row: ids int64 [R, num_top] and log-probabilities float32 [R, num_top], descending.
    """
    wide = logits.float()
    total = torch.logsumexp(wide, dim=-1)
    chosen = wide.gather(1, token_ids[:, None]).squeeze(1) - total
    top_values, top_ids = wide.topk(num_top, dim=-1)
    return chosen, top_ids, top_values - total[:, None]


def apply_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Penalize in place the tokens each row has seen; returns logits [R, V].

    slots [R] int32 or int64 picks each row's line of output_counts [S, V] (int32, times emitted)
    and prompt_mask [S, V] (bool or uint8, in the prompt). repetition [R] float32 divides positive
    and multiplies other logits of tokens in the prompt or the output; then frequency [R] times the
    count, and presence [R] once, are subtracted for tokens in the output. 1, 0 and 0 change
    nothing. Columns are those of this shard in all three tables.
    """
    arguments = (logits, slots, output_counts, prompt_mask, frequency, presence, repetition)
    if not uses_triton(logits):
        return reference.apply_penalties(*arguments)
    from nvserve.kernels import penalties_triton

    return penalties_triton.apply_penalties(*arguments)


def apply_token_mask(logits: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """Set to -inf, in place, each token of logits [R, V] whose bit is 0; returns logits.

    token_mask [R, ceil(V / 32)] int32: token id is bit id % 32 of word id // 32. A row of -1 allows
    everything.
    """
    if not uses_triton(logits):
        return reference.apply_token_mask(logits, token_mask)
    from nvserve.kernels import penalties_triton

    return penalties_triton.apply_token_mask(logits, token_mask)


def count_tokens(output_counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Add one, in place, to output_counts[slot, id] for each row; ids outside [0, V) are ignored.

    With shards, pass ids less the shard's first id. Rows may share a slot.
    """
    if not uses_triton(output_counts):
        reference.count_tokens(output_counts, slots, token_ids)
        return
    from nvserve.kernels import penalties_triton

    penalties_triton.count_tokens(output_counts, slots, token_ids)
