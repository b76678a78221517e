"""The compile server, on a real kernel for a device that need not be here.

In processes of their own: a server is forked before threads start, and Triton is not to interpret.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvserve.kernels.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")

PRELUDE = """
import os, signal, threading, time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from nvserve.kernels import compilation, compile_server
from nvserve.kernels.norm_triton import _rms_norm_kernel as kernel

target = GPUTarget("cuda", 90, 32)
options = make_backend(target).parse_options({"num_warps": 4}).__dict__
types = dict.fromkeys(kernel.arg_names, "*bf16") | {"width": "i32", "eps": "fp32"}
constants = {"ADD": True, "BLOCK": 1024, "PDL": True}
types |= dict.fromkeys(constants, "constexpr")
source = compilation.Source(kernel, types, constants)

in_process = []
make_ir = triton.compiler.ASTSource.make_ir
def counted(self, *arguments, **options):
    in_process.append(os.getpid())
    return make_ir(self, *arguments, **options)
triton.compiler.ASTSource.make_ir = counted

class NoDevice:  # the real one asks for a driver, which a machine without a GPU lacks
    def launcher_cls(self, source, metadata):
        assert metadata.name == "_rms_norm_kernel"

compile_server.prepare = lambda: triton.runtime.driver.set_active(NoDevice())
compiled = lambda: compilation.compile_source(source, target, options)
"""

FILLS_THE_CACHE = """
compilation.start_server()
kernel = compiled()
assert kernel.asm["cubin"] and in_process == [], in_process
assert source.hash() == kernel.src.hash()
compilation.stop_server()
assert compiled().hash == kernel.hash and in_process == []
"""

IN_THIS_PROCESS = """
assert compiled().asm["cubin"] and in_process == [os.getpid()], in_process
"""

CANNOT_START = """
def prepare():
    raise RuntimeError("no driver")
compile_server.prepare = prepare
compilation.start_server()
assert compiled().asm["cubin"] and in_process == [os.getpid()], in_process
"""

CANNOT_COMPILE = """
def compile(self):
    raise RuntimeError("out of memory")
compile_server.Job.compile = compile
compilation.start_server()
assert compiled().asm["cubin"] and in_process == [os.getpid()], in_process
"""

IS_KILLED = """
compile_server.Job.compile = lambda self: os.kill(os.getpid(), signal.SIGKILL)
compilation.start_server()
assert compiled().asm["cubin"] and in_process == [os.getpid()], in_process
"""

HANGS = """
compile_server.COMPILE_LIMIT_S = 1
compile_server.Job.compile = lambda self: threading.Event().wait()
compilation.start_server()
assert compiled().asm["cubin"] and in_process == [os.getpid()], in_process
"""

WITH_ITS_WORKER = """
compilation.start_server()
with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
    print(file.read(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


KEYS = """
import importlib, pkgutil
import nvserve.kernels
from nvserve.kernels.launch import _Kernel
names = [found.name for found in pkgutil.iter_modules(nvserve.kernels.__path__)]
modules = [importlib.import_module("nvserve.kernels." + name) for name in names]
kernels = [value for module in modules for value in vars(module).values()]
kernels = [kernel for kernel in kernels if isinstance(kernel, _Kernel)]
keys = {f"{kernel.__module__}.{kernel.__name__}": kernel.cache_key for kernel in ORDER(kernels)}
print(sorted(keys.items()))
"""


def run(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", PRELUDE + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "code",
    [FILLS_THE_CACHE, IN_THIS_PROCESS, CANNOT_START, CANNOT_COMPILE, IS_KILLED, HANGS],
    ids=["fills the cache", "none", "cannot start", "cannot compile", "is killed", "hangs"],
)
def test_a_kernel_is_compiled_by_the_server_or_else_here(code: str, tmp_path: Path) -> None:
    ended = run(code, tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_a_job_arrives_as_it_was_sent() -> None:
    from triton.backends.compiler import GPUTarget

    from nvserve.kernels.compile_server import Job

    options = {"num_warps": 4, "maxnreg": None, "extern_libs": (("libdevice", "/lib"),)}
    attributes: dict[tuple[int, ...], object] = {(0,): [["tt.divisibility", 16]]}
    target = GPUTarget("cuda", 90, 32)
    job = Job("m", "k", {"x": "*bf16"}, {(1,): True}, attributes, target, options, True)
    assert Job.from_bytes(job.to_bytes()) == job
    with pytest.raises(SyntaxError):
        Job.from_bytes(job._replace(options={"hook": print}).to_bytes())


def test_the_key_of_a_kernel_does_not_depend_on_which_was_asked_for_first(tmp_path: Path) -> None:
    orders = ("list", "reversed")
    found = [run(KEYS.replace("ORDER", order), tmp_path) for order in orders]
    assert [one.returncode for one in found] == [0, 0], found[0].stderr + found[1].stderr
    assert "_decode_kernel" in found[0].stdout
    assert found[0].stdout == found[1].stdout


def test_the_server_ends_with_its_worker(tmp_path: Path) -> None:
    ended = run(WITH_ITS_WORKER, tmp_path)
    (server,) = ended.stdout.split()  # all ends of the output are closed: the server's too
    assert ended.returncode == -9, ended.stderr
    assert not Path(f"/proc/{server}/fd").is_dir() or not list(Path(f"/proc/{server}/fd").iterdir())
