"""A real supervisor over fake children: `python fake_launch.py '{"tp_size": 2}'`."""

import json
import sys
from pathlib import Path

import msgspec

from nvserve.protocol.config import Config, ModelFacts
from nvserve.protocol.control import Role
from nvserve.scripts import launch_dir, listener
from nvserve.scripts.display import Display
from nvserve.scripts.outlet import Outlet
from nvserve.scripts.supervisor import Supervisor

FAKE = (str(Path(__file__).parent / "fake_child.py"),)
FACTS = ModelFacts("LlamaForCausalLM", 256, 1, 4, 128)


def main() -> None:
    base = Config(model="fake", facts=FACTS, served_model_names=["fake"], port=0)
    config = msgspec.structs.replace(base, **json.loads(sys.argv[1]))
    http = listener.listen(config.host, config.port)
    launch_dir.sweep()
    outlet = Outlet()
    supervisor = Supervisor(
        config,
        http=http,
        directory=launch_dir.LaunchDir(),
        display=Display(outlet),
        programs=dict.fromkeys(Role, FAKE),
    )
    code = supervisor.run()
    outlet.close()
    sys.exit(code)


if __name__ == "__main__":
    main()
