"""What `nvserve status` and tests are told of a running launch."""

import dataclasses
from collections.abc import Iterable

from nvserve.protocol.progress import Snapshot
from nvserve.scripts.children import Child
from nvserve.scripts.control_socket import Reply
from nvserve.scripts.recovery import Recovery


def describe_launch(policy: Recovery, children: Iterable[Child], *, url: str, model: str) -> Reply:
    """The state of the launch and each of its processes, as JSON values."""
    planned = policy.planned.last
    return {
        "state": policy.state.value,
        "reason": policy.reason,
        "url": url,
        "model": model,
        "epoch": policy.formation.epoch,
        "num_kv_blocks": policy.formation.num_kv_blocks,
        "restarts": {role.value: count for role, count in policy.restarts.items()},
        "recovery_seconds": policy.formation.recovery_seconds,
        "last_planned": None if planned is None else dataclasses.asdict(planned),
        "processes": [
            {
                "name": child.name,
                "role": child.id.role.value,
                "life": child.id.life,
                "pid": child.pid,
                "rank": policy.members[child.id].rank,
                "is_ready": policy.members[child.id].is_ready,
                "page": _describe_page(child.page()),
            }
            for child in children
        ],
    }


def _describe_page(page: Snapshot | None) -> dict[str, object] | None:
    """A progress page, its phase by name."""
    return None if page is None else page._asdict() | {"phase": page.phase.name.lower()}
