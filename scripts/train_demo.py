"""Train the demo model and write the folder that ships in the package: weights, tokenizer, card.

    python -m nvserve.scripts.train_demo --data tinyshakespeare.txt --out scripts/demo_model

Seeded, on CPU or CUDA; two runs agree up to the device's floating-point order. Nothing of nvserve
imports this module, and it needs transformers, which serving does not.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from nvserve.scripts.demo_text import (
    ASSISTANT,
    BOS,
    EOS,
    SPECIALS,
    SYSTEM,
    USER,
    Corpus,
    encode_corpus,
    save_tokenizer,
    split_speeches,
    split_text,
    train_tokenizer,
    write_json,
)

VALIDATION_SHARE: Final = 0.05
CHAT_SHARE: Final = 0.4  # of the training rows
NUM_NOISY: Final = 8  # tokenizations with dropped merges, drawn from as often as the true one
IGNORED: Final = -100  # cross_entropy skips this target
BATCH_TOKENS: Final = 16384  # of a short step, and scored in one forward
SHORT_CONTEXT: Final = 512
LONG_CONTEXT: Final = 4096
LONG_LR_SHARE: Final = 0.15  # of the short stage's peak
EVAL_EVERY: Final = 100  # steps

# 8 query and 4 KV heads, so that the model splits over 1, 2 and 4 ranks.
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": LONG_CONTEXT,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": SPECIALS.index(BOS),
    "eos_token_id": SPECIALS.index(EOS),
    "pad_token_id": SPECIALS.index(EOS),
    "torch_dtype": "bfloat16",
}
SAMPLE_PROMPTS: Final = (
    f"{BOS}ROMEO:\n",
    f"{BOS}KING RICHARD III:\nNow",
    f"{BOS}{USER}What news, my lord?{EOS}{ASSISTANT}",
    f"{BOS}{SYSTEM}You are JULIET.{EOS}{USER}Who are you?{EOS}{ASSISTANT}",
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One cosine schedule at one context length."""

    num_steps: int
    num_rows: int
    context_tokens: int
    peak_lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Score:
    """Summed validation loss in nats."""

    nats: float
    num_tokens: int

    @property
    def per_token(self) -> float:
        return self.nats / self.num_tokens


# -- model -----------------------------------------------------------------------------------------


def build_model(dropout: float) -> Any:
    """Return a fresh Llama whose embedding, attention and MLP outputs drop out in training."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))

    def drop(module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return F.dropout(output[0], dropout, module.training), *output[1:]
        return F.dropout(output, dropout, module.training)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("embed_tokens", "self_attn", "mlp"):
            module.register_forward_hook(drop)
    return model


# -- batches and losses ----------------------------------------------------------------------------
# R rows of T + 1 tokens: inputs are the first T, targets the last T.


def draw_batch(corpora: list[Corpus], rng: np.random.Generator, stage: Stage) -> Tensor:
    """Return [R, T + 1] token ids: plain windows and chats, each from a random tokenization."""
    rows = []
    for _ in range(stage.num_rows):
        noisy = len(corpora) > 1 and rng.random() < 0.5
        corpus = corpora[int(rng.integers(1, len(corpora)))] if noisy else corpora[0]
        draw = corpus.chat_row if rng.random() < CHAT_SHARE else corpus.plain_row
        rows.append(draw(rng, num_tokens=stage.context_tokens + 1))
    return torch.tensor(rows)


def next_token_loss(model: Any, rows: Tensor, *, reduction: str) -> Tensor:
    """Cross-entropy in nats of each token after the first; negative ids are padding."""
    targets = rows[:, 1:].clone()
    # After BOS alone the model should write plain text, so no row teaches it to open a chat.
    opens_chat = (targets[:, 0] == SPECIALS.index(USER)) | (targets[:, 0] == SPECIALS.index(SYSTEM))
    targets[opens_chat, 0] = IGNORED
    logits = model(input_ids=rows[:, :-1].clamp(min=0)).logits
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def plain_windows(corpus: Corpus, *, context_tokens: int) -> Tensor:
    """Cut running text into windows that start with BOS; every token is a target once."""
    tokens = torch.from_numpy(corpus.tokens)
    short = -len(tokens) % context_tokens
    windows = F.pad(tokens, (0, short), value=IGNORED).view(-1, context_tokens)
    return F.pad(windows, (1, 0), value=SPECIALS.index(BOS))  # [R, T + 1]


def chat_windows(corpus: Corpus, *, context_tokens: int) -> Tensor:
    """Turn all speeches into one chat and cut it into windows that start with BOS."""
    num_tokens = sum(len(speech) + 2 for speech in corpus.speeches)
    chat = np.asarray(corpus.extend_chat([], first=0, num_tokens=num_tokens))
    short = -num_tokens % context_tokens
    windows = F.pad(torch.from_numpy(chat), (0, short), value=IGNORED).view(-1, context_tokens)
    return F.pad(windows, (1, 0), value=SPECIALS.index(BOS))


@torch.no_grad()
def evaluate(model: Any, windows: Tensor, device: torch.device) -> Score:
    """Score windows [R, T + 1] in float32."""
    model.eval()
    num_rows = max(1, BATCH_TOKENS // windows.shape[1])
    total = 0.0
    for rows in torch.split(windows, num_rows):
        total += next_token_loss(model, rows.to(device), reduction="sum").item()
    model.train()
    return Score(nats=total, num_tokens=int((windows[:, 1:] >= 0).sum()))


# -- training --------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, stage: Stage) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": stage.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=stage.peak_lr, betas=(0.9, 0.95))


def learning_rate(stage: Stage, step: int) -> float:
    """Warm up over a twentieth of the stage, then follow a cosine down to a fiftieth."""
    warmup = max(1, stage.num_steps // 20)
    if step < warmup:
        return stage.peak_lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, stage.num_steps - warmup)
    return stage.peak_lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train_stage(
    model: Any,
    stage: Stage,
    corpora: list[Corpus],
    validation: Corpus,
    rng: np.random.Generator,
    device: torch.device,
) -> None:
    """Run one stage and leave the model at its best checkpoint on both forms of validation text."""
    optimizer = make_optimizer(model, stage)
    plain = plain_windows(validation, context_tokens=stage.context_tokens)
    chat = chat_windows(validation, context_tokens=stage.context_tokens)
    best_loss = math.inf
    best_state: dict[str, Tensor] = {}
    started_s = time.monotonic()
    for step in range(1, stage.num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, step - 1)
        rows = draw_batch(corpora, rng, stage).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = next_token_loss(model, rows, reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVAL_EVERY and step != stage.num_steps:
            continue
        plain_loss = evaluate(model, plain, device).per_token
        chat_loss = evaluate(model, chat, device).per_token
        click.echo(
            f"context {stage.context_tokens} step {step}: train {loss.item():.3f}, "
            f"plain {plain_loss:.4f}, chat {chat_loss:.4f}, {time.monotonic() - started_s:.0f} s"
        )
        if plain_loss + chat_loss < best_loss:
            best_loss = plain_loss + chat_loss
            best_state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best_state)


# -- the folder ------------------------------------------------------------------------------------


def save_model(model: Any, out: Path) -> None:
    """Write bfloat16 weights without the tied head, and round the model itself alike."""
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.float() for name, value in state.items()})
    del state["lm_head.weight"]  # the embedding again
    tensors = {name: value.contiguous().cpu() for name, value in state.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", CONFIG)
    ids = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "generation_config.json", ids)


@torch.no_grad()
def sample(model: Any, tokenizer: Tokenizer, prompt: str, *, max_tokens: int, greedy: bool) -> str:
    """Continue a prompt that spells its own special tokens; return the new text only."""
    model.eval()
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    prompt_ids = torch.tensor([ids], device=model.device)
    options = {} if greedy else {"temperature": 0.8, "top_k": 0}
    output = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=max_tokens,
        do_sample=not greedy,
        eos_token_id=SPECIALS.index(EOS),
        pad_token_id=SPECIALS.index(EOS),
        **options,
    )
    text: str = tokenizer.decode(output[0, len(ids) :].tolist(), skip_special_tokens=False)
    return text


def report(model: Any, tokenizer: Tokenizer, validation_text: str, device: torch.device) -> None:
    """Print what the model card states: losses of the rounded weights, and samples."""
    validation = encode_corpus(tokenizer, validation_text)
    num_chars = {
        "plain": len(validation_text),
        "chat": sum(len(speech) for _, speech in split_speeches(validation_text)),
    }
    for length in (SHORT_CONTEXT, LONG_CONTEXT):
        for form, cut in (("plain", plain_windows), ("chat", chat_windows)):
            score = evaluate(model, cut(validation, context_tokens=length), device)
            click.echo(
                f"{form} windows of {length}: {score.per_token:.4f} nats/token, "
                f"{score.nats / num_chars[form]:.4f} nats/character, {score.num_tokens} tokens"
            )
    for prompt in SAMPLE_PROMPTS:
        for greedy in (True, False):
            text = sample(model, tokenizer, prompt, max_tokens=120, greedy=greedy)
            click.echo(f"--- {prompt!r}, {'greedy' if greedy else 'sampled'}\n{text}")


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Tiny Shakespeare.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--device", "device_name", default="cpu", show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--steps", default=1300, show_default=True, help="At 512 tokens of context.")
@click.option("--long-steps", default=150, show_default=True, help="At 4096 tokens of context.")
@click.option("--lr", default=3e-3, show_default=True)
@click.option("--weight-decay", default=1.0, show_default=True)
@click.option("--dropout", default=0.25, show_default=True)
@click.option("--bpe-dropout", default=0.15, show_default=True, help="Share of merges to skip.")
def main(
    data: Path,
    out: Path,
    device_name: str,
    seed: int,
    steps: int,
    long_steps: int,
    lr: float,
    weight_decay: float,
    dropout: float,
    bpe_dropout: float,
) -> None:
    """Train the demo model on --data and write it to --out."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    device = torch.device(device_name)
    text, validation_text = split_text(data.read_text(), validation_share=VALIDATION_SHARE)
    tokenizer = train_tokenizer(text, vocab_size=CONFIG["vocab_size"])
    shares = [0.0] + [bpe_dropout] * NUM_NOISY
    corpora = [encode_corpus(tokenizer, text, bpe_dropout=share) for share in shares]
    validation = encode_corpus(tokenizer, validation_text)
    model = build_model(dropout).to(device)
    short = Stage(steps, BATCH_TOKENS // SHORT_CONTEXT, SHORT_CONTEXT, lr, weight_decay)
    # Twice the tokens a step: 4 rows would be too few different texts.
    num_rows = 2 * BATCH_TOKENS // LONG_CONTEXT
    long = Stage(long_steps, num_rows, LONG_CONTEXT, lr * LONG_LR_SHARE, weight_decay)
    train_stage(model, short, corpora, validation, rng, device)
    train_stage(model, long, corpora[:1], validation, rng, device)
    out.mkdir(parents=True, exist_ok=True)
    save_model(model, out)
    save_tokenizer(tokenizer, out, max_context=LONG_CONTEXT)
    report(model, tokenizer, validation_text, device)


if __name__ == "__main__":
    main()
