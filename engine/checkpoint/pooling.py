"""Makes a PoolingConfig from modules.json and its folders, --pooler-config and the heads of classifiers.

In: a folder, its config.json, the operator's settings. Out: a PoolingConfig, or None for a model that generates.
An unknown module raises ConfigError at start. Thread: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.base.errors import ConfigError
from engine.base.model_config import HeadLayer, PoolingConfig, PoolingKind
from engine.checkpoint.files import read_json
from engine.checkpoint.pooling_lexical import lexical
from engine.checkpoint.pooling_messages import LENGTHS, opens_answer, pairs_template, reads_messages
from engine.checkpoint.pooling_modules import KINDS, MODULES, activation_named, dense, kind_of, modules_of
from engine.checkpoint.pooling_tasks import has_tasks, tasks_of
from engine.checkpoint.pooling_tokens import late_interaction, step_tag, token_heads
from engine.checkpoint.section import Section

# The kind of result that an architecture's class makes, derived from its name.
Form = Literal["generate", "embed", "score", "reward", "tokens", "process", "lexical"]
PROMPTS = "config_sentence_transformers.json"
# Names of models whose vectors may be cut although their files do not say so.
ANY_DIMENSIONS = ("qwen3-embedding", "jina-embeddings-v3", "nomic-embed-text-v2")
GIVEN = (  # keys of --pooler-config
    "pooling_type", "use_activation", "normalize", "dimensions", "step_tag_id", "returned_token_ids",
)  # fmt: skip
OF_TOKENS = ("ALL", "STEP")  # further values of pooling_type, for results per token only
STEP_TAG = "<extra_0>"  # ends a step in Qwen2.5-Math-PRM's inputs


@dataclass(frozen=True, slots=True)
class Body:
    """Properties of the model below the pooling layers."""

    hidden_size: int
    form: Form
    is_encoder: bool  # the family was never trained to generate
    sees_all: bool  # each token attends to all tokens of its input
    head: tuple[HeadLayer, ...] = ()  # the family's classification head; the last layer's width is the number of labels
    own: PoolingConfig | None = None  # the complete config of a family with its own way to make vectors


def read_pooling(
    folder: Path, root: Section, body: Body, runner: str, given: Mapping[str, Any]
) -> PoolingConfig | None:
    """The checkpoint's pooling; None: the checkpoint generates, or --runner says generate. Raises ConfigError."""
    if body.own is not None:
        if runner == "generate":
            raise ConfigError("--runner generate: this model makes vectors and no text; leave the flag out")
        return body.own
    modules = modules_of(folder)
    pools = bool(modules) or body.form != "generate" or body.is_encoder
    if runner == "generate" and body.form != "generate":
        raise ConfigError("--runner generate: this checkpoint has no language model's head; leave the flag out")
    tokens = root.values.get("classifier_from_token")
    if runner == "generate" or (runner == "auto" and not pools and tokens is None):
        if given:
            raise ConfigError("--pooler-config: this model generates; --runner pooling serves it for embeddings")
        return None
    _check_given(given)
    prompts = read_json(folder / PROMPTS, required=False)
    steps = str(given.get("pooling_type")).upper() == "STEP"
    if body.form == "lexical":
        if given:
            raise ConfigError("--pooler-config: this model pools as its files say (SpladePooling); leave the flag out")
        found = lexical(folder, modules, body.head, prompts, **_of_every_kind(folder, prompts))
    elif body.form in ("tokens", "process") or steps:
        found = _classes_of_tokens(folder, root, body, given, prompts)
    elif body.form in ("score", "reward") or tokens is not None:
        found = _classifier(folder, root, body, tokens, prompts)
    elif any(name == "LogitScore" for name, _ in modules):
        found = _scorer(folder, modules, body, prompts)
    else:
        found = _embedder(folder, root, modules, body, given, prompts)
    if given.get("dimensions") is not None:
        found = replace(found, usual_dimensions=_usual_dimensions(found, given, body))
    elif found.task == "embed" and prompts.get("truncate_dim") is not None:
        dimensions = Section(prompts, PROMPTS).integer("truncate_dim", least=1, most=_width(found, body))
        found = replace(found, usual_dimensions=dimensions)
    if found.task == "classify":
        return _as_given(found, given)
    if not found.tokens_only and not found.layers_first:
        found = replace(found, token_heads=token_heads(folder, body.hidden_size, found.activation))
    return found


def _embedder(
    folder: Path,
    root: Section,
    modules: list[tuple[str, str]],
    body: Body,
    given: Mapping[str, Any],
    prompts: dict[str, Any],
) -> PoolingConfig:
    kind, pools_prompt = _usual(root, body), True
    layers: list[HeadLayer] = []
    normalize = not modules
    one_by_one = bool(modules) and all(name != "Pooling" for name, _ in modules)
    width = body.hidden_size
    for place, (name, path) in enumerate(modules):
        if normalize and modules:
            raise ConfigError(f"{MODULES}: {name} follows Normalize, which must be the last module")
        if (name == "Transformer") != (place == 0) or (name == "Pooling") != (place == 1 and not one_by_one):
            raise ConfigError(f"{MODULES}: {name} is module {place}; supported is Transformer, Pooling, then others")
        if name == "Pooling":
            kind, pools_prompt = kind_of(Section(read_json(folder / path / "config.json"), f"{path}/config.json"))
        elif name == "Dense":
            layers.append(dense(Section(read_json(folder / path / "config.json"), f"{path}/config.json"), path, width))
            width = layers[-1].out_features
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise ConfigError(
                f"{MODULES}: the module {name} is not supported; supported are Transformer, Pooling, Dense, Normalize"
            )
    late = late_interaction(folder, prompts) if one_by_one else {}
    normalize |= bool(late)
    if "pooling_type" in given:
        said = str(given["pooling_type"])
        one_by_one |= said.upper() in OF_TOKENS
        kind = KINDS.get(said.lower(), _usual(root, body))
    normalize = bool(given.get("use_activation", given.get("normalize", normalize)))
    found = PoolingConfig(
        task="embed",
        kind=kind,
        activation="normalize" if normalize else "identity",
        layers=tuple(layers),
        bidirectional=body.sees_all,
        dimensions=_dimensions(folder, root, prompts),
        tokens_only=one_by_one,
        pools_prompt=pools_prompt or kind == "last",
        messages=reads_messages(folder),
        template_opens_answer=opens_answer(folder),
        **(_of_every_kind(folder, prompts) | late | tasks_of(folder, root, _prompts(prompts))),
    )
    if prompts.get("model_type") != "CrossEncoder":
        return found
    labels = tuple(f"LABEL_{k}" for k in range(width))  # the last module makes the logits of a pair
    activation, template = _activation(root, prompts, labels), pairs_template(folder)
    return replace(
        found, task="classify", activation=activation, labels=labels, template=template, messages=False, dimensions=None
    )


def _of_every_kind(folder: Path, prompts: dict[str, Any]) -> dict[str, Any]:
    """The settings that every kind of checkpoint may have."""
    values = read_json(folder / LENGTHS, required=False)
    section = Section(values, LENGTHS)
    return {
        "max_tokens": 0 if values.get("max_seq_length") is None else section.size("max_seq_length"),
        "lower_case": section.boolean("do_lower_case", False),
        "prompts": _prompts(prompts),
        "default_prompt": _default_prompt(prompts),
    }


def _classifier(folder: Path, root: Section, body: Body, tokens: Any, prompts: dict[str, Any]) -> PoolingConfig:
    """The config of a ForSequenceClassification or ForRewardModel class, or of a language model that scores by two
    tokens."""
    labels = labels_of(root)
    if tokens is not None:
        found = _token_ids(folder, tokens)
        layers: tuple[HeadLayer, ...] = (HeadLayer("lm_head", body.hidden_size, 1, token_ids=found),)
        labels = ("LABEL_0",)
    elif body.head:
        layers = body.head
        labels = labels[: layers[-1].out_features]
    elif body.form == "reward":
        hidden = body.hidden_size
        first = HeadLayer("score.0", hidden, hidden, bias=True, activation="relu")
        count = root.size("num_labels", 1)
        layers = first, HeadLayer("score.2", hidden, count, bias=True)
        labels = labels if len(labels) == count else tuple(f"LABEL_{k}" for k in range(count))
    else:
        layers = (HeadLayer("score", body.hidden_size, len(labels)),)
    template = pairs_template(folder)
    if original := root.boolean("is_original_qwen3_reranker", False):
        template = "qwen3" if root.values.get("vision_config") is None else "qwen3_vl"
    if body.form == "reward":
        activation: Any = "identity"
    else:
        activation = _activation(root, prompts, labels)
    return PoolingConfig(
        task="classify",
        kind=_usual(root, body),
        activation=activation,
        layers=layers,
        labels=labels,
        bidirectional=body.sees_all,
        dimensions=None,
        template=template,
        template_opens_answer=original or opens_answer(folder),
        **_of_every_kind(folder, prompts),
    )


def _as_given(found: PoolingConfig, given: Mapping[str, Any]) -> PoolingConfig:
    """A classifier's config with the operator's settings."""
    said = str(given.get("pooling_type", ""))
    return replace(
        found,
        kind=KINDS.get(said.lower(), found.kind),
        activation=found.activation if given.get("use_activation", True) else "identity",
        tokens_only=found.tokens_only or said.upper() == "ALL",
    )


def _classes_of_tokens(
    folder: Path, root: Section, body: Body, given: Mapping[str, Any], prompts: dict[str, Any]
) -> PoolingConfig:
    """The config of a ForTokenClassification or ForProcessRewardModel class, or of a language model's tokens."""
    ids, tag = given.get("returned_token_ids"), given.get("step_tag_id")
    labels, hidden = labels_of(root), body.hidden_size
    if body.form == "process":
        first = HeadLayer("score.0", hidden, hidden, bias=True, activation="relu")
        layers: tuple[HeadLayer, ...] = (first, HeadLayer("score.2", hidden, len(labels), bias=True))
        tag = step_tag(folder, STEP_TAG) if tag is None else tag
    elif body.form == "tokens":
        layers = body.head or (HeadLayer("score", hidden, len(labels), bias=True),)
    elif body.form == "generate" and ids:
        layers, labels = (HeadLayer("lm_head", hidden, len(ids), token_ids=tuple(ids)),), tuple(map(str, ids))
    else:
        raise ConfigError("--pooler-config: STEP needs a process reward model, or returned_token_ids of its head")
    return PoolingConfig(
        task="classify",
        kind=_usual(root, body),
        activation="softmax" if len(labels) > 1 else "sigmoid",
        layers=layers,
        labels=labels,
        bidirectional=body.sees_all,
        dimensions=None,
        tokens_only=True,
        step_tag=tag,
        **_of_every_kind(folder, prompts),
    )


def _scorer(folder: Path, modules: list[tuple[str, str]], body: Body, prompts: dict[str, Any]) -> PoolingConfig:
    """The config of a sentence-transformers reranker (Transformer, LogitScore) that uses a language model's head."""
    if [name for name, _ in modules] != ["Transformer", "LogitScore"] or body.is_encoder:
        names = ", ".join(name for name, _ in modules)
        raise ConfigError(f"{MODULES}: {names}; LogitScore is supported behind Transformer of a decoder, and last")
    path = modules[1][1]
    section = Section(read_json(folder / path / "config.json"), f"{path}/config.json")
    true = section.integer("true_token_id")
    false = () if section.values.get("false_token_id") is None else (section.integer("false_token_id"),)
    return PoolingConfig(
        task="classify",
        kind="last",
        activation=_activation(Section({}, PROMPTS), prompts, ("LABEL_0",)),
        layers=(HeadLayer("lm_head", body.hidden_size, 1, token_ids=(true, *false)),),
        labels=("LABEL_0",),
        bidirectional=body.sees_all,
        dimensions=None,
        template=pairs_template(folder),
        template_opens_answer=opens_answer(folder),
        **_of_every_kind(folder, prompts),
    )


def _usual(root: Section, body: Body) -> PoolingKind:
    """The kind of pooling if no module names one: config.json's, else "cls" for encoders and "last" for decoders."""
    said = root.values.get("classifier_pooling") if body.form == "score" else None
    said = said or (root.values.get("pooling") if body.sees_all else None)
    said = said or (root.values.get("emb_pooler") if body.form == "embed" else None)  # JinaBERT's
    if isinstance(said, str) and said in KINDS:
        return KINDS[said]
    if said is None and body.form == "embed" and has_tasks(root):
        return "mean"
    if said is not None:
        raise ConfigError(f"config.json: pooling by {said!r} is not supported; supported are {', '.join(KINDS)}")
    return "cls" if body.is_encoder else "last"


def _activation(root: Section, prompts: dict[str, Any], labels: tuple[str, ...]) -> Any:
    """The activation of a classifier's logits: the checkpoint's, else derived from the number of labels."""
    inside = root.values.get("sentence_transformers")
    for values, path in ((inside, "config.json: sentence_transformers"), (prompts, PROMPTS)):
        if isinstance(values, dict) and values.get("activation_fn"):
            found = activation_named(Section(values, path), "activation_fn", "Identity")
            if found in ("identity", "sigmoid"):
                return found
            raise ConfigError(f"{path}: activation_fn {found} is not supported; supported are Identity and Sigmoid")
    if root.values.get("sbert_ce_default_activation_function"):
        return activation_named(root, "sbert_ce_default_activation_function", "Sigmoid")
    multi = root.values.get("problem_type") == "multi_label_classification"
    return "sigmoid" if len(labels) == 1 or multi else "softmax"


def labels_of(root: Section) -> tuple[str, ...]:
    """Names of the classes by number; a file without names has two classes."""
    named = root.values.get("id2label")
    if isinstance(named, dict) and named:
        try:
            found = {int(key): str(value) for key, value in named.items()}
        except ValueError:
            raise ConfigError("config.json: id2label must have numbers as keys") from None
        if sorted(found) != list(range(len(found))):
            raise ConfigError("config.json: id2label must number its labels from 0")
        if root.values.get("num_labels") not in (None, len(found)):
            raise ConfigError(f"config.json: num_labels={root.values['num_labels']}, and id2label has {len(found)}")
        return tuple(found[key] for key in sorted(found))
    return tuple(f"LABEL_{k}" for k in range(root.size("num_labels", 2)))


def _token_ids(folder: Path, tokens: Any) -> tuple[int, ...]:
    """Token ids (yes, no) of `classifier_from_token`, which is [no, yes] or [yes], as in vLLM's hf_overrides."""
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= 2 or not all(isinstance(one, str) for one in tokens):
        raise ConfigError(f"config.json: classifier_from_token={tokens!r} must be a list of one token or of two")
    vocabulary = read_json(folder / "tokenizer.json").get("model", {}).get("vocab", {})
    if missing := [token for token in tokens if not isinstance(vocabulary, dict) or token not in vocabulary]:
        raise ConfigError(
            f"config.json: classifier_from_token names {missing[0]!r}, which tokenizer.json does not have"
        )
    return tuple(vocabulary[token] for token in reversed(tokens))


def _dimensions(folder: Path, root: Section, prompts: dict[str, Any]) -> tuple[int, ...] | None:
    listed = root.items("matryoshka_dimensions", ()) or prompts.get("matryoshka_dimensions") or ()
    if listed:
        return tuple(int(size) for size in listed)
    free = root.boolean("is_matryoshka", False) or any(name in _name_of(folder) for name in ANY_DIMENSIONS)
    return () if free else None


def _name_of(folder: Path) -> str:
    """The checkpoint's name. In the hub's cache a folder is named by a commit, so the repository's folder names it."""
    folder = folder.absolute()
    return (folder.parents[1] if folder.parent.name == "snapshots" else folder).name.lower()


def _usual_dimensions(found: PoolingConfig, given: Mapping[str, Any], body: Body) -> int:
    """The length of vectors for requests that name none."""
    if found.dimensions is None:
        raise ConfigError("--pooler-config: dimensions: this model's vectors cannot be cut; leave the key out")
    width = _width(found, body)
    asked = Section(dict(given), "--pooler-config").integer("dimensions", least=1, most=width)
    if found.dimensions and asked not in (*found.dimensions, width):
        listed = ", ".join(map(str, found.dimensions))
        raise ConfigError(f"--pooler-config: dimensions={asked}; this model has {listed}")
    return asked


def _width(found: PoolingConfig, body: Body) -> int:
    """The width of an uncut vector."""
    return found.layers[-1].out_features if found.layers else body.hidden_size


def _prompts(values: dict[str, Any]) -> dict[str, str]:
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{PROMPTS}: prompts must be an object of texts")
    return dict(prompts)


def _default_prompt(values: dict[str, Any]) -> str | None:
    name = values.get("default_prompt_name")
    if name is not None and name not in _prompts(values):
        raise ConfigError(f"{PROMPTS}: default_prompt_name={name!r} is none of its prompts")
    return name


def _check_given(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key not in GIVEN:
            raise ConfigError(f"--pooler-config: {key} is not supported; supported are {', '.join(GIVEN)}")
        if key == "pooling_type" and str(value).lower() not in KINDS and str(value).upper() not in OF_TOKENS:
            raise ConfigError(f"--pooler-config: pooling_type={value!r}; supported are LAST, CLS, MEAN, ALL, STEP")
        if key == "step_tag_id" and (type(value) is not int or value < 0):
            raise ConfigError(f"--pooler-config: step_tag_id={value!r} must be a token id")
        if key == "returned_token_ids" and not (
            isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value)
        ):
            raise ConfigError(f"--pooler-config: returned_token_ids={value!r} must be a list of token ids")
        if key in ("use_activation", "normalize") and not isinstance(value, bool):
            raise ConfigError(f"--pooler-config: {key}={value!r} must be true or false")
