"""The grammar compiler is loaded ahead, once, and its lack stops nobody."""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from nvserve.core.errors import RequestRefused
from nvserve.core.grammar import GrammarCompiler
from nvserve.core.grammar_loader import BUSY_LIMIT_S, QUIET_S, GrammarLoader
from nvserve.protocol.config import Config, ModelFacts
from nvserve.scripts.model_facts import DEMO_MODEL

FACTS = ModelFacts("LlamaForCausalLM", 1024, 6, 4, 4096, 0, [1])
CONFIG = Config(model=str(DEMO_MODEL), facts=FACTS, served_model_names=["demo"])


def test_the_tokenizer_is_loaded_once_and_before_the_first_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[GrammarCompiler] = []
    load = GrammarCompiler._load

    def counted(compiler: GrammarCompiler) -> object:
        loads.append(compiler)
        return load(compiler)

    monkeypatch.setattr(GrammarCompiler, "_load", counted)
    loader = GrammarLoader(CONFIG)
    loader.load()
    assert len(loads) == 1
    loader.load()
    assert not loader.compile("regex:a+").is_over
    assert len(loads) == 1


class Loads:
    """Stands in for the loading, and says when and where it happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.threads: list[threading.Thread] = []
        monkeypatch.setattr(GrammarLoader, "load", lambda _: self._note())

    def _note(self) -> None:
        self.threads.append(threading.current_thread())
        self.begun.set()


def test_a_later_core_loads_in_its_first_quiet_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch)
    loader = GrammarLoader(CONFIG)
    for now_s, is_busy in ((100.0, False), (100.1, True), (100.2, False), (100.5, False)):
        loader.load_soon(now_s, is_busy=is_busy)
    assert not loads.threads
    for now_s in (100.1 + QUIET_S, 200.0, 300.0):
        loader.load_soon(now_s, is_busy=False)
    assert loads.begun.wait(60)
    [thread] = loads.threads
    assert thread is not threading.current_thread(), "core's loop went on meanwhile"
    thread.join(60)


def test_a_core_that_is_never_quiet_loads_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(monkeypatch)
    loader = GrammarLoader(CONFIG)
    for tenths in range(round(10 * BUSY_LIMIT_S)):
        loader.load_soon(100 + tenths / 10, is_busy=True)
    assert not loads.threads
    loader.load_soon(100 + BUSY_LIMIT_S, is_busy=True)
    assert loads.begun.wait(60)
    [thread] = loads.threads
    thread.join(60)


def test_a_core_that_has_loaded_does_not_do_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = GrammarLoader(CONFIG)
    loader.load()
    loads = Loads(monkeypatch)
    for now_s in (100.0, 200.0):
        loader.load_soon(now_s, is_busy=False)
    assert not loads.threads


def test_a_model_without_a_tokenizer_serves_without_grammars(tmp_path: Path) -> None:
    loader = GrammarLoader(msgspec.structs.replace(CONFIG, model=str(tmp_path)))
    loader.load()
    with pytest.raises(RequestRefused, match="not available with this model"):
        loader.compile("regex:a+")


def test_a_simulated_device_never_loads_it() -> None:
    code = """
import sys
from nvserve.core.grammar_loader import GrammarLoader
from nvserve.protocol.config import Config, ModelFacts

facts = ModelFacts("LlamaForCausalLM", 1024, 6, 4, 4096, 0, [1])
for device in ("sim", "cpu"):
    config = Config(model="x", facts=facts, served_model_names=["x"], device=device)
    GrammarLoader(config).load()
    assert ("llguidance" in sys.modules) == (device == "cpu")
"""
    source = str(Path(__file__).parents[1] / ".src")
    code = f"import sys; sys.path.insert(0, {source!r})\n{code}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
