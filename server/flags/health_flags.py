"""HealthFlags: how a server monitors itself, and when it ends itself; a group of Config (SECURITY S37, S40,
S41, S44).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HealthFlags:
    """Limits of memory, probes, and flags for tests of failures."""

    rss_soft_fraction: float = field(
        default=0.85,
        metadata={"help": "share of the memory (the cgroup's) above which no media are taken", "low": 0.01, "high": 1},
    )
    rss_hard_fraction: float = field(
        default=0.95,
        metadata={"help": "share above which the server drains and exits with 70; 1: never", "low": 0.01, "high": 1},
    )
    canary_interval: float = field(
        default=30.0,
        metadata={
            "help": "seconds without a step after which one token is wanted, as a check; 0: off",
            "low": 0,
        },
    )
    engine_death_exit: float = field(
        default=10.0, metadata={"help": "seconds from the engine's death to the exit, at most", "low": 0.1}
    )
    metrics_max_series: int = field(default=5000, metadata={"help": "series of HTTP metrics, at most", "low": 10})
    debug_faults: bool = field(
        default=False, metadata={"help": "for tests: POST /debug/faults makes the server fail at chosen points"}
    )
    debug_poison: bool = field(
        default=False, metadata={"help": "for tests: memory of ended requests is overwritten with what is no number"}
    )
