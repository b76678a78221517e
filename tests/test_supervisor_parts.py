"""The launcher's parts one by one: ladder, listener, launch directory, display, crash report."""

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from process.server import environment

from nvserve.protocol.progress import Phase, Snapshot
from nvserve.scripts import launch_dir, listener
from nvserve.scripts.crash_report import Accident, write_report
from nvserve.scripts.device import has_gpu
from nvserve.scripts.display import Display
from nvserve.scripts.exit_codes import ExitCode
from nvserve.scripts.ladder import Intensity, Ladder, Rung


def test_a_second_failure_on_a_rung_goes_one_rung_down() -> None:
    ladder = Ladder()
    rungs = [ladder.fall() for _ in range(7)]
    assert [rung.value for rung in rungs] == [1, 1, 2, 2, 3, 3, 4]


def test_a_finished_recovery_begins_the_ladder_again() -> None:
    ladder = Ladder()
    for _ in range(3):
        ladder.fall()
    ladder.leave()
    assert ladder.fall() is Rung.REPLACE


def test_the_intensity_counts_a_sliding_window() -> None:
    intensity = Intensity(2, 10.0)
    assert [intensity.count(now) for now in (0.0, 1.0, 2.0)] == [True, True, False]
    assert intensity.count(12.5)


def test_a_bound_port_is_refused_by_name() -> None:
    with listener.listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(listener.ListenError, match=f"port {port} on 127.0.0.1 is already"):
            listener.listen("127.0.0.1", port)


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(listener.ListenError, match=r"--host no\.such\.host\.invalid: "):
        listener.listen("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
        ("0.0.0.0", "http://127.0.0.1:"),
    ],
)
def test_the_url_is_one_a_local_client_can_use(host: str, shown: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with listener.listen(host, 0) as sock:
        url = listener.url(sock)
        assert url.startswith(shown)
        socket.create_connection(
            (shown.partition("//")[2].rpartition(":")[0].strip("[]"), sock.getsockname()[1])
        ).close()


def test_a_host_that_is_no_name_is_told() -> None:
    with pytest.raises(listener.ListenError, match=r"--host a\.\.b is no name"):
        listener.listen("a..b", 0)


def test_a_launch_directory_is_private_and_goes_with_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_dir, "bases", lambda: [tmp_path])
    directory = launch_dir.LaunchDir()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert launch_dir.find_all() == [directory.path]
    assert launch_dir.sweep() == []
    directory.remove()
    assert launch_dir.find_all() == []


def test_a_sweeper_that_was_stopped_goes_with_its_launch_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_dir, "bases", lambda: [tmp_path])
    monkeypatch.setattr(launch_dir, "SWEEPER_LIMIT_S", 0.01)
    directory = launch_dir.LaunchDir()
    sweeper = directory._sweeper
    assert sweeper is not None
    sweeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sweeper.pid, os.WSTOPPED | os.WNOWAIT)
    directory.remove()
    assert sweeper.wait(30.0) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_directory_whose_launcher_is_gone_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_dir, "bases", lambda: [tmp_path])
    code = "import os; from nvserve.scripts import launch_dir as d\n"
    code += "d.SWEEPER = 'true'; print(d.LaunchDir().path); os._exit(0)"
    made = subprocess.run(
        [sys.executable, "-uc", code],
        env=environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    stale = Path(made.stdout.strip())
    if stale.parent != tmp_path:  # a long TMPDIR: it took /tmp
        monkeypatch.setattr(launch_dir, "bases", lambda: [stale.parent])
    assert stale.is_dir()
    assert stale in launch_dir.sweep()
    assert not stale.exists()


def test_links_and_files_are_never_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_dir, "bases", lambda: [tmp_path])
    target = tmp_path / "precious"
    target.mkdir()
    (target / "lock").touch()
    (tmp_path / "nvserve-link").symlink_to(target)
    (tmp_path / "nvserve-file").touch()
    assert launch_dir.sweep() == []
    assert (target / "lock").exists()


def test_a_folder_of_somebody_elses_is_never_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_dir, "bases", lambda: [tmp_path])
    checkout, named_alike, empty, left = (
        tmp_path / f"nvserve-{name}"
        for name in ("checkout", "my_notes", "bench-ab12cd34", "ab12cd_4")
    )
    for path in (checkout, named_alike, empty, left):
        path.mkdir()
    (checkout / "lock").write_text("of another program")
    (named_alike / "notes").touch()
    (left / "making").touch()
    for path in (checkout, named_alike, empty, left):
        os.utime(path, (0, 0))
    assert launch_dir.sweep() == [left]


def test_a_directory_that_goes_while_it_is_looked_at_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_dir, "find_all", lambda: [tmp_path / "nvserve-gone0000"])
    assert launch_dir.sweep() == []


def test_without_a_writable_place_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_dir, "bases", lambda: [tmp_path / "missing"])
    with pytest.raises(launch_dir.LaunchDirError, match="set TMPDIR"):
        launch_dir.LaunchDir()


def test_every_base_leaves_room_for_the_longest_socket_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for length in range(1, 120):
        base = "/" + "a" * (length - 1)
        monkeypatch.setattr("tempfile.gettempdir", lambda base=base: base)
        for path in launch_dir.bases():
            longest = path / f"{launch_dir.PREFIX}{'x' * 8}" / ("y" * 31)
            assert len(os.fsencode(longest)) <= 107


class Shown(io.StringIO):
    def announce(self, line: str) -> None:
        self.write(f"{line}\n")


class Terminal(Shown):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_lines_push_down() -> None:
    terminal = Terminal()
    display = Display(terminal)
    display.progress("worker 0", "weights", 0.5)
    display.log("core", "hello")
    display.settle()
    shown = terminal.getvalue().split("\r\x1b[K")
    bar = "[############............] worker 0 weights 50%"
    assert [part for part in shown if part] == [bar, shown[2], bar]
    assert shown[2].endswith(" core | hello\n")


def test_elsewhere_each_phase_is_one_line() -> None:
    lines = Shown()
    display = Display(lines)
    for done in (0.1, 0.2, 0.9):
        display.progress("worker 0", "weights", done)
    display.progress("worker 0", "warm-up", 0.0)
    assert [line[9:] for line in lines.getvalue().splitlines()] == [
        "launcher | worker 0: weights",
        "launcher | worker 0: warm-up",
    ]


def test_a_crash_report_tells_who_where_and_the_last_words() -> None:
    page = Snapshot(3, 77, Phase.FORWARD, 5, 5, 0.0)
    accidents = [
        Accident("core was killed by SIGKILL", "core", 1, None, []),
        Accident("worker 1 exited with status 1", "worker 1", 42, page, ["a", "boom"]),
    ]
    assert write_report(ExitCode.WORKER_LOST, "too many", accidents) == [
        "nvserve: too many (exit status 6, WORKER_LOST)",
        "  earlier: core was killed by SIGKILL",
        "  last: worker 1, pid 42, phase forward, epoch 3, step 77",
        "  its last 2 lines:",
        "  | a",
        "  | boom",
    ]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_none(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not has_gpu()
