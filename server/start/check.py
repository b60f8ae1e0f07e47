"""`python -m server check MODEL`: report in about a second whether a model can be served here, and what it needs.

Owner: the main thread. In: the same flags as `serve`. Out: lines for people; the exit status is 0 if the server would
start. MODEL is a folder, a GGUF file or ORG/NAME; from a repository on the hub only the configurations and the headers
of the weights are fetched, and a drafter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine.base.errors import ConfigError
from engine.base.model_config import ModelConfig
from engine.device.memory import gib
from engine.models.registry import family_of
from engine.run.estimate import Estimate, described
from engine.weights.files import Shard, open_checkpoint
from server.flags.config import Config
from server.flags.lora_flags import module_of
from server.start.folders import check_folder, check_wanted, drafter_folder, hub_of, is_hub_name, tokenizer_folder
from server.start.gguf import as_folder, is_gguf
from server.start.joined import is_split, join
from server.start.makers import check_chat, fills_gaps


def lines(config: Config) -> Iterator[str]:
    """The lines that `check` prints. Raises ConfigError with the reason if the model cannot be served.

    A missing tokenizer and too little memory on this device are reported last, so the lines first say what is needed.
    """
    check_chat(config.chat)
    check_wanted(config)
    folder, shards = headers(config, wanted=config.model.load_format != "dummy")
    yield f"model: {config.folder}" + ("" if str(folder) == config.folder else f", its files in {folder}")
    found = described(config.engine(str(folder), drafter_folder(config, hub_of(config))), shards)
    model = found.config
    takes = ", ".join(model.modalities)
    family = family_of(model.architecture, model.implementation)
    how = f"natively, as {model.architecture} ({family.name})"
    if family.through:
        how = f"its decoder through transformers, its encoders natively ({model.architecture})"
    elif model.implementation == "transformers":
        how = f"through transformers ({model.architecture})"
    elif model.implementation == "mixed":
        how = f"its decoder natively, its encoders through transformers ({model.architecture})"
    if model.implementation != "native" and model.towers:
        check_processor(model)
    yield f"served: {how}; takes {takes}"
    yield from of_weights(found, shards)
    yield from of_ranks(config, found)
    context = f", {gib(found.context_bytes)} for a context of {found.context:,} tokens" if found.context else ""
    numbers = f"; {found.numbers}" if found.numbers else ""
    yield f"KV cache: {found.kv_bytes / 2**20:.1f} MiB per 1,000 tokens{context}{numbers}"
    yield from of_states(found)
    if not config.model.skip_tokenizer_init:
        place = tokenizer_folder(config, str(folder), hub_of(config))
        if fills_gaps(place, config.model.tokenizer_mode) and model.pooling is None:
            yield "fill-in-the-middle: yes"
    yield from of_adapters(config, str(folder), found, shards)
    yield from of_device(config, found)


def of_adapters(config: Config, folder: str, found: Estimate, shards: list[Shard] | None) -> Iterator[str]:
    """A line for each adapter of --lora-modules; ConfigError for one that does not fit."""
    if config.loras is None:
        return
    from engine.lora.files import opened
    from engine.lora.load import Rules, checked
    from engine.lora.sites import give_host_sites
    from engine.lora.targets import targets_of
    from engine.models.registry import build_model
    from server.start.adapters import source_of

    model = build_model(found.config, found.dtype, "cpu", shards)
    targets = targets_of(model)
    rules = Rules(
        targets, give_host_sites(model, config.loras), config.loras, found.dtype, folder, found.config.text.vocab_size
    )
    for module in map(module_of, config.lora.lora_modules):
        try:
            with opened(source_of(config, module), module.name) as files:
                _, plan = checked(files, module.name, rules)
        except ConfigError as error:
            raise ConfigError(f"--lora-modules {module.name}: {error}") from None
        rank, size = max(plan.ranks.values()), plan.num_bytes(found.dtype.itemsize)
        yield f"adapter {module.name}: fits; rank {rank}, {len(plan.targets)} layers, {size:,} bytes in memory"


def headers(config: Config, wanted: bool) -> tuple[Path, list[Shard] | None]:
    """The folder of the configuration and, if `wanted`, the headers of the weight files."""

    def located(name: str, wanted: bool) -> tuple[Path, list[Shard]]:
        if is_hub_name(name):
            from server.start.hub import fetch, fetch_headers

            hub = hub_of(config)
            hub = hub if name == config.folder else replace(hub, revision="")
            found, shards = fetch_headers(name, hub) if wanted else (fetch(name, hub, weights=False), [])
            if found.suffix != ".gguf":
                return found, shards
            name = str(found)
        folder = as_folder(name, tokenizer=not config.model.tokenizer) if is_gguf(name) else name
        check_folder(folder)
        return Path(folder), open_checkpoint(folder) if wanted else []

    folder, shards = located(config.folder, wanted)
    if is_split(folder):
        folder, shards = join(folder, shards, located, config.model.download_dir, wanted)
    return folder, shards if wanted else None


def check_processor(model: ModelConfig) -> None:
    """Check that the processor configured in the checkpoint prepares pictures in a supported way; raise ConfigError if
    not.
    """
    from mm.processors.registry import processor_for

    try:
        processor_for(model.processor, model.folder, model.raw)
    except ValueError as error:
        raise ConfigError(f"{model.architecture}: {error}") from None


def of_weights(found: Estimate, shards: list[Shard] | None) -> Iterator[str]:
    """Lines about quantised layers, a drafter, and the weights: their size in the files and on the device."""
    yield from found.lines
    in_memory = f"{gib(found.weight_bytes)} on the device, computed in {str(found.dtype).removeprefix('torch.')}"
    if shards is None:
        yield f"weights: random (--load-format dummy), {in_memory}"
        return
    sizes: Counter[str] = Counter()
    for shard in shards:
        for tensor in shard.tensors.values():
            sizes[tensor.dtype] += tensor.num_bytes
    dtypes = ", ".join(f"{gib(size)} {dtype}" for dtype, size in sizes.most_common())
    files = "1 file" if len(shards) == 1 else f"{len(shards)} files"
    num_read, num_mtp = found.tensors
    unread = f", {num_mtp:,} of multi-token prediction are not" if num_mtp else ""
    yield f"weights: {dtypes} in {files}, {num_read:,} tensors are read{unread}; {in_memory}"


def of_ranks(config: Config, found: Estimate) -> Iterator[str]:
    """The line about the GPUs that share the model; none if there is one."""
    ranks = found.of_ranks
    if len(ranks) == 1:
        return
    what = "ranks, simulated on the CPU" if found.memory is None else "GPUs"
    held = gib(ranks[0]) if len(set(map(gib, ranks))) == 1 else ", ".join(map(gib, ranks))
    tokens = found.num_blocks * config.cache.block_size
    cached = f"each caches {tokens:,} tokens, its part of the heads" if found.kv_bytes else "nothing is cached"
    yield f"ranks: {len(ranks)} {what}; weights on each: {held}; {cached}"


def of_states(found: Estimate) -> Iterator[str]:
    """The line about layer states, which each row holds regardless of how many tokens it has; none for other models."""
    states = found.states
    if states is None:
        return
    where = f" on each of {len(found.of_ranks)} ranks" if len(found.of_ranks) > 1 else ""
    yield (
        f"states{where}: {states.state_bytes / 1e6:.1f} MB each, {states.tail_bytes / 1e6:.1f} MB of a row's newest "
        f"tokens, {states.padding:.1%} of it padding; a row computes with two; {states.rows:,} rows of "
        f"{states.row_tokens:,} tokens fit at one time"
    )


def of_device(config: Config, found: Estimate) -> Iterator[str]:
    """The lines about the device's memory and the context length that fits."""
    if found.memory is None:
        yield "device: cpu"
    else:
        share = f"--gpu-memory-utilization {config.cache.gpu_memory_utilization:g}"
        yield f"device: {found.device}, {gib(found.memory.total)}, {gib(found.memory.free)} free, {share}"
    if found.refusal is not None:
        raise found.refusal
    longest = config.model.max_model_len or found.config.max_position
    fits = f"--max-model-len {longest:,} fits" if found.context == longest else f"at most {found.context:,} tokens fit"
    estimated = "" if found.memory is None else " (a step and its graphs are estimated)"
    yield f"context: {fits}; {found.contexts:.1f} such contexts at one time{estimated}"


def refused(error: ConfigError) -> str:
    """The last line of `check` if the model cannot be served."""
    return f"refused: {error}"
