"""The part of the configuration that the launcher's policy needs."""

from dataclasses import dataclass

from nvserve.protocol.config import Config


@dataclass(frozen=True, slots=True)
class Limits:
    """How many processes there shall be, how long things may take, how often they may fail."""

    tp_size: int = 1
    num_spares: int = 0
    num_kv_blocks: int = 0
    max_restarts: int = 5
    restart_window_s: float = 60.0
    hang_timeout_s: float = 5.0
    shutdown_timeout_s: float = 30.0

    @classmethod
    def of(cls, config: Config) -> "Limits":
        return cls(
            tp_size=config.tp_size,
            num_spares=config.num_spares,
            num_kv_blocks=config.num_kv_blocks,
            max_restarts=config.max_restarts,
            restart_window_s=config.restart_window_s,
            hang_timeout_s=config.hang_timeout_s,
            shutdown_timeout_s=config.shutdown_timeout_s,
        )
