"""Scaleout: replicas of this server under Ray Serve, which starts, places, scales and routes them (`ray[serve]`).

Owner: `build`, OpenTokensPolicy and SessionRouter run in Ray's controller and proxies; a Replica runs in its own
process with its accelerators, on the replica's loop. In: arguments of a Serve config file or of Python. Out: an
application whose ingress is our ASGI app. Nothing else imports this module, so a server without the extra does not need
Ray.

    client -> Ray's proxy -> SessionRouter -> Replica: server.hosted -> engine

Loading, health checks and full queues are handled by us: Ray sends a replica more requests than the replica accepts,
and the replica answers 429 with Retry-After, as it does without Ray. A replica that Ray removes finishes its running
answers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from ray import serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.cli import build as config_of
from server.flags.arguments import from_mapping
from server.flags.command_line import UsageError, all_flags
from server.flags.config import Config
from server.hosted import Hosted, refuse_flags_of_the_host
from server.ops import logs
from server.routes.health import decoders_stuck, stalled
from server.start.process import own_interpreter

OPEN_TOKENS = "open_tokens"  # prompt tokens that run or wait in one replica
ROWS = 256  # assumed requests that a replica runs at a time, without --max-num-seqs
HEALTH_S = 5.0  # seconds between two health checks of a replica
LEAVE_S = 15.0  # seconds added to --shutdown-timeout, for the answers of requests that the drain aborts
MOST_REPLICAS = 1000  # replicas to which a session may fall back
# Our code never blocks a loop, so user code needs no separate thread; tokens then stay in the thread of the socket.
ON_THE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
BUSY = 1.25  # a session's replica is skipped if its queue is longer than this multiple of the mean


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of `build`; `flags`: those of `python -m server`, by name."""

    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicas: int | Mapping[str, int] = 1  # a number, or {"min": 1, "max": 4}
    tokens_per_replica: int = 16384  # target of open prompt tokens per replica, for scaling
    scale_up_s: float = 10.0  # seconds for which more replicas must be wanted
    scale_down_s: float = 300.0  # seconds for which fewer replicas must be wanted
    gpus: float = 1.0  # per replica
    cpus: float = 4.0
    name: str = "omniloop"


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application, for `import_path: server.scaleout:build`. Raises UsageError before anything is started."""
    known = {field.name for field in dataclasses.fields(Arguments)}
    if strange := args.keys() - known:
        raise UsageError(f"{', '.join(sorted(strange))}: unknown; the arguments are {', '.join(sorted(known))}")
    arguments = Arguments(**args)
    config = read_flags(arguments.flags)
    deployment = serve.deployment(serve.ingress()(Replica)).options(
        name=arguments.name,
        ray_actor_options={
            "num_gpus": arguments.gpus,
            "num_cpus": arguments.cpus,
            "runtime_env": {"env_vars": ON_THE_LOOP},
        },
        # Twice as many as a replica accepts, so that Ray sends it requests that it then refuses with a retry time.
        max_ongoing_requests=2 * (config.scheduler.max_num_queued_reqs + (config.scheduler.max_num_seqs or ROWS)),
        health_check_period_s=HEALTH_S,
        graceful_shutdown_wait_loop_s=1.0,
        graceful_shutdown_timeout_s=config.server.shutdown_timeout + LEAVE_S,
        **routing(),
        **scaling(arguments),
    )
    return deployment.bind(dict(arguments.flags))


def read_flags(flags: Mapping[str, Any]) -> Config:
    """Raises UsageError for an unknown flag, a wrong value, and a flag of something that Ray does."""
    config = config_of(from_mapping(flags, all_flags(), " in flags"))
    refuse_flags_of_the_host(config)
    return config


def routing() -> dict[str, Any]:
    """The choice of a request's replica: SessionRouter, or HAProxy if Ray puts HAProxy before the replicas."""
    if RAY_SERVE_ENABLE_HA_PROXY:  # Ray refuses an ingress with a router that HAProxy would bypass
        return {}
    router = RequestRouterConfig(
        request_router_class=SessionRouter, request_router_kwargs={"num_fallback_replicas": MOST_REPLICAS}
    )
    return {"request_router_config": router}


def scaling(arguments: Arguments) -> dict[str, Any]:
    """The number of replicas."""
    replicas = arguments.replicas
    if isinstance(replicas, int):
        if replicas < 1:
            raise UsageError(f"replicas: got {replicas}; must be at least 1")
        return {"num_replicas": replicas}
    least, most = replicas.get("min", 1), replicas.get("max", 1)
    if replicas.keys() - {"min", "max"} or not 0 <= least <= most or most < 1:
        raise UsageError(f"replicas: got {dict(replicas)}; must be a number, or min and max with 0 <= min <= max")
    if arguments.tokens_per_replica < 1:
        raise UsageError(f"tokens_per_replica: got {arguments.tokens_per_replica}; must be at least 1")
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            upscale_delay_s=arguments.scale_up_s,
            downscale_delay_s=arguments.scale_down_s,
            metrics_interval_s=1.0,
            look_back_period_s=2.0,
            policy=AutoscalingPolicy(
                policy_function=OpenTokensPolicy, policy_kwargs={"tokens_per_replica": arguments.tokens_per_replica}
            ),
        )
    }


class OpenTokensPolicy:
    """Enough replicas for the open prompt tokens, `tokens_per_replica` each; at least one if any request waits."""

    def __init__(self, tokens_per_replica: int) -> None:
        self.tokens_per_replica = tokens_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """(number of wanted replicas, state); Ray applies min, max and delays."""
        open_tokens = (context.aggregated_metrics or {}).get(OPEN_TOKENS, {})
        wanted = math.ceil(sum(open_tokens.values()) / self.tokens_per_replica)
        waits = context.total_num_requests > 0
        return max(wanted, int(waits)), {}


class Replica:
    """One server process: the hosted app, and the methods that Ray calls. Owner: the replica's loop."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        config = read_flags(flags)
        logs.configure(config.server)
        self.hosted = Hosted(config, own_interpreter)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return without_request_id(self.hosted)

    async def check_health(self) -> None:
        """Raise if Ray should replace this replica: the checks of /health/live, and stuck decoders."""
        state = self.hosted.state
        if state.phase == "dead":
            raise RuntimeError("the engine stopped working")
        if state.phase == "ready" and stalled(state):
            raise RuntimeError("the engine does not answer")
        if state.phase == "ready" and decoders_stuck(state):
            raise RuntimeError("media that do not end being decoded hold the threads")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The metrics of this replica for OpenTokensPolicy."""
        return {OPEN_TOKENS: float(self.hosted.state.places.tokens)}


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Remove X-Request-Id from answers: Ray's proxy sets it, and passes its value on to the replica."""

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, sent)

    return inner


class SessionRouter(ConsistentHashRouter):
    """Routes a session (header X-Session-Id) to its replica, where its prefix is cached, unless that replica is busy.

    Requests without a session go to the shortest queue. A replica is busy if its queue is longer than 1.25 times the
    mean plus one request; then the session's next replica on the ring is used.
    """

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> list[list[Any]]:
        """Replicas in the order in which they are tried, one at a time."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or not ranks:
            return ranks
        return ordered(ranks, self._queue, bool(pending_request.metadata.session_id))

    def _queue(self, rank: list[Any]) -> int:
        """The length of a replica's queue in this router's cache; 0 if unknown."""
        return self.replica_queue_len_cache.get(rank[0].replica_id) or 0


def ordered(ranks: list[list[Any]], queue: Callable[[list[Any]], int], has_session: bool) -> list[list[Any]]:
    """`ranks` with busy replicas last; without a session, by length of the queue."""
    lengths = [queue(rank) for rank in ranks]
    bound = BUSY * sum(lengths) / len(lengths) + 1
    keys = [length > bound if has_session else length for length in lengths]
    return [rank for _, rank in sorted(zip(keys, ranks), key=lambda pair: pair[0])]
