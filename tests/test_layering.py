"""One way down: what each folder may import, checked in the source and in running interpreters."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process.server import ROOT, environment

FOLDERS: dict[str, set[str]] = {
    "protocol": set(),
    "core": {"protocol"},
    "frontend": {"protocol"},
    "kernels": set(),
    "workers": {"protocol", "kernels"},
    "scripts": {"protocol", "core", "frontend", "kernels", "workers"},
}
WITHOUT_TORCH = ("protocol", "core", "frontend")
HEAVY = {"torch", "triton", "transformers"}
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def test_the_import_root_holds_one_relative_link_for_each_folder() -> None:
    root = ROOT / ".src" / "nvserve"
    links = {path.name: path.readlink().as_posix() for path in root.iterdir() if path.is_symlink()}
    assert links == {name: f"../../{name}" for name in FOLDERS}
    assert all((ROOT / name / "__init__.py").is_file() for name in FOLDERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_folder_may(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    allowed = FOLDERS[folder] | {folder}
    for line, name in imports_of(path):
        top, _, rest = name.partition(".")
        place = f"{path}:{line}: {name}"
        assert top not in FOLDERS, f"{place}: say nvserve.{top}"
        if top == "nvserve" and rest:
            assert rest.split(".")[0] in allowed, f"{place}: not for {folder}"
        if folder in WITHOUT_TORCH:
            assert top not in HEAVY, f"{place}: {folder} loads no engine"


@pytest.mark.parametrize("folder", FOLDERS)
def test_package_files_hold_at_most_a_docstring(folder: str) -> None:
    for path in (ROOT / folder).rglob("__init__.py"):
        body = ast.parse(path.read_text()).body
        assert all(
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body
        ), path


@pytest.mark.parametrize(
    "module", ["nvserve.core.main", "nvserve.frontend.main", "nvserve.scripts.launch"]
)
def test_a_process_without_a_gpu_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", FOLDERS)
def test_importing_by_the_bare_name_fails_outside_the_checkout(name: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s and s.origin)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert str(ROOT) not in done.stdout, done.stdout
