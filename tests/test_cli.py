"""The command line: fast help, flags to Config, one clear line for an error."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from process.server import ROOT, environment

from nvserve.scripts import cli
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.launch import launch
from nvserve.scripts.launch_config import UsageError, build_config
from nvserve.scripts.model_facts import DEMO_MODEL

NOT_IN_CONFIG = {"model", "api_key_file", "quiet", "parent_pid"}


def default_settings() -> dict[str, Any]:
    """What `launch` gets when no flag is given, on a machine without a GPU."""
    params = launch.make_context("launch", ["--device", "cpu"]).params
    return {name: value for name, value in params.items() if name not in NOT_IN_CONFIG}


def config_of(path: Path | None = None, *, has_key: bool = False, **settings: Any) -> Any:
    return build_config(path, default_settings() | settings, has_key=has_key)


def make_model(folder: Path, **changes: Any) -> Path:
    """A model folder without weights, of the demo's shape but for the changes."""
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.group, list(arguments), prog_name="nvserve")


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["bench", "--help"]])
def test_help_is_fast_and_loads_no_engine(arguments: list[str]) -> None:
    code = (
        "import sys, time; begun = time.process_time()\n"
        "from nvserve.scripts.cli import group\n"
        f"group({arguments!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(time.process_time() - begun)"
    )
    took_s: list[float] = []
    while not took_s or took_s[-1] >= 0.3:  # of CPU time, in one of some tries: cores are shared
        assert len(took_s) < 5, f"always slow: {took_s}"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "Usage: " in done.stdout
        took_s.append(float(done.stdout.splitlines()[-1]))


def test_every_listed_command_exists() -> None:
    for group in (cli.COMMANDS, cli.BENCHMARKS):
        for module, attribute, _ in group.values():
            assert getattr(importlib.import_module(module), attribute).get_short_help_str()


def test_no_help_shows_a_bound_that_is_none() -> None:
    for group in (cli.COMMANDS, cli.BENCHMARKS):
        for name, (module, attribute, _) in group.items():
            command = getattr(importlib.import_module(module), attribute)
            text = command.get_help(click.Context(command, info_name=name))
            assert not re.search(r"[<>=]None|None[<>=]", text), text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_of_the_server_must_be_finite(value: str, tmp_path: Path) -> None:
    flags = ["--gpu-memory-utilization", "--request-timeout", "--shutdown-timeout",
             "--restart-window", "--hang-timeout", "--sim-step-ms", "--sim-token-ms"]  # fmt: skip
    lines = [["launch", flag, value] for flag in flags] + [["restart", "core", "--timeout", value]]
    for line in lines:
        result = run(*line)
        assert result.exit_code == ExitCode.USAGE, line
        assert f"Invalid value for '{line[-2]}': {value}" in result.output
    path = tmp_path / "c.toml"
    path.write_text(f"hang-timeout = {value}")
    assert "no finite number" in run("launch", "--config", str(path)).output


def test_the_demo_model_is_the_default() -> None:
    config = config_of()
    assert config.model == str(DEMO_MODEL.resolve())
    assert config.served_model_names == ["demo"]
    assert config.dtype == "float32"
    assert config.max_model_len == config.facts.context_len
    assert config.facts.eos_token_ids


def test_a_folder_is_served_under_its_own_name_or_the_given_ones(tmp_path: Path) -> None:
    folder = tmp_path / "little"
    folder.mkdir()
    make_model(folder)
    assert config_of(folder, load_format="dummy").served_model_names == ["little"]
    named = config_of(folder, load_format="dummy", served_model_names=("a", "b"))
    assert named.served_model_names == ["a", "b"]


def test_the_models_own_dtype_is_taken_on_a_gpu_in_old_and_new_spelling(tmp_path: Path) -> None:
    make_model(tmp_path, dtype=None, torch_dtype="float16")
    assert config_of(tmp_path, load_format="dummy", device="cuda").dtype == "float16"
    make_model(tmp_path, dtype="bfloat16", torch_dtype=None)
    assert config_of(tmp_path, load_format="dummy", device="cuda").dtype == "bfloat16"


def test_end_tokens_of_both_files_are_joined(tmp_path: Path) -> None:
    make_model(tmp_path, eos_token_id=3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert config_of(tmp_path, load_format="dummy").facts.eos_token_ids == [7, 3]


def test_a_model_without_end_or_begin_token_is_fine(tmp_path: Path) -> None:
    make_model(tmp_path, eos_token_id=None, bos_token_id=None)
    facts = config_of(tmp_path, load_format="dummy").facts
    assert (facts.bos_token_id, facts.eos_token_ids) == (-1, [])


def test_kv_heads_default_to_query_heads(tmp_path: Path) -> None:
    make_model(tmp_path, num_key_value_heads=None, num_attention_heads=6)
    assert config_of(tmp_path, load_format="dummy").facts.num_kv_heads == 6


@pytest.mark.parametrize(
    ("query", "kv", "tp_size", "fits"),
    [(8, 4, 4, True), (8, 4, 8, True), (8, 2, 4, True), (8, 4, 3, False), (6, 3, 4, False),
     (8, 3, 2, False), (12, 4, 6, False), (8, 4, 16, False), (8, 1, 8, True)],
)  # fmt: skip
def test_heads_are_split_evenly_or_refused(
    tmp_path: Path, query: int, kv: int, tp_size: int, fits: bool
) -> None:
    make_model(tmp_path, num_attention_heads=query, num_key_value_heads=kv)
    if fits:
        assert config_of(tmp_path, load_format="dummy", tp_size=tp_size).tp_size == tp_size
        return
    with pytest.raises(UsageError) as refused:
        config_of(tmp_path, load_format="dummy", tp_size=tp_size)
    assert str(refused.value) == f"--tp {tp_size} cannot split {kv} KV heads / {query} query heads"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_size": 0}, "--tp: expected `int` >= 1"),
        ({"port": 70000}, "--port: expected `int` <= 65535"),
        ({"port": 5555, "zmq_port": 5555}, "--port and --zmq-port are both 5555"),
        ({"num_spares": 2}, "--spares: expected `int` <= 1"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization: expected `float` <= 1.0"),
        ({"hang_timeout_s": 0.0}, "--hang-timeout: expected `float` > 0.0"),
        ({"seed": 2**63}, "--seed: "),
        ({"served_model_names": ("a", "")}, "--served-model-name: a name must not be empty"),
        ({"cors_origins": ("http://a/",)}, "--cors-origin http://a/: neither scheme://host[:port]"),
        ({"max_model_len": 10**6}, "--max-model-len 1000000 is more than the model's context"),
        ({"max_model_len": 1}, "--max-model-len 1 leaves no room for a prompt and a token"),
        ({"max_num_seqs": 10**30}, "--max-num-seqs: expected `int` <= 2147483647"),
        ({"restart_window_s": float("inf")}, "--restart-window: expected `float` <= 1"),
        ({"num_kv_blocks": 1}, "--num-kv-blocks 1 leaves none to use"),
        ({"share_gpu": True}, "--share-gpu needs --num-kv-blocks"),
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 can be reached from other machines"),
        ({"host": "127.evil.example"}, "can be reached from other machines"),
    ],
)
def test_a_wrong_value_names_its_flag(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        config_of(**settings)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_loopback_address_needs_no_key(host: str) -> None:
    assert config_of(host=host).host == host


@pytest.mark.parametrize("origin", ["*", "null", "http://a.example", "https://[::1]:3000"])
def test_an_origin_is_taken_as_browsers_send_it(origin: str) -> None:
    assert config_of(cors_origins=(origin,)).cors_origins == [origin]


def test_an_open_address_is_served_with_a_key_or_when_told_so() -> None:
    assert config_of(host="0.0.0.0", has_key=True).host == "0.0.0.0"
    assert config_of(host="0.0.0.0", disable_auth=True).disable_auth


def test_the_zmq_door_is_closed_unless_asked_for() -> None:
    assert config_of().zmq_endpoint == ""
    assert config_of(zmq_port=5555).zmq_endpoint == "tcp://127.0.0.1:5555"
    assert config_of(port=0, zmq_port=0).zmq_endpoint == "tcp://127.0.0.1:*"  # any two


def break_model(folder: Path, how: str) -> None:
    match how:
        case "config":
            (folder / "config.json").unlink()
        case "json":
            (folder / "config.json").write_text("{")
        case "array":
            (folder / "config.json").write_text("[]")
        case "deep":
            (folder / "config.json").write_text("[" * 100_000)
        case "architecture":
            make_model(folder, architectures=["GPT2LMHeadModel"])
        case "sizes":
            make_model(folder, num_hidden_layers="4")
        case "weights":
            pass
        case _:
            (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("config", "no config.json"),
        ("json", "config.json"),
        ("array", "not a JSON object"),
        ("deep", "config.json"),
        ("architecture", "architecture GPT2LMHeadModel is not supported"),
        ("sizes", "num_hidden_layers must be a positive integer, not '4'"),
        ("weights", "no *.safetensors weights"),
        ("tokenizer", "no tokenizer.json"),
    ],
)
def test_a_broken_model_folder_is_refused_in_one_line(tmp_path: Path, how: str, words: str) -> None:
    break_model(make_model(tmp_path), how)
    result = run("launch", "--model", str(tmp_path), "--port", "0")
    assert result.exit_code == 2
    [line] = result.output.splitlines()
    assert line.startswith("Error: ")
    assert words in line


def test_names_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"model-\xff")
    shutil.copytree(DEMO_MODEL, folder)
    output = run("launch", "--model", str(folder)).output
    assert output.startswith("Error: --model: ")
    assert output.endswith("is not UTF-8\n")
    result = run("launch", "--served-model-name", os.fsdecode(b"\xff"))
    assert result.exit_code == 2
    assert "--served-model-name" in result.output


def test_a_wrong_path_is_refused(tmp_path: Path) -> None:
    result = run("launch", "--model", str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "no such folder" in result.output


def test_an_empty_model_is_refused_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('model = ""')
    for arguments in (("--model", ""), ("--config", str(path))):
        result = run("launch", *arguments, "--num-kv-blocks", "1")  # refused too: never serves
        assert result.exit_code == 2
        assert result.output.startswith("Error: --model is empty")


def test_a_key_on_the_command_line_is_refused_and_not_repeated() -> None:
    result = run("launch", "--api-key", "sesame-open")
    assert result.exit_code == 2
    assert "NVSERVE_API_KEY" in result.output
    assert "sesame" not in result.output


@pytest.mark.parametrize("text", ["", "short", "ümlaut-key-long"])
def test_an_unusable_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    result = run("launch", "--api-key-file", str(path), "--port", "0")
    assert result.exit_code == 2


def settings_from(path: Path, *flags: str) -> dict[str, Any]:
    context = launch.make_context("launch", ["--config", str(path), *flags])
    return context.params


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'tp = 2\nmax-num-seqs = 7\nno_auth = true\nserved-model-name = ["x", "y"]\n'),
        ("c.json", '{"tensor_parallel_size": 2, "max_num_seqs": 7, "no-auth": true, '
                   '"served_model_name": ["x", "y"]}'),
    ],
)  # fmt: skip
def test_a_file_may_hold_any_flag_and_the_command_line_wins(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    params = settings_from(path)
    assert (params["tp_size"], params["max_num_seqs"], params["disable_auth"]) == (2, 7, True)
    assert params["served_model_names"] == ("x", "y")
    assert settings_from(path, "--max-num-seqs", "9")["max_num_seqs"] == 9


@pytest.mark.parametrize(
    "text",
    ["max-seqs = 1", "api-key = 'sesame-open'", "= 3", "config = 'x'", "[launch]\nport = 0",
     "port = [1, 2]", "port = true", "max-num-seqs = 2.5", "enforce-eager = 1",
     "enforce-eager = 'maybe'", "served-model-name = [[]]"],
)  # fmt: skip
def test_a_file_with_an_unknown_or_wrong_setting_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    result = run("launch", "--config", str(path))
    assert result.exit_code == 2
    assert "sesame" not in result.output


def test_a_false_switch_in_a_file_turns_it_off(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("enable-prefix-caching = false")
    assert settings_from(path)["enable_prefix_caching"] is False
    path.write_text("no-enable-prefix-caching = true")
    assert settings_from(path)["enable_prefix_caching"] is False


def test_a_flag_that_may_be_repeated_needs_no_list_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('served-model-name = "one"')
    assert settings_from(path)["served_model_names"] == ("one",)


def test_version_is_told() -> None:
    result = run("version")
    assert result.exit_code == 0
    assert result.output.strip()


def test_status_tells_how_long_the_last_recovery_took(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = {
        "url": "http://h:1",
        "state": "ready",
        "reason": "",
        "model": "m",
        "epoch": 1,
        "num_kv_blocks": 9,
        "restarts": {"worker": 1},
        "recovery_seconds": {},
        "processes": [],
    }
    monkeypatch.setattr("nvserve.scripts.launch_dir.find_all", lambda: [Path("/nvserve-x")])
    monkeypatch.setattr("nvserve.scripts.status.ask", lambda *_: reply)
    assert "recovery" not in run("status").output
    reply["recovery_seconds"] = {"fence": 0.1, "rebuild": 0.2, "total": 0.3}
    told = "the last recovery took 0.30 s (fence 0.10, rebuild 0.20)"
    assert told in run("status").output


@pytest.mark.parametrize("arguments", [["status"], ["restart", "core"]])
def test_a_launcher_that_does_not_answer_is_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("nvserve.scripts.launch_dir.find_all", lambda: [Path("/nvserve-x")])
    monkeypatch.setattr("nvserve.scripts.status.ask", ask)
    monkeypatch.setattr("nvserve.scripts.running.ask", ask)
    result = run(*arguments)
    assert result.exit_code == 1
    assert "the launcher of /nvserve-x does not answer" in result.output
    assert "no server" not in result.output


def test_generate_says_when_nobody_answers() -> None:
    result = run("generate", "x", "--endpoint", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9" in result.output


@pytest.mark.parametrize(
    "address", ["http://h:x", "http://h:99999", "http://[::1", "http://a..b", "ftp://h", ""]
)
def test_a_wrong_endpoint_is_one_clear_line(address: str) -> None:
    for command in (["generate", "x"], ["chat"], ["bench", "frontend"]):
        result = run(*command, "--endpoint", address)
        assert result.exit_code == 2
        assert "Invalid value for '--endpoint'" in result.output
        assert "is no http:// address" in result.output


def test_launch_flags_and_an_endpoint_exclude_each_other() -> None:
    result = run("generate", "x", "--endpoint", "http://127.0.0.1:9", "--tp", "2")
    assert result.exit_code == 2


def test_the_readme_lists_every_flag_of_launch_and_no_other() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("## Flags of `nvserve launch`")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(--[a-z-]+)", section))
    options = [p for p in launch.params if isinstance(p, click.Option) and not p.hidden]
    assert listed == {name for option in options for name in option.opts + option.secondary_opts}


def test_the_readme_lists_every_exit_status() -> None:
    text = (ROOT / "README.md").read_text().partition("Exit status: ")[2].partition("\n\n")[0]
    listed = {int(number) for number in re.findall(r"\d+", text)}
    assert listed == {code.value for code in ExitCode}
