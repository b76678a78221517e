"""For every test: one thread a process, since few cores are shared, and no deadline an example."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from hypothesis import settings

settings.register_profile("nvserve", deadline=None, print_blob=True)
settings.load_profile("nvserve")
