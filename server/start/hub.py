"""Hub: a model named ORG/NAME becomes a folder of its files, fetched by huggingface_hub.

Owner: a thread of the pool, at start, before there is an engine. In: the name, and what the operator said about
revision, folder and token. Out: a folder in huggingface_hub's cache with the files that serving reads; pickles, other
frameworks' weights and everything in subfolders stay on the hub. huggingface_hub itself reads HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE and HF_HOME, goes on where a connection broke off, keeps files that came whole, and verifies sizes.

    listing (one request) -> configuration, tokenizer, index -> is there room? -> weights, eight files at a time

Whatever goes wrong is a ConfigError of one line. Where the hub cannot be reached, a complete copy is served.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.checkpoint.files import CONFIG, PARAMS
from engine.checkpoint.pooling_tasks import ADAPTER_CONFIG, FOLDERS
from engine.weights.files import (
    ADAPTER,
    CONSOLIDATED,
    CONSOLIDATED_INDEX,
    INDEX,
    PICKLED,
    SINGLE,
    Shard,
    TensorInfo,
    adapter_files,
    checked,
    open_checkpoint,
    shards_of,
)
from engine.weights.progress import ProgressLine

log = logging.getLogger("omniloop")

# Files other than weights: configurations, tokenizers in every format that is read here, templates, the weights' index.
OTHER_FILES = ("*.json", "*.jinja", "*.model", "*.model.v*", "*.tiktoken", "additional_chat_templates/*.jinja")
# Small, and says that a model is made of adapters.
ALWAYS = tuple(f"{name}/{ADAPTER_CONFIG}" for name in ("*-lora", *FOLDERS.values()))
NOT_TAKEN = ("*/*.json", "*.bin.index.json", "*.h5.index.json", "*.msgpack.index.json", "*/*.model")
LISTING_S = 15.0  # the hub's answer to the first request


@dataclass(frozen=True, slots=True)
class Hub:
    """How to ask the hub; empty values leave the choice to huggingface_hub and its environment variables."""

    revision: str = ""  # branch, tag or commit
    cache: str = ""  # folder for downloads
    token: str = ""
    flag: str = "--model"  # that named the repository
    stopped: threading.Event = field(default_factory=threading.Event)  # set: whoever downloads gives up


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit."""

    commit: str
    sizes: Mapping[str, int]  # by path in the repository


def fetch(name: str, hub: Hub, weights: bool = True, check: Callable[[Path], object] | None = None) -> Path:
    """The folder that holds the repository's files; those of the weights only if asked for.

    `check` looks at the configuration, and raises, before the weights are fetched.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    with one_line(name, hub):
        try:
            listing = listed(name, hub)
        except OfflineModeIsEnabled:
            return cached(name, hub, weights, "HF_HUB_OFFLINE is set")
        except Unreachable as error:
            reason = f"{constants.ENDPOINT} cannot be reached ({error})"
            folder = cached(name, hub, weights, reason)
            log.warning("%s; the downloaded copy of %s is served", reason, name)
            return folder
        folder = download(name, hub, hub.revision or constants.DEFAULT_REVISION, other_files(listing.sizes))
        if folder.name != listing.commit:  # the branch has moved meanwhile: all files come from one commit
            listing = listed(name, replace(hub, revision=folder.name))
        if check is not None:
            check(folder)
        if weights:
            wanted = {file: listing.sizes.get(file, 0) for file in weight_files(name, folder, listing.sizes)}
            absent = {file: size for file, size in wanted.items() if not (folder / file).exists()}
            if absent:
                check_room(name, folder, sum(absent.values()))
                size = sum(absent.values()) / 1e9
                log.info("fetching %s at %s: %d files, %.2f GB", name, listing.commit[:12], len(absent), size)
                line = ProgressLine("download", sum(absent.values()))
                download(name, hub, listing.commit, list(absent), line)
        return folder


def fetch_headers(name: str, hub: Hub) -> tuple[Path, list[Shard]]:
    """The folder of the configurations, and the headers of the weights: of files here, or by range requests."""
    folder = fetch(name, hub, weights=False)
    if not lacking(name, folder, weights=True):
        return folder, open_checkpoint(folder)
    with one_line(name, hub):
        try:
            listing = listed(name, hub)
        except (ConnectionError, Unreachable) as error:
            said = "the weights are not here, and the hub cannot be asked for their headers"
            raise ConfigError(f"--model {name}: {said} ({error})") from None
        files = weight_files(name, folder, listing.sizes)
        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(files, pool.map(lambda file: remote_header(name, hub, listing, file), files)))
        return folder, shards_of(folder, listing.sizes, found.__getitem__)


def remote_header(name: str, hub: Hub, listing: Listing, file: str) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of a file that stays on the hub."""
    from huggingface_hub import HfApi

    api = HfApi(token=hub.token or None)
    found = api.parse_safetensors_file_metadata(name, file, revision=listing.commit).tensors
    entries = {
        tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
        for tensor, info in found.items()
    }
    return checked(Path(name) / file, entries, 0, listing.sizes[file])


class Unreachable(Exception):
    """No answer from the hub; the text says what happened instead."""


def listed(name: str, hub: Hub) -> Listing:
    """One request: which files there are."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    try:
        found = HfApi(token=hub.token or None).model_info(
            name, revision=hub.revision or None, files_metadata=True, timeout=LISTING_S
        )
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            raise Unreachable(f"it answers {error.response.status_code}") from error
        raise
    except HTTPError as error:
        raise Unreachable(type(error).__name__) from error
    return Listing(str(found.sha), {file.rfilename: file.size or 0 for file in found.siblings or ()})


def download(name: str, hub: Hub, revision: str, files: list[str], line: ProgressLine | None = None) -> Path:
    """Brings files of a revision into the cache; those that are there already cost no request."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            revision=revision,
            cache_dir=hub.cache or None,
            token=hub.token or None,
            allow_patterns=files,
            tqdm_class=counted(hub.stopped, line),
        )
    )


class Stopped(Exception):
    """Raised where bytes arrive, so that huggingface_hub takes away what is half there."""


def counted(stopped: threading.Event, line: ProgressLine | None) -> Any:
    """What huggingface_hub calls in place of a progress bar: `line` counts bytes on the disk, no bar is printed."""
    from huggingface_hub.utils import tqdm

    class Bytes(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.is_of_all_files = settings.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**settings, "disable": True})

        def update(self, count: float | None = 1) -> None:
            if stopped.is_set():
                raise Stopped
            if line is not None and self.is_of_all_files:
                line.add(int(count or 0))

    return Bytes


def cached(name: str, hub: Hub, weights: bool, reason: str) -> Path:
    """The copy that was fetched before; ConfigError when there is none, or when it lacks a file."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    remedy = "start once with a connection to the hub, or name a folder"
    try:
        folder = Path(
            snapshot_download(
                name,
                revision=hub.revision or None,
                cache_dir=hub.cache or None,
                local_files_only=True,
                allow_patterns=[CONFIG],
            )
        )
        gaps = lacking(name, folder, weights)
    except IncompleteSnapshotError:
        gaps = [CONFIG]
    except LocalEntryNotFoundError:
        raise ConfigError(f"{hub.flag} {name}: {reason}, and this machine has no copy; {remedy}") from None
    if gaps:
        raise ConfigError(
            f"{hub.flag} {name}: {reason}, and the copy on this machine lacks {', '.join(gaps)}; {remedy}"
        )
    return folder


def lacking(name: str, folder: Path, weights: bool) -> list[str]:
    """Files without which a copy cannot be served."""
    present = {path.name for path in folder.iterdir()}
    gaps = [] if present & {CONFIG, PARAMS} else [CONFIG]
    if weights:
        indexed = present & {INDEX, CONSOLIDATED_INDEX}
        adapters = {f"{path.parent.name}/{ADAPTER}" for known in ALWAYS for path in folder.glob(known)}
        files = weight_files(name, folder, present | {ADAPTER} | adapters | (set() if indexed else {SINGLE}))
        gaps += [file for file in files if not (folder / file).exists()]
    return gaps


def other_files(names: Collection[str]) -> list[str]:
    """The files other than weights that serving may read."""
    return [
        name
        for name in sorted(names)
        if any(fnmatchcase(name, known) for known in ALWAYS)
        or (
            any(fnmatchcase(name, pattern) for pattern in OTHER_FILES)
            and not any(fnmatchcase(name, pattern) for pattern in NOT_TAKEN)
        )
    ]


def weight_files(name: str, folder: Path, names: Collection[str]) -> list[str]:
    """The files that hold the weights, in the order in which engine/weights/files.py looks for them."""
    adapters = adapter_files(folder, names)
    if SINGLE in names:
        return [SINGLE, *adapters]
    for index in (INDEX, CONSOLIDATED_INDEX):
        if (folder / index).exists():
            try:
                files = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
                return [*sorted(set(files)), *adapters]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"--model {name}: its {index} is damaged ({error!r})") from None
    if found := sorted(file for file in names if fnmatchcase(file, CONSOLIDATED)):
        return found
    pickled = sorted(file for file in names if Path(file).suffix in PICKLED)
    raise ConfigError(
        f"--model {name}: it holds no safetensors"
        + (f"; {', '.join(pickled)} can hold code and is never read" if pickled else "")
        + f"; look for a copy in safetensors, or `hf download {name} --local-dir FOLDER` and name the folder: the "
        "refusal then says how to convert it"
    )


def check_room(name: str, folder: Path, needed: int) -> None:
    """Refuses a download that the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(full(name, f"{needed / 1e9:.1f} GB are to be fetched, {free / 1e9:.1f} GB are free"))


def full(name: str, numbers: str) -> str:
    return f"--model {name}: the disk is full ({numbers}); free some room, or name another disk with --download-dir"


@contextmanager
def one_line(name: str, hub: Hub) -> Iterator[None]:
    """Turns what huggingface_hub raises into a ConfigError that says what to do."""
    from huggingface_hub import constants, errors

    where, named = constants.ENDPOINT, f"{hub.flag} {name}"
    try:
        yield
    except errors.RevisionNotFoundError:
        raise ConfigError(f"--revision {hub.revision}: {name} has no branch, tag or commit of that name") from None
    except errors.GatedRepoError:
        raise ConfigError(
            f"{named}: accept the terms at {where}/{name}, then give the token of that account with HF_TOKEN "
            "or --hf-token"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{named}: there is no such folder here, and {where} has no such repository or does not show it "
            "without a token; check the spelling, or give HF_TOKEN or --hf-token"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ConfigError(f"{named}: {where} does not accept the token ({status}); give another") from None
        raise ConfigError(f"{named}: {where} answers {status}; try again later") from None
    except (errors.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"{named}: the download was interrupted ({type(error.__cause__ or error).__name__}); start again, "
            "complete files are reused"
        ) from None
    except errors.SafetensorsParsingError as error:
        raise ConfigError(f"{named}: a header of its weights is damaged ({error})".replace("\n", " ")) from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ConfigError(full(name, error.strerror or "")) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConfigError(f"--download-dir: {error.filename} cannot be written ({error.strerror})") from None
        raise ConfigError(f"{named}: the download failed ({error})".replace("\n", " ")) from None
