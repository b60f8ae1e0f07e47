"""AppState: the state that all handlers share. One per process.

Owner: loop. Made before the socket listens, complete when the engine is ready. `phase` alone decides readiness:

    starting -> ready -> leaving (probes say 503, work is still taken) -> draining -> gone
                   \\-> dead (the device thread ended; the process exits with 70)
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.engine import Engine
from server.batches.batches import batches_of
from server.errors import ApiError
from server.flags.config import Config
from server.ops.limits import USUAL_PART, ApiKeys, BodyBudget, Sessions, WrongKeys
from server.ops.metrics import Metrics
from server.ops.places import Places
from server.ops.pool import Pool
from server.ops.proxies import TrustedProxies
from server.output.parser import Parsers
from server.output.response_store import ResponseStore
from server.render.vocabulary import Vocabulary

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from engine.base.trace import Trace
    from engine.grammar.compile import GrammarCompiler
    from engine.lora.home import Home
    from mm.load import MediaLoader
    from server.render.chat import Renderer
    from server.render.frames import Frames
    from server.render.tokenizer import Tokenizer
    from server.render.whisper_tokens import WhisperTokens

Phase = Literal["starting", "ready", "leaving", "draining", "dead"]


@dataclass(slots=True)
class Download:
    """A running download of a model; only `stop` ends it early. `tokenizer`: the tokenizer's place, which
    start/folders.py replaces by a folder.
    """

    tokenizer: str
    drafter: str = ""  # the drafter's folder, if it was downloaded
    running: Future[tuple[str, str, str]] | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class Spans(Protocol):
    """The spans of OpenTelemetry."""

    def add(self, times: Any) -> None:
        """Report a request's RequestTimes."""

    def close(self) -> None:
        """Send what is left."""


class Watch(Protocol):
    """The ExpertWatch, as probes and the status line use it."""

    def ask(self) -> None:
        """Fetch the experts' load of the next step."""

    def close(self) -> None:
        """Fetch nothing more."""


class Checks(Protocol):
    """The Canary, as probes read it."""

    late: bool
    wrong: int
    answered: int

    def close(self) -> None:
        """Start no further check."""


class OpenAnswer(Protocol):
    """An Answer that the engine works for, as operators and a draining server see it."""

    @property
    def done(self) -> bool:
        """Whether it needs nothing more from the engine."""

    def fail(self, error: ApiError) -> None:
        """End every choice with an error."""

    def abort(self) -> None:
        """End every choice with finish_reason abort."""


class OpenExchange(Protocol):
    """An Exchange that has not ended, as operators and a draining server see it."""

    answer_open: OpenAnswer | None

    @property
    def adapter_use(self) -> tuple[str, bool] | None:
        """The adapter's name, and whether a step has run; None: the base serves the exchange."""

    def drain(self) -> None:
        """End the exchange if it only waits for its client's next request."""

    def cancel(self) -> None:
        """End the exchange because the server shuts down."""


class AppState:
    """Everything that outlives a request. Owner: loop."""

    engine: Engine
    tokenizer: Tokenizer
    renderer: Renderer
    frames: Frames  # the tokens that the tokenizer adds around pooling inputs
    parsers: Parsers  # parsers of answers
    media: MediaLoader | None  # None if the model takes text only
    vocabulary: Vocabulary
    defaults: dict[str, Any]  # sampling defaults of model and operator

    def __init__(self, config: Config) -> None:
        self.config = config
        self.phase: Phase = "starting"
        self.port = config.server.port
        self.created = int(time.time())
        self.names = config.model_names
        self.folder = config.folder  # the model's place; start/folders.py replaces ORG/NAME by a folder
        self.download = Download(config.model.tokenizer or config.folder)
        self.keys = ApiKeys(config.server.api_key, config.server.api_key_file)
        self.admin_keys = ApiKeys((config.server.admin_api_key,) if config.server.admin_api_key else ())
        self.wrong_keys = WrongKeys(config.server.auth_max_failures)
        self.proxies = TrustedProxies(config.server.trusted_proxies)
        limits, trusted = config.limits, config.limits.trust_clients
        part = math.inf if trusted else USUAL_PART
        self.body_budget = BodyBudget(limits.body_budget_bytes, part)
        self.sessions = Sessions(limits.max_realtime_sessions, limits.max_inflight_per_key, part)
        self.places = Places(
            0, limits.max_inflight_per_key, limits.max_queued_tokens, config.max_queue_wait, not trusted
        )
        self.metrics = Metrics(config.health.metrics_max_series)
        self.experts: Watch | None = None  # for models with experts
        self.pool = Pool(config.pool_threads, "pool")
        self.trace: Trace | None = None  # the timeline being recorded
        self.spans: Spans | None = None  # OpenTelemetry spans, with --otlp-traces-endpoint
        self.open_exchanges: set[OpenExchange] = set()
        self.live: dict[tuple[str, str], set[OpenAnswer]] = {}  # (key name, request id) -> answers, for /abort_requests
        self.responses = ResponseStore(
            limits.response_store_max, limits.response_store_ttl, limits.response_store_bytes
        )
        share = math.inf if trusted or not self.keys else USUAL_PART
        self.batches = batches_of(config.batches, share, self.pool)
        self.metrics.others += [self.batches.families, self.rank_families]
        self.media = None
        self.canary: Checks | None = None  # set once the engine is ready
        self.whisper: WhisperTokens | None = None  # None if not a Whisper model; it may still take audio in chat
        self.grammars: GrammarCompiler | None = None  # None if this server gives no structured output
        self.adapters: Home | None = None  # with --enable-lora
        self.running = asyncio.Event()  # cleared while an operator has paused the server
        self.running.set()
        self.idle = asyncio.Event()  # set when the last open exchange ends
        self.startup: dict[str, float] = {}  # phase -> seconds

    @property
    def follows_requests(self) -> bool:
        """Whether a timeline or spans report each request."""
        return self.trace is not None or self.spans is not None

    def rank_families(self) -> Iterator[Metric]:
        """Series of the engine's ranks, once it has started."""
        limits: Any = getattr(getattr(self, "engine", None), "limits", None)  # None: the engine is still loading
        return self.metrics.of_ranks(() if limits is None else limits.of_ranks)

    def resume(self) -> None:
        """End a pause, if there is one."""
        if getattr(self, "engine", None) is not None:  # the engine may still be loading
            self.engine.resume()
        self.running.set()

    def ledger(self) -> dict[str, int]:
        """The resources in use now; all zero when idle, except caches and totals (RELIABILITY.md)."""
        media = {} if self.media is None else self.media.ledger()
        return {
            "exchanges": len(self.open_exchanges),
            "places": self.places.taken,
            "body_bytes": self.body_budget.used,
            "sessions": self.sessions.shares.used,
            "background": self.responses.running,
            "uploads": self.batches.files.uploads.used,
            "lines": self.batches.places.taken,
            "adapter_loads": 0 if self.adapters is None else self.adapters.num_loading,
            "compiles": 0 if self.grammars is None else self.grammars.compiling,
            "prompt_tokens": self.places.tokens,
            **media,
        } | {f"engine_{name}": count for name, count in self.engine.ledger().items()}
