"""Replicas of the embedded model under Ray, for test_ray: `python -m tests.end_to_end.ray_replicas PORT`.

Reads one order per line and prints `done` after each. A JSON order deploys the application with its arguments, `kill`
kills one replica without warning, `count` prints the number of replicas. The program and Ray end with the input.
"""

from __future__ import annotations

import json
import os
import sys

import ray
from ray import serve

from server.scaleout import build
from tests.end_to_end.process import ROOT

SMALL = {"num-threads": 1, "num-gpu-blocks-override": 1024, "max-num-seqs": 32, "disable-access-log": True}


def replicas() -> list[str]:
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if "SERVE_REPLICA" in name]


def main(port: int) -> None:
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    for line in sys.stdin:
        if line.strip() == "kill":
            ray.kill(ray.get_actor(min(replicas()), namespace="serve"))
        elif line.strip() == "count":
            print(len(replicas()), flush=True)
        else:
            serve.run(build({"gpus": 0, "cpus": 0.5, "flags": SMALL, **json.loads(line)}), name="omniloop")
        print("done", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    main(int(sys.argv[1]))
