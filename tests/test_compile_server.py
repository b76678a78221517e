"""The compile server, on a real kernel for a device that need not be here.

In processes of their own: a server is forked before threads start, and Triton is not to interpret.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvserve.kernels.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")

PRELUDE = """
import os, resource, signal, threading, time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from nvserve.kernels import compilation
from nvserve.kernels.norm_triton import _rms_norm_kernel as kernel
from nvserve.workers import compile_server
from nvserve.workers.compile_server import CompileServer, Job, start_server, stop_server

target = GPUTarget("cuda", 90, 32)
options = make_backend(target).parse_options({"num_warps": 4}).__dict__

def source(block=1024):
    types = dict.fromkeys(kernel.arg_names, "*bf16") | {"width": "i32", "eps": "fp32"}
    constants = {"ADD": True, "BLOCK": block, "PDL": True}
    types |= dict.fromkeys(constants, "constexpr")
    return compilation.Source(kernel, types, constants)

def compiled(block=1024):
    return compilation.compile_source(source(block), target, options)

here, asked = [], []  # what was compiled in this process, and what the server answered
make_ir, ask = triton.compiler.ASTSource.make_ir, CompileServer.ask
def noted_ir(self, *arguments, **options):
    here.append(os.getpid())
    return make_ir(self, *arguments, **options)
def noted_ask(self, *arguments):
    asked.append(ask(self, *arguments))
    return asked[-1]
triton.compiler.ASTSource.make_ir, CompileServer.ask = noted_ir, noted_ask

class NoDevice:  # the real one asks for a driver, which a machine without a GPU lacks
    def launcher_cls(self, source, metadata):
        assert metadata.name == "_rms_norm_kernel"

compilation.prepare_triton = lambda: triton.runtime.driver.set_active(NoDevice())
def fails(*arguments):
    raise RuntimeError("no")
"""

FILLS_THE_CACHE = """
start_server()
found = compiled()
assert found.asm["cubin"] and (here, asked) == ([], [True]), (here, asked)
stop_server()
assert compiled().hash == found.hash and here == []
try:
    os.waitpid(-1, os.WNOHANG)
    raise AssertionError("the server was not waited for")
except ChildProcessError:
    pass
"""

WITH_MANY_FILES = """
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
start_server()
assert compiled().asm["cubin"] and (here, asked) == ([], [True]), (here, asked)
"""

# -- where there is none, or none that works, this process compiles --------------------------------

NONE = """
assert compiled().asm["cubin"] and (here, asked) == ([os.getpid()], []), (here, asked)
"""

HERE = """
start_server()
assert compiled().asm["cubin"] and (here, asked) == ([os.getpid()], [False]), (here, asked)
"""

CANNOT_FORK = (
    """
def fork():
    raise BlockingIOError("no more processes")
os.fork = fork
start_server()
"""
    + NONE
)

CANNOT_START = "compilation.prepare_triton = fails" + HERE

CANNOT_COMPILE = "Job.compile = fails" + HERE

CANNOT_READ = "Job.from_bytes = fails" + HERE

IS_KILLED = "Job.compile = lambda self: os.kill(os.getpid(), signal.SIGKILL)" + HERE

HANGS = (
    """
compile_server.COMPILE_LIMIT_S = 1
Job.compile = lambda self: threading.Event().wait()
"""
    + HERE
)

IS_STOPPED = """
start_server()
compile_server.COMPILE_LIMIT_S = compile_server.END_LIMIT_S = 1
os.kill(compile_server._server._pid, signal.SIGSTOP)
begin = time.monotonic()
assert all(compiled(block).asm["cubin"] for block in (1024, 2048, 4096))
assert (here, asked) == ([os.getpid()] * 3, [False] * 3), (here, asked)
compile_server.COMPILE_LIMIT_S = 1000  # which nobody waits for any more
assert compiled(512).asm["cubin"]
stop_server()
"""

GOES_ON = """
compiles = Job.compile
def compile(self):
    compiles(self if 1024 in self.constants.values() else None)
Job.compile = compile
start_server()
compiled(2048), compiled(1024)
assert (here, asked) == ([os.getpid()], [False, True]), (here, asked)
"""

WITH_ITS_WORKER = """
Job.compile = lambda self: threading.Event().wait()
start_server()
threading.Thread(target=compiled, daemon=True).start()
server = compile_server._server._pid
while not open(f"/proc/{server}/task/{server}/children").read():
    time.sleep(0.01)  # until it has forked
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


# Each in a fork of a process that has loaded everything, with a cache of its own.
ALL = """
import json, sys, tempfile, traceback
cases, ends = json.load(sys.stdin), {}
for name, code in cases.items():
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory() as cache:
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.environ["TRITON_CACHE_DIR"] = cache
                exec(code, globals())
                status = 0
            except BaseException:
                traceback.print_exc(file=errors)
                errors.flush()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        errors.seek(0)
        ends[name] = [status, errors.read()]
print(json.dumps(ends))
"""


def run(code: str, folder: Path, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_INTERPRET": "0"}
    no_threads = "error:This process:DeprecationWarning"  # is multi-threaded, and forks
    command = [sys.executable, "-W", no_threads, "-c", PRELUDE + code]
    return subprocess.run(
        command, env=env, input=stdin, capture_output=True, text=True, timeout=180
    )


CASES = {
    "fills the cache": FILLS_THE_CACHE,
    "with many files": WITH_MANY_FILES,
    "none": NONE,
    "cannot fork": CANNOT_FORK,
    "cannot start": CANNOT_START,
    "cannot compile": CANNOT_COMPILE,
    "cannot read": CANNOT_READ,
    "is killed": IS_KILLED,
    "hangs": HANGS,
    "is stopped": IS_STOPPED,
    "goes on": GOES_ON,
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Exit status and traceback of each case."""
    ended = run(ALL, tmp_path_factory.mktemp("cases"), json.dumps(CASES))
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[object]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_is_compiled_by_the_server_or_else_here(
    ends: dict[str, list[object]], case: str
) -> None:
    assert ends[case] == [0, ""]


def test_a_job_arrives_as_it_was_sent() -> None:
    from triton.backends.compiler import GPUTarget

    from nvserve.workers.compile_server import Job

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


def test_the_server_and_what_it_compiles_end_with_their_worker(tmp_path: Path) -> None:
    """Else the end of the output, which all of them hold, would be waited for in vain."""
    ended = run(WITH_ITS_WORKER, tmp_path)
    assert ended.returncode == -9, ended.stderr
