"""One child process as the launcher starts it: the folder it works in."""

from pathlib import Path

import pytest
from process.fake_launch import FACTS
from process.server import wait_for

from nvserve.protocol.config import Config
from nvserve.protocol.control import Role, Setup
from nvserve.scripts.children import Child
from nvserve.scripts.hangs import ChildId

SAY_FOLDER = ("-c", "import os; print(os.getcwd())")


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_child_works_in_the_launchers_folder_unless_that_is_gone(
    is_deleted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if is_deleted:
        folder.rmdir()
    config = Config(model="fake", facts=FACTS, served_model_names=["fake"])
    setup = Setup(config, Role.WORKER, 0, str(tmp_path))
    child = Child(ChildId(Role.WORKER, 0), "worker 0", setup, {Role.WORKER: SAY_FOLDER})
    try:
        assert wait_for("its folder", child.read_lines) == ["/" if is_deleted else str(folder)]
    finally:
        child.kill()
        child.reap()
        child.close()
