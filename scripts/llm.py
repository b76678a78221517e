"""The Python API: `LLM(model=...).generate(prompts, params)` over the same processes as a server.

    from nvserve import LLM, SamplingParams

    with LLM() as llm:
        [answer] = llm.generate("To be, or", SamplingParams(max_tokens=40))
        print(answer.outputs[0].text)

Starts a launcher of its own and talks to it over ZeroMQ: the caller's process imports no torch, and
an answer survives the death of a worker as any request does.
"""

import math
import os
import secrets
import threading
import time
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from tokenizers import Tokenizer

from nvserve.frontend.client import Client, ServerGone
from nvserve.frontend.client_session import Request, RequestError
from nvserve.frontend.params import derive_seed
from nvserve.protocol.client_messages import ClientParams, TokenLogprob
from nvserve.scripts.embedded import EmbeddedLaunch, LaunchFailed, Words
from nvserve.scripts.model_facts import DEMO_MODEL
from nvserve.scripts.prompts import Prompt, check_prompts, check_unicode

CLOSED: Final = "this LLM is closed"
CLOSE_LIMIT_S: Final = 5.0  # for another thread's use of the client, once the engine is gone
LOOK_S: Final = 0.1  # between looks at all requests of a call
MAX_OPEN: Final = 1000  # requests at the server at once; below what one connection may have open


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
        pool = ThreadPoolExecutor(1)
        # Beside the start: no call shall wait for it. An error is for who gives texts.
        self._tokenizer: Final = pool.submit(_load_tokenizer, self.model)
        pool.shutdown(wait=False)
        try:
            self.announcement: Final = self._launch.wait_ready(start_limit_s)
        except BaseException:  # Ctrl-C: a notebook keeps its traceback, and that keeps this object
            self._finalizer()
            raise
        launch = self._launch  # not `self`, which the client would keep alive
        self.client: Final = Client(
            self.announcement.zmq_endpoint,
            api_key=api_key,
            has_ended=lambda: not launch.is_running,
        )
        self._turn: Final = threading.RLock()  # held by the thread whose call uses the client

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
        one for each. What is none of these, or an empty prompt, is a TypeError or ValueError. The
        first error of a request ends all others and is raised: RequestError for a refused one,
        LaunchFailed when the engine is gone, TimeoutError after `limit_s`. Another thread's call
        begins when this one has ended.
        """
        deadline_s = time.monotonic() + limit_s
        asked = check_prompts(prompts)
        chosen = _params_for(params, len(asked))
        submits = [(number, choice) for number, one in enumerate(chosen) for choice in range(one.n)]
        if not self._turn.acquire(timeout=min(max(0.0, limit_s), threading.TIMEOUT_MAX)):
            raise TimeoutError("another thread's call took all of the limit")
        try:
            self._check_running()
            encoded = self._encode_all(asked)
            requests = self._run(submits, encoded, chosen, deadline_s)
        finally:
            self._turn.release()
        answers: list[list[Request]] = [[] for _ in asked]
        for (number, _), request in zip(submits, requests, strict=True):
            answers[number].append(request)
        return [
            _generated(prompt, ids, answer)
            for prompt, ids, answer in zip(asked, encoded, answers, strict=True)
        ]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as a prompt has them, BOS included where the model wants one."""
        check_unicode(text, "text")
        return self._encode_all([text])[0].tolist()

    def _check_running(self) -> None:
        if not self._finalizer.alive:
            raise LaunchFailed(CLOSED)
        if not self._launch.is_running:  # told before anything is encoded or sent
            raise LaunchFailed(self._launch.last_words())

    def _encode_all(self, prompts: "Sequence[str | array[int]]") -> "list[array[int]]":
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        found = iter(self._tokenizer.result().encode_batch_fast(texts) if texts else ())
        return [array("i", next(found).ids) if isinstance(p, str) else p for p in prompts]

    def _run(
        self,
        submits: Sequence[tuple[int, int]],
        encoded: "Sequence[array[int]]",
        chosen: Sequence[SamplingParams],
        deadline_s: float,
    ) -> list[Request]:
        """Send (prompt number, choice) pairs, at most MAX_OPEN open at once; all finished."""
        requests: list[Request] = []
        under_way = _UnderWay()

        def send_next() -> None:
            number, choice = submits[len(requests)]
            fields = _fields(chosen[number], choice)
            requests.append(self.client.submit(encoded[number], **fields))
            under_way.requests.append(requests[-1])

        def fill() -> None:
            while len(requests) < len(submits) and self.client.num_open < MAX_OPEN:
                send_next()

        try:
            for place in range(len(submits)):
                fill()
                if place == len(requests):  # the caller's own requests leave no room
                    send_next()
                for _ in self.client.pieces(requests[place], deadline_s - time.monotonic()):
                    fill()
                    under_way.check()
        except (ServerGone, RequestError, RuntimeError) as error:
            if not self._finalizer.alive:  # by another thread or a signal handler meanwhile
                raise LaunchFailed(CLOSED) from error
            if isinstance(error, ServerGone):
                raise LaunchFailed(f"{error}\n{self._launch.last_words()}") from error
            raise
        finally:
            if self._launch.is_running:
                for request in requests:
                    self.client.abort(request)
        return requests

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the processes and wait until they are gone; harmless when repeated."""
        self._finalizer()  # first: it ends what other threads wait for
        with self._turn:
            self.client.close(limit_s=CLOSE_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(slots=True)
class _UnderWay:
    """The requests of a call that had not ended at the last look."""

    requests: list[Request] = field(default_factory=list)
    looked_s: float = -math.inf

    def check(self) -> None:
        """Raise the error that one has ended with, if a look is due."""
        now_s = time.monotonic()
        if now_s - self.looked_s < LOOK_S:
            return
        self.looked_s = now_s
        for request in self.requests:
            if request.error is not None:
                raise request.error
        self.requests = [request for request in self.requests if not request.is_over]


def _load_tokenizer(folder: Path) -> Tokenizer:
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _params_for(params: object, num_prompts: int) -> list[SamplingParams]:
    """One for each prompt; TypeError for what is no SamplingParams, ValueError if unusable."""
    chosen = _as_params(SamplingParams() if params is None else params, num_prompts)
    if len(chosen) != num_prompts:
        raise ValueError(f"{len(chosen)} sampling parameters for {num_prompts} prompts")
    for one in chosen:
        _check_integer("n", one.n)
        if one.n < 1:
            raise ValueError(f"n must be at least 1, not {one.n}")
        if one.seed is not None:
            _check_integer("seed", one.seed)
            if not -(2**63) <= one.seed < 2**63:  # as over HTTP
                raise ValueError(f"seed must fit in 64 bits, signed, not {one.seed}")
    return chosen


def _as_params(given: object, num_prompts: int) -> list[SamplingParams]:
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    chosen = []
    items: Iterable[object] = [given]
    if isinstance(given, Iterable) and not isinstance(given, Mapping | str):
        items = given
    for item in items:
        if not isinstance(item, SamplingParams):
            raise TypeError(
                "params are SamplingParams or a list of them,"
                f" not {type(item).__name__}: {item!r:.60}"
            )
        chosen.append(item)
    return chosen


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}: {value!r:.60}")


def _fields(params: SamplingParams, choice: int) -> dict[str, Any]:
    """What the server is told: `n` is one request each, with seeds derived from the given one."""
    fields = msgspec.structs.asdict(params)
    del fields["n"]
    if params.seed is not None:
        fields["seed"] = derive_seed(params.seed, choice)
    return fields


def _generated(
    prompt: "str | array[int]", ids: "array[int]", requests: Sequence[Request]
) -> Generated:
    results = [request.result() for request in requests]
    return Generated(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids.tolist(),
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
