"""The grammar compiler is loaded ahead, once, and its lack stops nobody."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nvserve.core.errors import RequestRefused
from nvserve.core.grammar import GrammarCompiler
from nvserve.core.grammar_loader import GrammarLoader
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
