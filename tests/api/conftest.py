"""A frontend process with a fake core, fresh for each test that asks for one."""

from collections.abc import Iterator

import pytest
from api.fake_core import FakeCore
from api.frontend_process import FrontendProcess


@pytest.fixture
def frontend() -> Iterator[FrontendProcess]:
    process = FrontendProcess()
    try:
        process.endpoint = process.ready().zmq_endpoint
        process.new_core()
        yield process
    finally:
        process.close()


@pytest.fixture
def core(frontend: FrontendProcess) -> FakeCore:
    assert frontend.core is not None
    return frontend.core


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontendProcess]:
    """One frontend for a module's tests that leave no trace in it."""
    process = FrontendProcess()
    try:
        process.endpoint = process.ready().zmq_endpoint
        process.new_core()
        yield process
    finally:
        process.close()
