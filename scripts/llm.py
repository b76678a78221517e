"""The Python API: `LLM(model=...).generate(prompts, params)` over the same processes as a server.

    from nvserve import LLM, SamplingParams

    with LLM() as llm:
        [answer] = llm.generate("To be, or", SamplingParams(max_tokens=40))
        print(answer.outputs[0].text)

Starts a launcher of its own and talks to it over ZeroMQ: the caller's process imports no torch, and
an answer survives the death of a worker as any request does.
"""

import os
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, SupportsIndex, TypeGuard

import msgspec
from tokenizers import Tokenizer

from nvserve.frontend.client import Client, ServerGone
from nvserve.frontend.client_session import Request
from nvserve.frontend.params import derive_seed
from nvserve.protocol.client_messages import ClientParams, TokenLogprob
from nvserve.scripts.embedded import EmbeddedLaunch, LaunchFailed, Words
from nvserve.scripts.model_facts import DEMO_MODEL

MAX_OPEN: Final = 1000  # requests at the server at once; below what one connection may have open

Prompt = str | Sequence[int]


class SamplingParams(ClientParams, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to choose tokens and when to stop; None takes the model's or the server's default.

    `n` answers are generated for each prompt. A given `seed` makes them repeatable.
    """

    n: int = 1


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    index: int  # below SamplingParams.n
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    seed: int
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """All answers to one prompt; `prompt` is None where ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    prompt_logprobs: list[TokenLogprob] | None = None  # of its tokens from the second one on


class LLM:
    """An engine of one's own: processes that live until `close`, or until this process ends."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tensor_parallel_size: int = 1,
        device: str = "auto",
        dtype: str = "auto",
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int = 0,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        attention_backend: str = "",
        num_spares: int = 0,
        seed: int = 0,
        log_level: str = "warning",
        is_verbose: bool = False,
        start_limit_s: float = 1800.0,
    ) -> None:
        """Start the processes and wait until they serve; raises LaunchFailed with their own words.

        The arguments are the flags of `nvserve launch`; without a model it is the demo model.
        """
        self.model: Final = Path(model) if model is not None else DEMO_MODEL
        flags = {
            "--model": None if model is None else os.fspath(model),
            "--tp": tensor_parallel_size,
            "--device": device,
            "--dtype": dtype,
            "--load-format": load_format,
            "--max-model-len": max_model_len,
            "--max-num-seqs": max_num_seqs,
            "--max-num-batched-tokens": max_num_batched_tokens,
            "--block-size": block_size,
            "--num-kv-blocks": num_kv_blocks,
            "--gpu-memory-utilization": gpu_memory_utilization,
            "--attention-backend": attention_backend or None,
            "--spares": num_spares,
            "--seed": seed,
            "--log-level": log_level,
            "--shutdown-timeout": 1,
            "--max-queued-requests": 2 * MAX_OPEN,
        }
        arguments = [
            text
            for flag, value in flags.items()
            if value is not None
            for text in (flag, str(value))
        ]
        arguments += ["--enforce-eager"] if enforce_eager else []
        arguments += [] if enable_prefix_caching else ["--no-enable-prefix-caching"]
        api_key = secrets.token_hex(16)  # other users of this machine can reach the port
        words = Words.COPIED if is_verbose else Words.KEPT
        self._launch: Final = EmbeddedLaunch(arguments, api_key=api_key, words=words)
        self._finalizer: Final = weakref.finalize(self, self._launch.stop)
        self.announcement: Final = self._launch.wait_ready(start_limit_s)
        launch = self._launch  # not `self`, which the client would keep alive
        self.client: Final = Client(
            self.announcement.zmq_endpoint,
            api_key=api_key,
            has_ended=lambda: not launch.is_running,
        )
        self._tokenizer: Tokenizer | None = None

    # -- generating ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        limit_s: float = 86_400.0,
    ) -> list[Generated]:
        """Answer one prompt or many, texts or token ids; the results are in the prompts' order.

        All requests are sent at once and batched by the scheduler. `params` is for all prompts or
        one for each. What is no prompt, or an empty one, is a TypeError or ValueError. The first
        error of a request ends all others and is raised: RequestError for a refused one,
        LaunchFailed when the engine is gone, TimeoutError after `limit_s`.
        """
        if not self._finalizer.alive:
            raise LaunchFailed("this LLM is closed")
        if not self._launch.is_running:  # a full send queue would hide it for a while
            raise LaunchFailed(self._launch.last_words())
        asked = _as_list(prompts)
        for number, prompt in enumerate(asked):
            if not len(prompt):
                raise ValueError(f"prompt {number} is empty")
        chosen = _params_for(params, len(asked))
        encoded = self._encode_all(asked)
        submits = [(number, choice) for number, one in enumerate(chosen) for choice in range(one.n)]
        requests = self._run(submits, encoded, chosen, limit_s)
        answers: list[list[Request]] = [[] for _ in asked]
        for (number, _), request in zip(submits, requests, strict=True):
            answers[number].append(request)
        return [
            _generated(prompt, ids, answer)
            for prompt, ids, answer in zip(asked, encoded, answers, strict=True)
        ]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as a prompt has them, BOS included where the model wants one."""
        return self._encode_all([text])[0]

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        texts = [_checked(p, number) for number, p in enumerate(prompts) if isinstance(p, str)]
        if texts and self._tokenizer is None:
            tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            self._tokenizer = tokenizer
        found = iter(self._tokenizer.encode_batch_fast(texts) if self._tokenizer else ())
        return [next(found).ids if isinstance(p, str) else [int(i) for i in p] for p in prompts]

    def _run(
        self,
        submits: Sequence[tuple[int, int]],
        encoded: Sequence[list[int]],
        chosen: Sequence[SamplingParams],
        limit_s: float,
    ) -> list[Request]:
        """Send (prompt number, choice) pairs, at most MAX_OPEN open at once; all finished."""
        requests: list[Request] = []
        open_requests: list[Request] = []

        def fill() -> None:
            if len(requests) < len(submits):
                open_requests[:] = [one for one in open_requests if not one.is_over]
            while len(requests) < len(submits) and len(open_requests) < MAX_OPEN:
                number, choice = submits[len(requests)]
                fields = _fields(chosen[number], choice)
                requests.append(self.client.submit(encoded[number], **fields))
                open_requests.append(requests[-1])

        deadline_s = time.monotonic() + limit_s
        try:
            for place in range(len(submits)):
                fill()
                for _ in self.client.pieces(requests[place], deadline_s - time.monotonic()):
                    fill()
        except ServerGone as error:
            raise LaunchFailed(f"{error}\n{self._launch.last_words()}") from error
        finally:
            if self._launch.is_running:
                for request in requests:
                    self.client.abort(request)
        return requests

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the processes and wait until they are gone; harmless when repeated."""
        if self._finalizer.alive:
            self.client.close()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def _as_list(prompts: str | Sequence[int] | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list of prompts; TypeError for anything else."""
    if isinstance(prompts, str | bytes | bytearray | memoryview):
        prompts = [prompts]  # bytes are refused below
    if prompts and all(isinstance(item, SupportsIndex) for item in prompts):
        return [[int(item) for item in prompts if isinstance(item, SupportsIndex)]]
    listed: list[Prompt] = []
    for number, prompt in enumerate(prompts):
        if not _is_prompt(prompt):
            raise TypeError(
                f"prompt {number} is neither a string nor a list of token ids, "
                f"but {type(prompt).__name__}: {prompt!r:.60}"
            )
        listed.append(prompt)
    return listed


def _is_prompt(prompt: object) -> TypeGuard[Prompt]:
    """Bytes are none, although they are a sequence of numbers: they would be taken for ids."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        return False
    return isinstance(prompt, str) or (
        isinstance(prompt, Sequence) and all(isinstance(item, SupportsIndex) for item in prompt)
    )


def _checked(text: str, number: int) -> str:
    """The text of a prompt; ValueError when it holds half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"prompt {number} is not valid Unicode: a lone {half!r} at character {error.start}"
        ) from error
    return text


def _params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    chosen = [params] * num_prompts if isinstance(params, SamplingParams) else list(params)
    if len(chosen) != num_prompts:
        raise ValueError(f"{len(chosen)} sampling parameters for {num_prompts} prompts")
    for one in chosen:
        if one.n < 1:
            raise ValueError(f"n must be at least 1, not {one.n}")
    return chosen


def _fields(params: SamplingParams, choice: int) -> dict[str, Any]:
    """What the server is told: `n` is one request each, with seeds derived from the given one."""
    fields = msgspec.structs.asdict(params)
    del fields["n"]
    if params.seed is not None:
        fields["seed"] = derive_seed(params.seed, choice)
    return fields


def _generated(prompt: Prompt, ids: list[int], requests: Sequence[Request]) -> Generated:
    results = [request.result() for request in requests]
    return Generated(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids,
        outputs=[
            Completion(
                index=index,
                text=result.text,
                token_ids=result.token_ids,
                finish_reason=result.finish_reason,
                seed=result.seed,
                logprobs=result.logprobs,
            )
            for index, result in enumerate(results)
        ],
        num_cached_tokens=results[0].num_cached_tokens,
        prompt_logprobs=results[0].prompt_logprobs,
    )
