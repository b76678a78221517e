"""A model folder's tokenizer: text -> ids, its chat template, and its defaults for sampling.

Reads tokenizer.json, tokenizer_config.json, the chat templates and generation_config.json. Long
texts are encoded in a thread by a call that releases the interpreter, so that streams go on.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as FastTokenizer

from nvserve.frontend.chat_template import ChatTemplate
from nvserve.frontend.detokenizer import Vocabulary
from nvserve.frontend.errors import StartFailure, invalid

logger = logging.getLogger(__name__)

INLINE_MESSAGES: Final = 100  # more of them are rendered in a thread
INLINE_CONTENT_CHARS: Final = 100_000  # as are longer ones: a template may search and cut each
INLINE_CHARS: Final = 2000  # a longer text is encoded in a thread
NORMALIZED_SHRINKAGE: Final = 4  # how much shorter a normalizer may make a text, at most
NUM_THREADS: Final = 2
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token")
DEFAULT_TEMPLATE: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"  # for chats with tools, in some models
SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Tokenizer:
    """Encodes prompts for one model; `vocabulary` is the way back.

    `markers` are looked for in the text: they are in it, though some models call them special.
    """

    def __init__(self, model_dir: str, max_model_len: int, markers: Set[str] = frozenset()) -> None:
        folder = Path(model_dir)
        self.fast: Final = _load_fast(folder / "tokenizer.json", markers)
        config = _load_json(folder / "tokenizer_config.json")
        added = self.fast.get_added_tokens_decoder()
        special = frozenset(i for i, token in added.items() if token.special)
        self.vocabulary: Final = Vocabulary(self.fast, special)
        self.max_model_len: Final = max_model_len
        shrinkage = 1 if self.fast.normalizer is None else NORMALIZED_SHRINKAGE
        self._max_bytes: Final = max_model_len * self.vocabulary.max_token_bytes * shrinkage
        templates = _load_chat_templates(folder, config)
        self.chat_template: Final = templates.get(DEFAULT_TEMPLATE)
        self.tool_template: Final = templates.get(TOOL_TEMPLATE, self.chat_template)
        if self.chat_template is None:
            logger.warning("%s has no chat template: /v1/chat/completions answers 400", folder)
        self.sampling_defaults: Final = _sampling_defaults(folder / "generation_config.json")
        self._threads: Final = ThreadPoolExecutor(NUM_THREADS, "encode")

    async def encode(
        self, texts: list[str], *, param: str, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Ids of each text; a 400 on `param` when one is certainly longer than the context."""
        for text in texts:
            self._check_size(text, param)
        if sum(map(len, texts)) <= INLINE_CHARS:
            return self._encode(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, texts, add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids of a conversation; the template writes all special tokens itself, BOS included."""
        template = self.tool_template if tools else self.chat_template
        if template is None:
            raise invalid("messages", "this model has no chat template; use /v1/completions")
        render = partial(
            template.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
        )
        num_chars = sum(len(message.get("content") or "") for message in messages)
        if len(messages) <= INLINE_MESSAGES and num_chars <= INLINE_CONTENT_CHARS:
            text = render()
        else:
            text = await asyncio.get_running_loop().run_in_executor(self._threads, render)
        return (await self.encode([text], param="messages", add_special_tokens=False))[0]

    def close(self) -> None:
        """Stop the threads; texts not begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_size(self, text: str, param: str) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise invalid(param, "holds a lone surrogate") from error
        if num_bytes > self._max_bytes:
            raise invalid(
                param,
                f"{num_bytes} bytes of text cannot fit in {self.max_model_len} tokens",
                "context_length_exceeded",
            )

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        # `encode` holds the interpreter for the whole text, `encode_batch_fast` does not.
        batch = self.fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]


def _load_fast(path: Path, markers: Set[str]) -> FastTokenizer:
    if not path.is_file():
        raise StartFailure(
            f"no tokenizer: {path} is missing; nvserve needs the tokenizer.json of the model"
        )
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for every bad file
        raise StartFailure(f"cannot read the tokenizer {path}: {error}") from error
    added = fast.get_added_tokens_decoder().values()
    if any(token.special and token.content in markers for token in added):
        fast = _with_plain(markers, fast)
    fast.no_padding()
    fast.no_truncation()
    return fast


def _with_plain(markers: Set[str], fast: FastTokenizer) -> FastTokenizer:
    """The same tokenizer, to which these tokens are not special; its own flags cannot be unset."""
    document = json.loads(fast.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in markers
    return FastTokenizer.from_str(json.dumps(document))


def _load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty when there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StartFailure(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise StartFailure(f"{path} does not hold a JSON object")
    return content


def _load_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """By name, those that are used. A broken one for tools is not, and the default takes its place.

    Raises StartFailure for a broken default.
    """
    special = {name: _token_text(config[name]) for name in SPECIAL_NAMES if config.get(name)}
    templates = {}
    for name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE):
        try:
            source = _template_source(folder, config, name)
            if isinstance(source, str):
                templates[name] = ChatTemplate(source, special)
        except StartFailure as error:
            if name == DEFAULT_TEMPLATE:
                raise
            logger.warning("the template %r of %s is not used: %s", name, folder, error)
    return templates


def _template_source(folder: Path, config: Mapping[str, Any], name: str) -> Any:
    """From a file of its own, or else the tokenizer's config: one text, or several by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        if name != DEFAULT_TEMPLATE:
            path = folder / "additional_chat_templates" / f"{name}.jinja"
        return _read_template(path) if path.is_file() else None
    source = config.get("chat_template")
    if isinstance(source, list):
        return {entry.get("name"): entry.get("template") for entry in source}.get(name)
    return source if name == DEFAULT_TEMPLATE else None


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise StartFailure(f"{path} is not UTF-8: {error}") from error


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _sampling_defaults(path: Path) -> dict[str, float]:
    """The sampling parameters the model's makers recommend, where they name some."""
    config = _load_json(path)
    named = {name: config.get(name) for name in SAMPLING_DEFAULTS}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
