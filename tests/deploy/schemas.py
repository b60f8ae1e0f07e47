"""Schemas of the Kubernetes objects and of the compose file in examples/deploy; only the fields that they use.

The schemas are strict, so misspelt fields fail. Sources: the API reference of Kubernetes 1.34, the Gateway API v1, its
inference extension v1, the Prometheus operator and the Compose specification. Before an example uses a new field, the
field is added here.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
PORT: Schema = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, NAME]}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
LABELS: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"},
}


def fields(required: str = "", **properties: Schema) -> Schema:
    """An object with exactly these fields allowed."""
    return {
        "type": "object", "properties": properties, "required": required.split(), "additionalProperties": False
    }  # fmt: skip


def items(of: Schema) -> Schema:
    return {"type": "array", "items": of, "minItems": 1}


def one_of(*words: str) -> Schema:
    return {"enum": list(words)}


SELECTOR = fields("matchLabels", matchLabels=LABELS)
PROBE = fields(
    "httpGet",
    httpGet=fields("path port", path=TEXT, port=PORT),
    periodSeconds=NUMBER,
    timeoutSeconds=NUMBER,
    failureThreshold=NUMBER,
    initialDelaySeconds=NUMBER,
)
CONTAINER = fields(
    "name image",
    name=NAME,
    image=TEXT,
    args=items(TEXT),
    env=items(
        fields(
            "name",
            name=TEXT,
            value=TEXT,
            valueFrom=fields("secretKeyRef", secretKeyRef=fields("name key", name=NAME, key=TEXT, optional=FLAG)),
        )
    ),
    ports=items(fields("containerPort", name=NAME, containerPort=NUMBER, protocol=one_of("TCP", "UDP"))),
    resources=fields(
        requests={"type": "object", "additionalProperties": QUANTITY},
        limits={"type": "object", "additionalProperties": QUANTITY},
    ),
    securityContext=fields(
        allowPrivilegeEscalation=FLAG, readOnlyRootFilesystem=FLAG, capabilities=fields(drop=items(TEXT))
    ),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    volumeMounts=items(fields("name mountPath", name=NAME, mountPath=TEXT, readOnly=FLAG)),
)
VOLUME = fields(
    "name",
    name=NAME,
    persistentVolumeClaim=fields("claimName", claimName=NAME),
    secret=fields("secretName", secretName=NAME, items=items(fields("key path", key=TEXT, path=TEXT))),
    emptyDir=fields(),
)
POD = fields(
    "containers",
    containers=items(CONTAINER),
    volumes=items(VOLUME),
    terminationGracePeriodSeconds=NUMBER,
    automountServiceAccountToken=FLAG,
    securityContext=fields(
        runAsNonRoot=FLAG,
        runAsUser=NUMBER,
        fsGroup=NUMBER,
        seccompProfile=fields("type", type=one_of("RuntimeDefault", "Localhost", "Unconfined")),
    ),
)
SPECS: dict[tuple[str, str], Schema] = {
    ("apps/v1", "Deployment"): fields(
        "selector template",
        replicas=NUMBER,
        selector=SELECTOR,
        strategy=fields(
            type=one_of("RollingUpdate", "Recreate"), rollingUpdate=fields(maxSurge=NUMBER, maxUnavailable=NUMBER)
        ),
        template=fields("metadata spec", metadata=fields("labels", labels=LABELS), spec=POD),
    ),
    ("v1", "PersistentVolumeClaim"): fields(
        "accessModes resources",
        accessModes=items(one_of("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod")),
        resources=fields("requests", requests=fields("storage", storage=QUANTITY)),
    ),
    ("v1", "Service"): fields(
        "ports",
        selector=LABELS,
        ports=items(fields("port", name=NAME, port=NUMBER, targetPort=PORT, protocol=one_of("TCP", "UDP"))),
    ),
    ("policy/v1", "PodDisruptionBudget"): fields("selector", selector=SELECTOR, maxUnavailable=NUMBER),
    ("monitoring.coreos.com/v1", "PodMonitor"): fields(
        "selector podMetricsEndpoints",
        selector=SELECTOR,
        podMetricsEndpoints=items(fields(port=NAME, path=TEXT, interval=TEXT)),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): fields(
        "selector targetPorts endpointPickerRef",
        selector=SELECTOR,
        targetPorts=items(fields("number", number=NUMBER)),
        endpointPickerRef=fields(
            "name port", name=NAME, port=fields("number", number=NUMBER), failureMode=one_of("FailOpen", "FailClose")
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): fields(
        "parentRefs rules",
        parentRefs=items(fields("name", name=NAME)),
        rules=items(
            fields(
                "backendRefs",
                matches=items(fields(path=fields("value", type=one_of("PathPrefix", "Exact"), value=TEXT))),
                backendRefs=items(fields("name", group=TEXT, kind=TEXT, name=NAME)),
                timeouts=fields(request=TEXT),
            )
        ),
    ),
}


DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(us|ms|s|m|h))+$"}
TEXTS = items(TEXT)
DEVICES = items(fields("capabilities", driver=TEXT, count={"type": ["integer", "string"]}, capabilities=TEXTS))
COMPOSE = fields(
    "services",
    services={
        "type": "object",
        "additionalProperties": fields(
            "image",
            build=fields("context", context=TEXT, dockerfile=TEXT),
            image=TEXT,
            command=TEXTS,
            environment={"type": "object", "additionalProperties": TEXT},
            ports=items({"type": "string", "pattern": r"^([0-9.]+:)?[0-9]+:[0-9]+$"}),
            volumes=items({"type": "string", "pattern": r"^[a-z][\w.-]*:/\S+$"}),
            secrets=TEXTS,
            read_only=FLAG,
            tmpfs=TEXTS,
            cap_drop=TEXTS,
            security_opt=TEXTS,
            restart=one_of("no", "always", "on-failure", "unless-stopped"),
            stop_grace_period=DURATION,
            deploy=fields(resources=fields(reservations=fields(devices=DEVICES))),
        ),
    },
    secrets={"type": "object", "additionalProperties": fields("file", file=TEXT)},
    volumes={"type": "object", "additionalProperties": {"type": "null"}},
)


def schema_of(kind: dict[str, Any]) -> Schema:
    """The schema of an object, by its apiVersion and kind."""
    found = SPECS[kind["apiVersion"], kind["kind"]]
    metadata = fields("name", name=NAME, labels=LABELS)
    return fields("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=metadata, spec=found)
