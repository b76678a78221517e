"""How many files a process may have open, and how many of them clients may take.

ZeroMQ ends a process that cannot open a socket of its own. So a launch makes sure that there is
room for it, and the frontend leaves some when it is full of clients. Knows numbers only.
"""

import resource
from typing import Final

WANTED: Final = 65536  # a shell's usual 1024 is less than a full queue of clients
RESERVED: Final = 64  # of a frontend, for itself: sockets to two lives of core, files, a listener


def raise_limit() -> int:
    """Raise the soft limit towards the hard one; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        soft = max(soft, WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return limit()


def limit() -> int:
    """The soft limit, at most what anybody wants."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def most_clients(share: float) -> int:
    """Connections that one of a frontend's doors may have, where this share of them is its own."""
    return max(1, int((limit() - RESERVED) * share))
