"""A frontend process with a fake core: in its next life for each test, or shared by a module."""

from collections.abc import Iterator

import pytest
from api.fake_core import FakeCore
from api.frontend_process import FrontendProcess


def start() -> FrontendProcess:
    process = FrontendProcess()
    try:
        process.endpoint = process.ready().zmq_endpoint
    except BaseException:
        process.close()
        raise
    return process


@pytest.fixture(scope="module")
def _fit() -> Iterator[list[FrontendProcess]]:
    """At most one process, which the test before left as it found it."""
    fit: list[FrontendProcess] = []
    yield fit
    for process in fit:
        process.close()


@pytest.fixture
def frontend(_fit: list[FrontendProcess]) -> Iterator[FrontendProcess]:
    """Without any request, connected to a new life of core; its totals may be of earlier tests."""
    process = _fit.pop() if _fit else start()
    try:
        process.new_core()
        yield process
        if process.is_fit():
            _fit.append(process)
    finally:
        if process not in _fit:
            process.close()


@pytest.fixture
def core(frontend: FrontendProcess) -> FakeCore:
    assert frontend.core is not None
    return frontend.core


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontendProcess]:
    """One frontend, and one core, for a module's tests that leave no trace in it."""
    process = start()
    try:
        process.new_core()
        yield process
    finally:
        process.close()
