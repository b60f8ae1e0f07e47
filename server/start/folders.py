"""Find the folders of model and tokenizer: a folder named by a flag, a download of ORG/NAME, or one made from a GGUF
file.

Owner: loop; the work runs in the pool, and ends when the server is stopped. In: the names in the configuration. Out:
the folders in AppState, with configuration, weights and tokenizer. A folder named by a flag is used as it is.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.base.drafts import draft_config
from engine.base.errors import ConfigError
from server.flags.config import Config
from server.start.gguf import as_folder, is_gguf
from server.start.joined import is_split, join
from server.start.makers import check_chat
from server.start.phases import in_pool
from server.state import AppState

if TYPE_CHECKING:
    from engine.weights.files import Shard
    from server.start.hub import Hub

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?", re.ASCII)  # ORG/NAME, or ORG/NAME:QUANT
DRAFTS = "--speculative-config"


def is_hub_name(name: str) -> bool:
    """Whether a --model or --tokenizer is looked up on the hub; a local path of that name has precedence."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def check_wanted(config: Config) -> None:
    """Raise ConfigError for drafts that no model can have, or if adapters are wanted for a base that has none here."""
    draft_config(config.scheduler.speculative_config)
    if config.lora.enable_lora and is_gguf(config.folder):
        raise ConfigError(
            f"--enable-lora: {config.folder} is a GGUF file, whose layers take no adapters; serve safetensors"
        )


async def fetch(state: AppState) -> None:
    """Fetch or make the folders of models and a tokenizer named ORG/NAME, or of a GGUF file. Raises ConfigError.

    The flags that name parsers and a template are checked first, since downloading a model may take long.
    """
    chat = state.config.chat
    check_wanted(state.config)
    await in_pool(state, "template file", lambda: check_chat(chat)) if chat.chat_template else check_chat(chat)
    if not is_hub_name(state.folder) and not is_gguf(state.folder):
        check_folder(state.folder)
    named = any(map(is_hub_name, (state.folder, state.download.tokenizer, state.config.drafter)))
    if named or is_gguf(state.folder) or is_split(state.folder):
        begun = time.perf_counter()
        state.download.running = state.pool.submit(fetched, state.config, state.download.stop)
        found = await asyncio.wrap_future(state.download.running)
        state.folder, state.download.tokenizer, state.download.drafter = found
        state.startup["fetch"] = time.perf_counter() - begun
    else:
        refuse_revision(state.config.model.revision, state.folder)
        local_drafter(state.config)  # without server.start.hub, whose imports would hold the loop for seconds


def refuse_revision(revision: str, folder: str) -> None:
    """Refuse --revision for a local folder, which has only one."""
    if revision:
        raise ConfigError(f"--revision {revision}: {folder} is a folder, which has one revision; leave the flag out")


def fetched(config: Config, stopped: threading.Event) -> tuple[str, str, str]:
    """Fetch all and return the folders of model, tokenizer and drafter ("": there is no drafter)."""
    hub = hub_of(config, stopped)
    model = whole(config, hub)
    return model, tokenizer_folder(config, model, hub), drafter_folder(config, hub)


def drafter_folder(config: Config, hub: Hub) -> str:
    """The folder of the drafter of --speculative-config, with its weights; "": there is none. Raises ConfigError."""
    name = config.drafter
    if not is_hub_name(name):
        return local_drafter(config)
    from server.start.hub import fetch

    return str(fetch(name, replace(hub, revision=drafter_revision(config), flag=DRAFTS)))


def local_drafter(config: Config) -> str:
    """The same for a drafter that is a folder."""
    name, revision = config.drafter, drafter_revision(config)
    if not name:
        return ""
    if revision:
        raise ConfigError(f"{DRAFTS}: revision={revision!r}: {name} is a folder, which has one revision; leave it out")
    if not Path(name).is_dir():
        raise ConfigError(f"{DRAFTS}: model={name!r}: there is no such folder; a drafter on the hub is named ORG/NAME")
    return name


def drafter_revision(config: Config) -> str:
    return str(config.scheduler.speculative_config.get("revision") or "")


def tokenizer_folder(config: Config, model: str, hub: Hub) -> str:
    """The folder of --tokenizer if given, else the model's folder."""
    named = config.model.tokenizer
    return located(config, named, replace(hub, revision="", flag="--tokenizer"), weights=False) if named else model


def whole(config: Config, hub: Hub) -> str:
    """The folder of the complete model; if its parts are in several repositories, they are joined into one folder."""
    weights = config.model.load_format != "dummy"
    folder = located(config, config.folder, hub, weights)
    if not is_split(folder):
        return folder

    from engine.weights.files import open_checkpoint
    from server.start.hub import fetch

    def part(name: str, wanted: bool) -> tuple[Path, list[Shard]]:
        if is_hub_name(name):
            found = fetch(name, replace(hub, revision="", flag="text_model_id, audio_model_id:"), wanted)
        else:
            check_folder(name)
            found = Path(name)
        return found, open_checkpoint(found) if wanted else []

    own = open_checkpoint(folder) if weights else []
    return str(join(Path(folder), own, part, config.model.download_dir, weights)[0])


def located(config: Config, name: str, hub: Hub, weights: bool) -> str:
    """The folder of a model or tokenizer. With `weights`, the weights are fetched too, after the configuration
    is checked.
    """
    if not is_hub_name(name):
        refuse_revision(hub.revision, name)
        return as_folder(name, tokenizer=not config.model.tokenizer) if is_gguf(name) else name
    from engine.models.registry import load_model_config
    from server.start.hub import fetch

    def check(folder: Path) -> None:
        if is_split(folder):  # checked after its parts are joined
            return
        model, flags = config.model, config.pooling
        load_model_config(
            folder, model.hf_overrides, config.without_media, model.model_impl, flags.runner, flags.pooler_config
        )

    found = fetch(name, hub, weights, check if weights else None)
    is_model = found.suffix == ".gguf"
    return (
        as_folder(str(found), tokenizer=not config.model.tokenizer or name != config.folder) if is_model else str(found)
    )


def hub_of(config: Config, stopped: threading.Event | None = None) -> Hub:
    """The operator's settings for the hub."""
    from server.start.hub import Hub

    model = config.model
    return Hub(model.revision, model.download_dir, model.hf_token, stopped=stopped or threading.Event())


def check_folder(folder: str) -> None:
    """Raise ConfigError unless the model folder exists."""
    if Path(folder).is_file():
        raise ConfigError(f"--model {folder}: is a file; name the folder that holds config.json, or a file NAME.gguf")
    if not Path(folder).is_dir():
        raise ConfigError(f"--model {folder}: there is no such folder; a model on the hub is named ORG/NAME")
