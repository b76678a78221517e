"""One child process as the launcher starts it: the folder it works in."""

from pathlib import Path

import pytest
from process.fake_launch import FACTS
from process.server import wait_for

from nvserve.protocol.config import Config
from nvserve.protocol.control import Role, Setup
from nvserve.scripts.children import Child
from nvserve.scripts.hangs import ChildId

LIMIT_S = 60.0
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


def test_a_dead_child_that_is_not_reaped_yet_is_exiting(tmp_path: Path) -> None:
    config = Config(model="fake", facts=FACTS, served_model_names=["fake"])
    setup = Setup(config, Role.WORKER, 0, str(tmp_path))
    programs = {Role.WORKER: ("-c", "import time; time.sleep(600)")}
    child = Child(ChildId(Role.WORKER, 0), "worker 0", setup, programs)
    try:
        assert not child.is_exiting()
    finally:
        child.kill()
        assert child.wait(LIMIT_S)
        assert child.is_exiting()
        child.reap()
        assert child.is_exiting()
        child.close()
