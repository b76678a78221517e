"""The wheel holds nvserve and nothing else, and what it installs runs from anywhere."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.server import ROOT

FOLDERS = ("core", "frontend", "kernels", "protocol", "scripts", "workers")
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".data", ".*_cache", "__pycache__", "build", "dist", "*.egg-info", ".whl"
)


def run(*command: str, cwd: Path) -> str:
    """Its output; where PYTHONPATH names the checkout, that is not what is tried here."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy, so that no build folder appears in the checkout."""
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    out = copy.parent / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    run(*command, "--no-build-isolation", "--wheel-dir", str(out), str(copy), cwd=copy.parent)
    [path] = out.glob("nvserve-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_nvserve_only(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"nvserve"}


def test_every_python_file_of_the_six_folders_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    sources = {
        f"nvserve/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    packed = {name for name in wheel.namelist() if name.endswith(".py")}
    assert packed == sources | {"nvserve/__init__.py", "nvserve/__main__.py"}
    assert "nvserve/py.typed" in wheel.namelist()


def test_the_demo_model_is_in_the_wheel_and_small(wheel: zipfile.ZipFile) -> None:
    files = {
        info.filename.rpartition("/")[2]: info.file_size
        for info in wheel.infolist()
        if info.filename.startswith("nvserve/scripts/demo_model/")
    }
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(
        files
    )
    assert files["model.safetensors"] <= 5_000_000


def test_the_installed_command_runs_away_from_the_checkout(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """A fresh environment that borrows our dependencies and has nvserve from the wheel."""
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(run(str(python), "-c", "import site; print(site.getsitepackages()[0])",
                    cwd=tmp_path).strip())  # fmt: skip
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "borrowed.pth").write_text(ours + "\n")
    install = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install"]
    run(*install, "--no-deps", "--force-reinstall", str(wheel.filename), cwd=tmp_path)
    command = tmp_path / "env" / "bin" / "nvserve"
    assert "launch" in run(str(command), "--help", cwd=tmp_path)
    assert "Usage: nvserve" in run(str(python), "-P", "-m", "nvserve", "--help", cwd=tmp_path)
    where = run(str(python), "-P", "-c", "import nvserve; print(nvserve.__file__)", cwd=tmp_path)
    assert where.startswith(str(site))
