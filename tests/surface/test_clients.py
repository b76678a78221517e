"""Clients that know nothing of nvserve: lm-eval on an offline task, langchain-openai, curl.

lm-eval has many dependencies of its own: it runs as a program, from NVSERVE_LM_EVAL or the PATH.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from surface.asking import Asker
from surface.test_structured import NO_BLANKS

from nvserve.scripts.model_facts import DEMO_MODEL

LM_EVAL = os.environ.get("NVSERVE_LM_EVAL") or shutil.which("lm_eval")
LINES = [
    {"context": "To be, or not to", "good": " be", "bad": " xylophone"},
    {"context": "My lord, I am your", "good": " servant", "bad": " quartz"},
    {"context": "KING RICHARD III:\nWhat", "good": " is", "bad": "zzz"},
    {"context": "What say you,", "good": " my lord?", "bad": " modem?"},
]
CHOICE_TASK = """
task: nvserve_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: ["{{good}}", "{{bad}}"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
GENERATE_TASK = """
task: nvserve_generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{good}}"
target_delimiter: ""
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason="needs the lm_eval command")
def test_lm_eval_scores_and_generates(asker: Asker, tmp_path: Path) -> None:
    assert LM_EVAL is not None
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    for name, text in (("choice", CHOICE_TASK), ("generate", GENERATE_TASK)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    arguments = {
        "model": "demo",
        "base_url": f"{asker.url}/v1/completions",
        "tokenizer": str(DEMO_MODEL),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "2",
    }
    finished = subprocess.run(
        [
            *(LM_EVAL, "--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--tasks", "nvserve_choice,nvserve_generate", "--include_path", str(tmp_path)),
            *("--output_path", str(tmp_path / "out"), "--log_samples"),
        ],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    [results] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["nvserve_choice"]["acc,none"] == 1.0
    [samples] = (tmp_path / "out").rglob("samples_nvserve_generate_*.jsonl")
    for line in map(json.loads, samples.read_text().splitlines()):
        asked = {"prompt": line["doc"]["context"], "add_special_tokens": False}  # as it encodes
        prompt = json.loads(asker.post("/tokenize", asked)[1])["tokens"]
        answer = asker.complete(prompt=prompt, max_tokens=8, temperature=0, stop=["\n"])
        assert line["resps"][0][0] == answer["choices"][0]["text"]
    asker.check_alive()


def test_curl_as_the_launcher_prints_it(asker: Asker) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    command = [curl, "-sS", "-N", f"{asker.url}/v1/completions", "-H"]
    command += ["Content-Type: application/json", "-d"]
    body = {"model": "demo", "prompt": "To be, or", "max_tokens": 4, "stream": True}
    out = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, timeout=60)
    lines = [line for line in out.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 5 or any("finish_reason" in line for line in lines)


LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Person(BaseModel):
    name: str = Field(pattern="^[a-z]{2,8}$")
    age: int = Field(ge=1, le=99)

def greet(word: str) -> str:
    '''Says a word.'''
    return word

bias = json.loads(sys.argv[2])
server = dict(model="demo", base_url=sys.argv[1], api_key="none")
chat = ChatOpenAI(**server, temperature=0, max_tokens=5)
whole = chat.invoke("Who goes there?")
streamed = "".join(chunk.content for chunk in chat.stream("Who goes there?"))
usage = whole.usage_metadata
forced = ChatOpenAI(**server, temperature=0.7, seed=3, max_tokens=300, logit_bias=bias)
person = forced.with_structured_output(Person, method="json_schema").invoke("Who goes there?")
calling = forced.bind_tools([greet], tool_choice="greet").invoke("Who goes there?")
[call] = calling.tool_calls
print(json.dumps([whole.content, streamed, usage["output_tokens"], person.age, call]))
"""


def test_langchain_openai(asker: Asker) -> None:
    pytest.importorskip("langchain_openai")
    answer = run_python(LANGCHAIN, f"{asker.url}/v1", json.dumps(NO_BLANKS))
    whole, streamed, num_tokens, age, call = answer
    assert whole == streamed
    assert num_tokens <= 5
    expected = asker.chat("Who goes there?", temperature=0, max_tokens=5)
    assert whole == expected["choices"][0]["message"]["content"]
    assert 1 <= age <= 99
    assert call["name"] == "greet"
    assert isinstance(call["args"]["word"], str)


def run_python(program: str, *arguments: str) -> Any:
    """What a program prints as JSON, in a process whose warnings are its own affair."""
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)
