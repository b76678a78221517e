"""What every child process does first, as far as it can be done in this one."""

import gc

from nvserve.protocol.child import freeze_start


def test_after_the_start_collections_run_and_leave_out_what_is_there() -> None:
    kept = [object(), [object()]]
    gc.disable()
    try:
        freeze_start()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()
