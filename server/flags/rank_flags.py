"""RankFlags: one model on several GPUs; a group of Config. Frozen, read everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.base.config import RanksConfig
from server.flags.flag import flag

# Variables that change how the driver launches and how torch allocates.
DRIVER_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class RankFlags:
    """Flags of ranks, each of which has a part of the model."""

    tensor_parallel_size: int = flag(
        1, "GPUs of this machine that share every layer; with --device cpu: simulated, for tests", low=1
    )
    enable_expert_parallel: bool = flag(False, "each rank has whole experts, not a part of every expert's width")
    require_peer_access: bool = flag(
        False, "refuse GPUs that cannot address each other's memory; without the flag sums go through host memory"
    )

    def engine(self, environment: Mapping[str, str]) -> RanksConfig:
        """The engine's settings; environment: of this process."""
        variables = {name: environment[name] for name in DRIVER_VARIABLES if name in environment}
        return RanksConfig(self.enable_expert_parallel, self.require_peer_access, variables)
