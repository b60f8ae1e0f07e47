"""Start: loads a model folder and warms up the engine, in timed phases.

Thread: device. In: an EngineConfig. Out: a Runtime. The order of the phases follows their dependencies: parts of the
step claim memory before the KV cache is sized; kernels are compiled before memory is measured; graphs come last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from _fast import cpu
from engine.base.config import EngineConfig
from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.checkpoint.config import resolve_dtype
from engine.device.accelerator import Accelerator
from engine.device.cards import cards_of, check_cards
from engine.device.host import choose_device, usable_cores
from engine.models.registry import files_decide, load_model_config
from engine.quant.online import requested
from engine.run.bounds import sizes_of
from engine.run.budget import set_budget
from engine.run.built import built
from engine.run.executors import on_device, on_host
from engine.run.planned import planned
from engine.run.runtime import Runtime
from engine.run.summary import summary
from engine.run.warmup import warmed
from engine.run.weights import read_weights
from engine.weights.files import open_checkpoint

log = logging.getLogger("omniloop.engine")


def load_runtime(config: EngineConfig, startup: dict[str, float], wake: Callable[[], None]) -> Runtime:
    """Loads the model and warms it up; `startup` gets the seconds of each phase; `wake`: see Executor.

    Raises ConfigError with one line for the operator.
    """

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        startup[name] = time.perf_counter() - begun

    device = choose_device(config.device)
    # On a CPU our own kernels' threads do the heavy work; torch's threads would compete with them for the cores.
    torch.set_num_threads(1)
    cpu.set_num_threads(config.num_threads or usable_cores())
    with phase("config"):
        model_config = load_model_config(
            config.model, config.hf_overrides, config.without_media, config.model_impl, config.runner, config.pooler
        )
        model_config = requested(model_config, config.quantization)
        dtype = resolve_dtype(model_config, config.dtype, device)
        sizes = sizes_of(config, model_config, device)
        model_config = replace(model_config, max_model_len=sizes.max_model_len)
        if model_config.implementation != "native":
            _log_transformers(config, model_config, device)
    with phase("device"):
        accelerators = open_accelerators(config, device)
    with phase("weights"), torch.inference_mode():
        reads_headers = files_decide(model_config) or config.kv_cache_dtype != "auto"
        shards = open_checkpoint(config.model) if reads_headers and config.load_format != "dummy" else None
        model = built(config, model_config, dtype, device, shards, sizes, accelerators)
        plan = planned(config, model, sizes, shards, on_host=not accelerators)
        read_weights(config, model, accelerators)
    make = on_device if accelerators else on_host
    runtime = make(config, plan, accelerators, wake, phase)
    with phase("warmup"):
        warmed(runtime, accelerators[0] if accelerators else None)
        if runtime.sizes.width > 1:
            set_budget(runtime)
            runtime.scheduler.states.scan_in(runtime.executor.backend.scan_variant)
    lines = [*summary(config, model, runtime.sizes, runtime.layout, runtime.limits.num_blocks)]
    for line in lines + plan.lines:
        log.info("start: %s", line)
    log.debug("start-up: %s", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in startup.items()))
    return runtime


def _log_transformers(config: EngineConfig, model: ModelConfig, device: str) -> None:
    """Logs that the model runs through transformers. Raises ConfigError for settings that this does not support."""
    if config.deterministic and device != "cpu":
        raise ConfigError(
            f"--deterministic: {model.architecture} runs through transformers, whose products on an accelerator depend "
            "on what else is in the batch; leave the flag out, or use --device cpu"
        )
    torch.set_num_threads(config.num_threads or usable_cores())  # torch computes the products here
    what = (
        "module runs in our steps" if model.implementation == "transformers" else "towers run before a decoder of ours"
    )
    log.info("%s has no file here: transformers' %s", model.architecture, what)


def open_accelerators(config: EngineConfig, device: str) -> list[Accelerator]:
    """An accelerator for each rank; empty on a CPU. The calling thread is bound to the first. Raises ConfigError."""
    ranks = config.tensor_parallel
    if ranks > 1 and device != "cpu":
        check_cards(ranks, cards_of(ranks), config.ranks.driver_variables, config.ranks.require_peer_access)
    first = open_accelerator(device)
    if first is None:
        return []
    found = [first]
    for rank in range(1, ranks):
        other = open_accelerator(f"cuda:{rank}")
        assert other is not None
        other.products = first.products.of_next_rank()
        found.append(other)
    if len(found) > 1:
        first.enter()
    return found


def open_accelerator(device: str) -> Accelerator | None:
    """The accelerator, bound to the calling thread; None on a CPU."""
    return None if device == "cpu" else Accelerator(device)
