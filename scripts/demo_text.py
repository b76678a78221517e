"""The demo model's tokenizer, its chat template and the two forms its training text takes.

Knows text and token ids; never sees a model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS: Final = "<|begin|>"
EOS: Final = "<|end|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
SYSTEM: Final = "<|system|>"
SPECIALS: Final = (BOS, EOS, USER, ASSISTANT, SYSTEM)  # their ids are 0 to 4, in this order

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SYSTEM_SHARE: Final = 0.25  # of the chats open with a system message

Ids = npt.NDArray[np.int64]


def split_text(text: str, *, validation_share: float) -> tuple[str, str]:
    """Cut the text in two at the first speech that starts in its last validation_share."""
    cut = text.index("\n\n", int(len(text) * (1 - validation_share))) + 2
    return text[:cut], text[cut:]


def split_speeches(text: str) -> list[tuple[str, str]]:
    """Return (speaker, speech) for each speech of the play, in order; skip empty ones."""
    parts = (block.strip("\n").partition(":\n") for block in text.split("\n\n"))
    return [(speaker, speech) for speaker, _, speech in parts if speech]


def train_tokenizer(text: str, *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE: any text round-trips, and encoding puts BOS in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, SPECIALS.index(BOS))],
    )
    return tokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """One tokenization of a text: its running form, and its speeches as chat turns."""

    tokens: Ids
    line_starts: Ids  # indices in tokens
    speeches: list[list[int]]
    personas: list[list[int]]  # of each speech's speaker, the text of a system message

    def plain_row(self, rng: np.random.Generator, *, num_tokens: int) -> list[int]:
        """Return BOS and running text from the start of a random line."""
        starts = self.line_starts[self.line_starts <= len(self.tokens) - num_tokens]
        start = int(rng.choice(starts))
        return [SPECIALS.index(BOS), *self.tokens[start : start + num_tokens - 1].tolist()]

    def chat_row(self, rng: np.random.Generator, *, num_tokens: int) -> list[int]:
        """Return a chat that starts at a random speech, cut at num_tokens."""
        first = int(rng.integers(len(self.speeches)))
        row = [SPECIALS.index(BOS)]
        if rng.random() < SYSTEM_SHARE:
            persona = self.personas[(first + 1) % len(self.personas)]
            row += [SPECIALS.index(SYSTEM), *persona, SPECIALS.index(EOS)]
        return self.extend_chat(row, first=first, num_tokens=num_tokens)

    def extend_chat(self, row: list[int], *, first: int, num_tokens: int) -> list[int]:
        """Append the speeches from `first` on as turns, the user's first, cut at num_tokens."""
        roles = (SPECIALS.index(USER), SPECIALS.index(ASSISTANT))
        turn = 0
        while len(row) < num_tokens:
            speech = self.speeches[(first + turn) % len(self.speeches)]
            row += [roles[turn % 2], *speech, SPECIALS.index(EOS)]
            turn += 1
        return row[:num_tokens]


def encode_corpus(tokenizer: Tokenizer, text: str, *, bpe_dropout: float = 0.0) -> Corpus:
    """Tokenize a text in both forms; bpe_dropout skips that share of the merges at random."""
    tokenizer.model.dropout = bpe_dropout or None  # of the object inside, not of a copy
    speakers, speeches = zip(*split_speeches(text), strict=True)
    lines = tokenizer.encode_batch(text.splitlines(keepends=True), add_special_tokens=False)
    lengths = [len(line.ids) for line in lines]
    turns = tokenizer.encode_batch(list(speeches), add_special_tokens=False)
    personas = [f"You are {speaker}." for speaker in speakers]
    systems = tokenizer.encode_batch(personas, add_special_tokens=False)
    tokenizer.model.dropout = None
    return Corpus(
        tokens=np.concatenate([np.asarray(line.ids, dtype=np.int64) for line in lines]),
        line_starts=np.cumsum([0, *lengths[:-1]]),
        speeches=[turn.ids for turn in turns],
        personas=[system.ids for system in systems],
    )


def save_tokenizer(tokenizer: Tokenizer, out: Path, *, max_context: int) -> None:
    """Write the tokenizer and its template, in the config for all and as a file for some."""
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
