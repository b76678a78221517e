"""For every test: one thread a process, since few cores are shared, and no deadline an example."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from hypothesis import HealthCheck, settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell script
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start shall have Ctrl-C

# CI judges a change by examples that are the same in every run; a larger scale draws new ones. How
# long drawing takes is the machine's affair: it may stand still for a second or two.
settings.register_profile(
    "nvserve",
    deadline=None,
    print_blob=True,
    derandomize=float(os.environ.get("NVSERVE_TEST_SCALE", "0.1")) <= 0.1,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nvserve")
