"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share, for one tensor-parallel rank.

Q, K, V, gate and up are cut by columns, the output and down projections by rows, whose results are
each rank's part of a sum; the embedding and the head are cut along the vocabulary.

T tokens in the step, N hidden size, H query heads and K KV heads on this rank, D head size, I
feed-forward features on this rank, V vocabulary rows on this rank.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from nvserve.kernels.attention import AttentionBackend, NewTokens, fused_decode
from nvserve.kernels.matmul import adds_in_matmul, linear, linear_add, linear_silu_mul
from nvserve.kernels.norm import add_rms_norm, embed_rms_norm, rms_norm
from nvserve.kernels.rope import qk_norm_rope_cache
from nvserve.workers.kv_cache import KvCache
from nvserve.workers.models.config import DecoderConfig, Shard
from nvserve.workers.models.layers import (
    Parameter,
    StepInputs,
    attend,
    part,
    rotary_table,
    whole,
)
from nvserve.workers.parallel import TensorParallel

# Where the ranks' parts of a sum are written; no two that follow each other are the same.
EMBEDDED: Final = 0
MIXED: Final = 1
FED: Final = 2
NUM_PLACES: Final = 3


@dataclass
class Layer:
    """The weights of one layer on this rank; a bias that the family lacks is None."""

    input_norm: torch.Tensor  # [N]
    qkv: torch.Tensor  # [(H + 2 K) * D, N]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None
    output: torch.Tensor  # [N, H * D]
    output_bias: torch.Tensor | None  # [N], added once, after the all-reduce
    feed_norm: torch.Tensor  # [N]
    gate_up: torch.Tensor  # [2 * I, N]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [N, I]
    down_bias: torch.Tensor | None  # like output_bias


class Decoder:
    """One rank's decoder: uninitialized weights until a loader has filled `parameters`."""

    def __init__(
        self,
        config: DecoderConfig,
        parallel: TensorParallel,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.shard = Shard(config, parallel.rank, parallel.size)
        self.device = device
        self.dtype = dtype
        self.parallel = parallel
        self.embedding = self._zeros(self.shard.vocab_width, config.hidden_size)
        self.head = self.embedding if config.is_tied else torch.zeros_like(self.embedding)
        self.layers = [self._make_layer() for _ in range(config.num_layers)]
        self.final_norm = self._empty(config.hidden_size)
        self.rotary = rotary_table(config.rope, config.head_dim, max_positions, device)
        self.scale = config.head_dim**-0.5

    def forward(
        self, inputs: StepInputs, cache: KvCache, backend: AttentionBackend
    ) -> torch.Tensor:
        """Normalized hidden states [T, N]; writes the step's K and V to the cache."""
        x, residual = self._embed(inputs.tokens)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            x = self._attention(layer, x, inputs, cache.layers[index], backend)
            project = (layer.output, layer.output_bias, MIXED)
            x = self._project_and_norm(x, *project, residual, layer.feed_norm)
            x = linear_silu_mul(x, layer.gate_up, layer.gate_up_bias)
            project = (layer.down, layer.down_bias, FED)
            x = self._project_and_norm(x, *project, residual, next_norm)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, N] -> [R, V] of this rank's vocabulary shard; padding is -inf."""
        logits = linear(hidden, self.head)
        if self.shard.num_token_ids < self.shard.vocab_width:
            logits[:, self.shard.num_token_ids :] = float("-inf")
        return logits

    def _embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first layer reads, normalized, and as the residual; [T, N] each."""
        norm, eps = self.layers[0].input_norm, self.config.norm_eps
        if self.shard.size == 1:
            return embed_rms_norm(tokens, self.embedding, norm, eps)
        local = tokens - self.shard.first_token_id
        is_here = (local >= 0) & (local < self.shard.num_token_ids)
        rows = F.embedding(torch.where(is_here, local, 0), self.embedding)
        place = self.parallel.place(EMBEDDED, len(rows))
        residual = self.parallel.all_reduce(torch.mul(rows, is_here[:, None], out=place))
        return rms_norm(residual, norm, eps), residual

    def _attention(
        self,
        layer: Layer,
        x: torch.Tensor,
        inputs: StepInputs,
        cache: tuple[torch.Tensor, torch.Tensor],
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """What this rank's heads mixed, [T, H * D]."""
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        norms = (layer.q_norm, layer.k_norm, self.config.norm_eps)
        fused = fused_decode(backend, len(x)) if inputs.prefill is None else None
        if fused is not None:
            assert inputs.decode is not None, "a step without tokens runs no model"
            new = NewTokens(qkv, self.rotary, *norms)
            mixed = fused(new, *cache, inputs.decode, self.scale)
        else:
            q = qk_norm_rope_cache(
                qkv,
                inputs.positions,
                self.rotary,
                *norms,
                *cache,
                inputs.slot_mapping,
                self.shard.num_heads,
                self.shard.num_kv_heads,
            )
            mixed = attend(q, cache, inputs, backend, self.scale)
        return mixed.flatten(1)

    def _project_and_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        place: int,
        residual: torch.Tensor,
        norm: torch.Tensor,
    ) -> torch.Tensor:
        """Normalized residual [T, N], after all ranks' parts of the projection were added to it."""
        parallel, eps = self.parallel, self.config.norm_eps
        if bias is None and parallel.size == 1 and adds_in_matmul(x):
            return rms_norm(linear_add(x, weight, residual), norm, eps)
        part = linear(x, weight, out=parallel.place(place, len(x)))
        if bias is None:
            return parallel.all_reduce_add_rms_norm(part, residual, norm, eps)[0]
        return add_rms_norm(parallel.all_reduce(part) + bias, residual, norm, eps)[0]

    # -- weights -------------------------------------------------------------------------------

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def _zeros(self, *shape: int) -> torch.Tensor:
        """For the vocabulary: what no parameter fills is padding."""
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def _make_layer(self) -> Layer:
        config, shard, empty = self.config, self.shard, self._empty
        hidden, head_dim, width = config.hidden_size, config.head_dim, shard.intermediate_size
        num_qkv = (shard.num_heads + 2 * shard.num_kv_heads) * head_dim
        return Layer(
            input_norm=empty(hidden),
            qkv=empty(num_qkv, hidden),
            qkv_bias=empty(num_qkv) if config.has_qkv_bias else None,
            q_norm=empty(head_dim) if config.has_qk_norm else None,
            k_norm=empty(head_dim) if config.has_qk_norm else None,
            output=empty(hidden, shard.num_heads * head_dim),
            output_bias=empty(hidden) if config.has_output_bias else None,
            feed_norm=empty(hidden),
            gate_up=empty(2 * width, hidden),
            gate_up_bias=empty(2 * width) if config.has_mlp_bias else None,
            down=empty(hidden, width),
            down_bias=empty(hidden) if config.has_mlp_bias else None,
        )

    def parameters(self) -> list[Parameter]:
        """Every tensor of the checkpoint, under its name there, and where its shard goes."""
        shard, vocab_size = self.shard, self.config.vocab_size
        first, width = shard.first_token_id, shard.num_token_ids
        names = [("model.embed_tokens.weight", self.embedding)]
        if not self.config.is_tied:
            names.append(("lm_head.weight", self.head))
        found = [part(name, table[:width], 0, first, vocab_size) for name, table in names]
        found.append(whole("model.norm.weight", self.final_norm))
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            found.append(whole(prefix + "input_layernorm.weight", layer.input_norm))
            found.append(whole(prefix + "post_attention_layernorm.weight", layer.feed_norm))
            found += self._attention_parameters(prefix + "self_attn.", layer)
            found += self._feed_parameters(prefix + "mlp.", layer)
        return found

    def _attention_parameters(self, prefix: str, layer: Layer) -> list[Parameter]:
        config, shard, dim = self.config, self.shard, self.config.head_dim
        num_q, num_kv = shard.num_heads * dim, shard.num_kv_heads * dim
        full_q, full_kv = config.num_heads * dim, config.num_kv_heads * dim
        first_q, first_kv = shard.rank * num_q, shard.first_kv_head * dim
        rows = (  # projection, its rows of the fused weight, their first among how many in all
            ("q_proj", slice(0, num_q), first_q, full_q),
            ("k_proj", slice(num_q, num_q + num_kv), first_kv, full_kv),
            ("v_proj", slice(num_q + num_kv, None), first_kv, full_kv),
        )
        found = []
        for name, here, start, full in rows:
            found.append(part(f"{prefix}{name}.weight", layer.qkv[here], 0, start, full))
            if layer.qkv_bias is not None:
                found.append(part(f"{prefix}{name}.bias", layer.qkv_bias[here], 0, start, full))
        found.append(part(prefix + "o_proj.weight", layer.output, 1, first_q, full_q))
        if layer.output_bias is not None:
            found.append(whole(prefix + "o_proj.bias", layer.output_bias))
        if layer.q_norm is not None and layer.k_norm is not None:
            found.append(whole(prefix + "q_norm.weight", layer.q_norm))
            found.append(whole(prefix + "k_norm.weight", layer.k_norm))
        return found

    def _feed_parameters(self, prefix: str, layer: Layer) -> list[Parameter]:
        width, full = self.shard.intermediate_size, self.config.intermediate_size
        start = self.shard.rank * width
        found = [part(prefix + "down_proj.weight", layer.down, 1, start, full)]
        if layer.down_bias is not None:
            found.append(whole(prefix + "down_proj.bias", layer.down_bias))
        for name, here in (("gate_proj", slice(0, width)), ("up_proj", slice(width, None))):
            found.append(part(f"{prefix}{name}.weight", layer.gate_up[here], 0, start, full))
            if layer.gate_up_bias is not None:
                found.append(part(f"{prefix}{name}.bias", layer.gate_up_bias[here], 0, start, full))
        return found
