"""The one frozen configuration of a launch: built from flags, sent to children as bytes.

Nothing is written back into it; what is discovered later (KV blocks that fit) travels in messages.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
SomeSeconds = Annotated[float, Meta(gt=0.0, le=1e9)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class ModelFacts(msgspec.Struct, frozen=True):
    """What core and frontend need of the model's own config files, read once by the launcher."""

    architecture: str
    vocab_size: Positive
    num_layers: Positive
    num_kv_heads: Positive
    context_len: Positive  # the model's own maximum
    bos_token_id: int = -1  # -1 = none
    eos_token_ids: list[int] = []


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything configurable; one comment line a field, commonest first."""

    model: str  # path of a Hugging Face model folder
    facts: ModelFacts
    served_model_names: list[str]  # the names clients may use; the first is reported
    tp_size: Positive = 1  # worker processes, one per tensor-parallel rank
    host: str = "127.0.0.1"  # HTTP address
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000  # HTTP port, 0 = any free one
    zmq_endpoint: str = ""  # tcp://host:port of the ZMQ client door, empty = closed
    device: Literal["cpu", "cuda", "sim"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: Positive = 4096  # prompt + output tokens of one request
    max_num_seqs: Positive = 256  # requests running at once: the number of slots
    max_num_batched_tokens: Positive = 2048  # token budget of one step
    block_size: Positive = 16  # tokens per KV block
    num_kv_blocks: NonNegative = 0  # exact pool size, 0 = measure
    gpu_memory_utilization: Fraction = 0.9  # share of the card the worker may fill
    enable_prefix_caching: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    attention_backend: str = ""  # fa3, fa2, triton or torch; empty = best one that works
    max_queued_requests: Positive = 1024  # waiting requests before a 429
    seed: Int64 = 0  # of dummy weights and of seeds drawn for requests
    num_spares: Annotated[int, Meta(ge=0, le=1)] = 1  # warm workers kept for a recovery
    max_restarts: NonNegative = 5  # unplanned deaths within restart_window_s before giving up
    restart_window_s: Seconds = 60.0
    hang_timeout_s: SomeSeconds = 5.0  # silence of a process that counts as a hang, at least
    shutdown_timeout_s: Seconds = 30.0  # time running requests get to finish on SIGTERM
    request_timeout_s: Seconds = 0.0  # default deadline of a request, 0 = none
    enable_faults: bool = False  # accept `nvserve fault` on the control socket
    disable_auth: bool = False  # serve a non-loopback address without an API key
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    sim_step_ms: Seconds = 0.0  # --device sim: fixed part of a step
    sim_token_ms: Seconds = 0.0  # --device sim: per-token part of a step
    cors_origins: list[str] = []  # origins of web pages that may call the server, "*" = all
    tool_call_parser: Literal["", "hermes", "llama3_json"] = ""  # how the model writes tool calls
    reasoning_parser: Literal["", "think"] = ""  # how it marks its reasoning; empty = it does not
    share_gpu: bool = False  # several ranks may take one GPU, joined by gloo: for tests
    disable_custom_all_reduce: bool = False  # NCCL does all sums over ranks
