"""nvserve: serve large language models from the GPUs of one machine."""

TYPE_CHECKING = False  # as checkers know it; every process is spared importing `typing` for it
if TYPE_CHECKING:
    from nvserve.scripts.llm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    """The Python API, imported on first use: every process of a server imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvserve.scripts import llm  # loads the client, which a server does not need

    return getattr(llm, name)
