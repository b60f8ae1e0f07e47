"""Hub: download the files of a model named ORG/NAME into a folder, with huggingface_hub.

Owner: a thread of the pool, at start, before the engine exists. In: the name, and the operator's revision, folder and
token. Out: a folder in huggingface_hub's cache with the files that serving reads. Pickles, other frameworks' weights
and subfolders (except those of templates and adapters) are not downloaded. huggingface_hub itself reads HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE and HF_HOME, resumes interrupted downloads, reuses complete files, and verifies sizes.

    listing (one request) -> configuration, tokenizer, index -> is there room? -> weights, eight files at a time

Every failure is a one-line ConfigError. If the hub cannot be reached, a complete local copy is served.
"""

from __future__ import annotations

import contextlib
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
from engine.models.drafters.dflash_settings import MASK_FILE
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
    unindexed,
)
from engine.weights.progress import ProgressLine
from server.render.deepseek_form import CODE as FORM
from server.start.gguf import chosen

log = logging.getLogger("omniloop")

# Files other than weights: configurations, all supported tokenizer formats, templates, the index of the weights.
# FORM is read as text. MASK_FILE is not read: a drafter with such a file is refused by its name, not served without.
OTHER_FILES = (
    "*.json", "*.jinja", "*.model", "*.model.v*", "*.tiktoken", "merges.txt", "vocab.txt",
    "additional_chat_templates/*.jinja", FORM, MASK_FILE,
)  # fmt: skip
# The small files that show whether a model consists of adapters.
ALWAYS = tuple(f"{name}/{ADAPTER_CONFIG}" for name in ("*-lora", *FOLDERS.values()))
NOT_TAKEN = ("*/*.json", "*.bin.index.json", "*.h5.index.json", "*.msgpack.index.json", "*/*.model")
LISTING_S = 15.0  # seconds to wait for the hub's answer to the first request


@dataclass(frozen=True, slots=True)
class Hub:
    """How to access the hub; empty values leave the choice to huggingface_hub and its environment variables."""

    revision: str = ""  # branch, tag or commit
    cache: str = ""  # folder for downloads
    token: str = ""
    flag: str = "--model"  # the flag that named the repository
    stopped: threading.Event = field(default_factory=threading.Event)  # if set, the download stops


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit."""

    commit: str
    sizes: Mapping[str, int]  # path in the repository -> bytes


def fetch(name: str, hub: Hub, weights: bool = True, check: Callable[[Path], object] | None = None) -> Path:
    """Download the repository's files and return their folder; weight files only if `weights`.

    Of a repository of GGUF files it downloads one model, NAME:QUANT, and returns the path of its first file. `check`
    receives the folder with the configuration before the weights are fetched, and may raise.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    name, colon, quant = name.partition(":")
    with one_line(name, hub):
        try:
            listing = listed(name, hub)
        except OfflineModeIsEnabled:
            return cached(name, hub, weights, "HF_HUB_OFFLINE is set", quant)
        except Unreachable as error:
            reason = f"{constants.ENDPOINT} cannot be reached ({error})"
            folder = cached(name, hub, weights, reason, quant)
            log.warning("%s; the downloaded copy of %s is served", reason, name)
            return folder
        if colon or holds_ggufs(listing.sizes):
            return fetch_gguf(name, quant, hub, listing, weights)
        folder = download(name, hub, hub.revision or constants.DEFAULT_REVISION, other_files(listing.sizes))
        if folder.name != listing.commit:  # the branch moved since the listing; all files must come from one commit
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


def holds_ggufs(names: Collection[str]) -> bool:
    """Whether a repository has GGUF files and no weights in another format."""
    return any(file.endswith(".gguf") for file in names) and not any(file.endswith(".safetensors") for file in names)


def fetch_gguf(name: str, quant: str, hub: Hub, listing: Listing, weights: bool) -> Path:
    """Download one model of a repository of GGUF files, if `weights`; the path of its first file."""
    from huggingface_hub import constants

    files = chosen(name, quant, listing.sizes)
    absent = {file: listing.sizes[file] for file in files if not is_downloaded(name, hub, listing.commit, file)}
    if absent and not weights:
        raise ConfigError(
            f"{hub.flag} {name}: its configuration is inside {files[0]}, which is not on this machine; start the "
            "server, or fetch the file with `hf download`"
        )
    if absent:
        folder, size = Path(hub.cache or constants.HF_HUB_CACHE), sum(absent.values())
        folder.mkdir(parents=True, exist_ok=True)
        check_room(name, folder, size)
        log.info("fetching %s of %s at %s: %.2f GB", ", ".join(absent), name, listing.commit[:12], size / 1e9)
    line = ProgressLine("download", sum(absent.values()))
    found = download(name, hub, hub.revision or constants.DEFAULT_REVISION, files, line) / files[0]
    if not found.exists():  # the branch moved since the listing
        raise ConfigError(f"{hub.flag} {name}: the repository has changed while it was read; start again")
    return found


def is_downloaded(name: str, hub: Hub, commit: str, file: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, file, hub.cache or None, commit), str)


def fetch_headers(name: str, hub: Hub) -> tuple[Path, list[Shard]]:
    """The folder of the configurations and the headers of the weights, read from local files or by range requests."""
    folder = fetch(name, hub, weights=False)
    if folder.suffix == ".gguf":
        return folder, []
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
    """Names, shapes and dtypes of the tensors in a file, read from the hub without downloading the file."""
    from huggingface_hub import HfApi

    api = HfApi(token=hub.token or None)
    found = api.parse_safetensors_file_metadata(name, file, revision=listing.commit).tensors
    entries = {
        tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
        for tensor, info in found.items()
    }
    return checked(Path(name) / file, entries, 0, listing.sizes[file])


class Unreachable(Exception):
    """The hub did not answer; the text says what happened instead."""


def listed(name: str, hub: Hub) -> Listing:
    """List the repository's files, in one request."""
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
    """Download files of a revision into the cache; files already there cost no request."""
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
    """Raised when bytes arrive after a stop, so that huggingface_hub removes the incomplete file."""


def counted(stopped: threading.Event, line: ProgressLine | None) -> Any:
    """A replacement for huggingface_hub's progress bar: it adds bytes written to disk to `line`, and prints no bar."""
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


def local_copy(name: str, hub: Hub, patterns: list[str]) -> Path | None:
    """The folder of an earlier download, None if there is none. Raises IncompleteSnapshotError if it lacks files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    where: dict[str, Any] = {"revision": hub.revision or None, "cache_dir": hub.cache or None}
    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=patterns, **where))
    except IncompleteSnapshotError:  # a LocalEntryNotFoundError too
        raise
    except LocalEntryNotFoundError:
        return None


def cached(name: str, hub: Hub, weights: bool, reason: str, quant: str = "") -> Path:
    """The folder, or the GGUF file, of an earlier download. Raises ConfigError if there is none, or if it lacks a
    file.
    """
    from huggingface_hub.errors import IncompleteSnapshotError

    remedy = "start once with a connection to the hub, or name a folder"
    folder, gaps = None, [CONFIG]
    with contextlib.suppress(IncompleteSnapshotError):
        folder = local_copy(name, hub, [CONFIG])
        if folder is None:
            raise ConfigError(f"{hub.flag} {name}: {reason}, and this machine has no copy; {remedy}")
        ggufs = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        if ggufs and not (folder / CONFIG).exists():
            return folder / chosen(name, quant, ggufs)[0]
        gaps = lacking(name, folder, weights)
    if folder is None or gaps:
        raise ConfigError(
            f"{hub.flag} {name}: {reason}, and the copy on this machine lacks {', '.join(gaps)}; {remedy}"
        )
    return folder


def lacking(name: str, folder: Path, weights: bool) -> list[str]:
    """The names of files that a copy lacks and serving needs."""
    present = {path.name for path in folder.iterdir()}
    gaps = [] if present & {CONFIG, PARAMS} else [CONFIG]
    if weights:
        indexed = present & {INDEX, CONSOLIDATED_INDEX} or unindexed(folder, present)
        adapters = {f"{path.parent.name}/{ADAPTER}" for known in ALWAYS for path in folder.glob(known)}
        files = weight_files(name, folder, present | {ADAPTER} | adapters | (set() if indexed else {SINGLE}))
        gaps += [file for file in files if not (folder / file).exists()]
    return gaps


def other_files(names: Collection[str]) -> list[str]:
    """The names of the files other than weights that serving may read."""
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
    """The names of the files that hold the weights, in the order in which engine/weights/files.py looks for them."""
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
    if found := unindexed(folder, names):
        return [*found, *adapters]
    pickled = sorted(file for file in names if Path(file).suffix in PICKLED)
    raise ConfigError(
        f"--model {name}: it holds no safetensors"
        + (f"; {', '.join(pickled)} can hold code and is never read" if pickled else "")
        + f"; look for a copy in safetensors, or `hf download {name} --local-dir FOLDER`, `python -m server convert "
        "FOLDER` and name the folder"
    )


def check_room(name: str, folder: Path, needed: int) -> None:
    """Refuse a download that does not fit on the disk."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(full(name, f"{needed / 1e9:.1f} GB are to be fetched, {free / 1e9:.1f} GB are free"))


def full(name: str, numbers: str) -> str:
    return f"--model {name}: the disk is full ({numbers}); free some room, or name another disk with --download-dir"


@contextmanager
def one_line(name: str, hub: Hub) -> Iterator[None]:
    """Turn huggingface_hub's exceptions into a ConfigError that says what to do."""
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
