"""Adapters at the start: makes the Home, loads the adapters of --lora-modules, and gives them their places.

Owner: loop; files are read in the pool, places are filled on the device thread. In: AppState with a ready engine. Out:
`state.adapters`; ConfigError for an adapter that cannot be served.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.base.errors import ConfigError
from engine.lora.home import Home
from engine.lora.source import Source
from server.flags.config import Config
from server.flags.lora_flags import Module, module_of
from server.ops.adapter_metrics import AdapterMetrics
from server.start.folders import hub_of
from server.state import AppState

if TYPE_CHECKING:
    from engine.run.adapters import Served
    from engine.run.runtime import Runtime


async def load_adapters(state: AppState) -> None:
    """Loads the adapters; nothing without --enable-lora."""
    settings, flags = state.engine.config.lora, state.config.lora
    if settings is None:
        return
    from engine.lora.load import check_adapter, load_adapter

    begun = time.perf_counter()
    if flags.lora_dir and not await asyncio.to_thread(Path(flags.lora_dir).is_dir):
        raise ConfigError(f"--lora-dir {flags.lora_dir}: there is no such folder")
    served = await state.engine.on_device(_served)
    load, check = partial(load_adapter, rules=served.rules), partial(check_adapter, rules=served.rules)
    home = Home(load, check, state.pool, settings.max_cpu_loras, flags.lora_dir)
    if flags.lora_hub:
        home.fetched = partial(at_run_time, state.config)
    for module in map(module_of, flags.lora_modules):
        await _load(state, home, module)
    state.adapters = home
    state.metrics.adapters = AdapterMetrics(
        home,
        settings.max_loras,
        served,
        lambda: [use for each in state.open_exchanges if (use := each.adapter_use) is not None],
    )
    state.startup["adapters"] = time.perf_counter() - begun


async def _load(state: AppState, home: Home, module: Module) -> None:
    """Loads an adapter into the host memory, and into a place while there are places."""
    from engine.run.adapters import fill

    try:
        source = await asyncio.get_running_loop().run_in_executor(state.pool, source_of, state.config, module)
        adapter = await home.add(module.name, source)
    except ConfigError as error:
        raise ConfigError(f"--lora-modules {module.name}: {error}") from None
    await state.engine.on_device(partial(fill, adapter=adapter))


def _served(runtime: Runtime) -> Served:
    from engine.run.adapters import served

    return served(runtime)


def source_of(config: Config, module: Module) -> Source:
    """Where an adapter of --lora-modules is; its files are fetched if it is on the hub. Raises ConfigError."""
    from server.start.adapter_hub import is_hub_adapter

    if is_hub_adapter(module.path):
        return replace(from_hub(config, module.path), sha256=module.sha256)
    return Source(module.path, root=Path(module.path).name, sha256=module.sha256)


def at_run_time(config: Config, path: str) -> Source | None:
    """An adapter on the hub that a client named; None: the path is of another form, or a folder below --lora-dir."""
    from server.start.adapter_hub import SPEC

    folder = config.lora.lora_dir
    if SPEC.fullmatch(path) is None or (folder and Path(folder, path).is_dir()):
        return None
    return from_hub(config, path)


def from_hub(config: Config, path: str) -> Source:
    """An adapter on the hub, fetched. Raises ConfigError."""
    from server.start.adapter_hub import fetch_adapter

    hub = replace(hub_of(config), flag="--lora-modules")
    return Source(str(fetch_adapter(path, hub, config.lora.lora_max_bytes)), root=path)
