"""Tests how a class of transformers passes a picture, a video or an audio to its decoder, before weights are read.

Thread: the thread that reads the configuration. The class's forward runs on a CPU, without its layers: a stand-in for
the decoder captures the decoder's arguments, and a stand-in for the tower returns random rows. Our steps can serve the
class if its decoder gets only the embeddings, with these rows in place of the item's tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from engine.base.errors import ConfigError
from engine.base.request import Modality
from engine.models.transformers_backend import skeleton

log = logging.getLogger("omniloop.engine")

# Arguments of a class that our steps pass, or that only choose the form of the output.
KNOWN = frozenset(
    ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "past_key_values", "cache", "use_cache",
     "cache_position", "pixel_values", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "image_sizes",
     "image_sizes_videos", "mm_encoder_outputs", "mm_token_type_ids", "rope_deltas", "labels", "logits_to_keep",
     "kwargs", "return_dict", "output_attentions", "output_hidden_states", "vision_feature_layer",
     "vision_feature_select_strategy")
)  # fmt: skip
OF_DECODERS = KNOWN - {"pixel_values", "pixel_values_videos", "image_sizes", "mm_token_type_ids"}
NUM_ROWS = 4
ITEMS: dict[Modality, str] = {"image": "picture", "video": "film", "audio": "sound"}


class GivenToDecoder(Exception):
    """Ends the class's forward at the call of its decoder."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class StandIn(nn.Module):
    """Replaces the decoder: embeds a token as its number, and computes nothing."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.config = decoder.config
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.embed_tokens = Numbers(self.config.hidden_size)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, *_: Any, **given: Any) -> Any:
        raise GivenToDecoder(given)


class Numbers(nn.Module):
    """An embedding whose values are the token's number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.zeros(1, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        return token_ids[..., None].float().expand(*token_ids.shape, self.weight.shape[1]).clone()


class Rows:
    """A tower's output; records the names of other attributes that the class reads."""

    def __init__(self, rows: Any) -> None:
        self.pooler_output = rows
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        raise AttributeError(name)


def encoders(base: Any) -> dict[Modality, Callable[..., Any]]:
    """Modality -> the method that turns items into rows. Audio is supported with one position axis only."""
    if base is None:
        return {}
    found: dict[Modality, Callable[..., Any]] = {}
    if hasattr(base, "get_image_features") and "mm_encoder_outputs" in arguments(base.forward):
        found["image"] = base.get_image_features
        if hasattr(base, "get_video_features") and getattr(base.config, "video_token_id", None) is not None:
            found["video"] = base.get_video_features
    takes_audio = getattr(base.config, "audio_token_id", None) is not None
    if takes_audio and hasattr(base, "get_audio_features") and skeleton.axes_of(base) == 1:
        found["audio"] = base.get_audio_features
    return found


def unused_children(base: Any, modalities: Collection[Modality]) -> set[str]:
    """The submodules that only methods for other modalities use, such as a tower for video."""
    used: dict[bool, set[str]] = {True: set(), False: set()}
    for kind, encode in encoders(base).items():
        used[kind in modalities] |= children_named(base, encode.__name__)
    return used[False] - used[True]


def children_named(base: Any, method: str) -> set[str]:
    """The submodules that a method uses, directly or through other methods of the class."""
    children, seen, methods = dict(base.named_children()), set[str](), [method]
    codes: list[CodeType] = []
    while methods or codes:
        if methods:
            function = inspect.unwrap(getattr(type(base), methods.pop()))
            codes += [function.__code__] if inspect.isfunction(function) else []
            continue
        code = codes.pop()
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
        new = {name for name in code.co_names if name not in seen}
        seen |= new
        methods += [name for name in new if name not in children and name in vars(type(base))]
    return seen & children.keys()


def refuse_arguments(module: Any) -> None:
    """Raises ConfigError if the class or its decoder takes unsupported arguments for an item; the text follows the
    class's name."""
    base: Any = getattr(module, module.base_model_prefix, None)
    encode, decoder = encoders(base), skeleton.decoder_in(module)
    more = arguments(decoder.forward) - OF_DECODERS
    if more:
        raise ConfigError(
            f"gives its decoder {_listed(more)}: pictures that reach later layers, or to which layers attend, are "
            "not served through transformers"
        )
    if not encode or decoder is base:
        import transformers

        raise ConfigError(
            f"has no tower in transformers {transformers.__version__} that turns a picture or a sound into rows of the "
            "prompt (get_image_features, get_audio_features with mm_encoder_outputs); a newer transformers may have one"
        )
    more = arguments(base.forward) - KNOWN - frozenset().union(*map(arguments, encode.values()))
    if more:
        raise ConfigError(f"reads {_listed(more)} of a prompt, which is not served through transformers")


def served_kinds(module: Any) -> tuple[Modality, ...]:
    """The modalities that our steps can serve, tested by the decoder's arguments for a prompt with an item.

    Raises ConfigError as `refuse_arguments`. A class whose video our steps cannot serve is served without video. The
    module cannot be used afterwards.
    """
    base, decoder = getattr(module, module.base_model_prefix), skeleton.decoder_in(module)
    stand_in = StandIn(decoder)
    for name, child in base.named_children():
        if child is decoder:
            setattr(base, name, stand_in)
    base.get_input_embeddings = stand_in.get_input_embeddings
    kinds: list[Modality] = []
    for kind, encode in encoders(base).items():
        try:
            _refuse_uses_of(kind, encode, base, module.config, stand_in)
            kinds.append(kind)
        except ConfigError as error:
            if kind != "video":
                raise
            log.info("films are not read: the class %s", error)
    return tuple(kinds)


def _refuse_uses_of(kind: Modality, encode: Callable[..., Any], base: Any, config: Any, stand_in: StandIn) -> None:
    token = getattr(config, f"{kind}_token_id", None)
    if token is None:
        raise ConfigError(f"names no token that stands for a {ITEMS[kind]} ({kind}_token_id)")
    token_ids = torch.tensor([[3, 5, *[token] * NUM_ROWS, 7]])
    item = torch.randn(NUM_ROWS, stand_in.config.hidden_size)
    want = stand_in.embed_tokens(token_ids)
    want[0, 2 : 2 + NUM_ROWS] = item
    given, read = _given(kind, encode, base, token_ids, item)
    others = {name for name, value in given.items() if isinstance(value, Tensor | dict)}
    read |= others - {"inputs_embeds", "position_ids"}
    embeds = given.get("inputs_embeds")
    if read or embeds is None or not torch.equal(embeds, want):
        what = f" ({_listed(frozenset(read))})" if read else ""
        raise ConfigError(
            f"does more with a {ITEMS[kind]} than to put its rows into the prompt{what}, which is not served"
        )


def _given(
    kind: Modality, encode: Callable[..., Any], base: Any, token_ids: Tensor, item: Tensor
) -> tuple[dict[str, Any], set[str]]:
    """The decoder's arguments, and the other attributes read of the tower's output; tries several forms of rows."""
    positions = torch.arange(token_ids.shape[1])[None]
    axes = skeleton.axes_of(base)
    positions = positions.expand(axes, 1, -1) if axes > 1 else positions
    settings: dict[str, Any] = {"position_ids": positions}
    if "mm_token_type_ids" in arguments(base.forward):
        settings["mm_token_type_ids"] = (token_ids == token_ids[0, 2]).int() * (2 if kind == "video" else 1)
    if kind == "audio":  # classes that take audio pass on only the tower's arguments
        settings.update({name: torch.zeros(1, 1, 1) for name in arguments(encode) - {"kwargs"}})
    said = ""
    for form in ((item,), item[None], item):
        rows = Rows(form)
        if kind == "audio":
            base.get_audio_features = partial(_made, rows)
        else:
            settings["mm_encoder_outputs"] = {kind: rows}
        try:
            base(input_ids=token_ids, use_cache=False, **settings)
        except GivenToDecoder as found:
            return found.arguments, rows.read
        except Exception as error:
            if rows.read:
                return {}, rows.read
            said = " ".join(str(error).split())[:200]
    raise ConfigError(f"does something unknown with a {ITEMS[kind]}'s rows: {said}")


def _made(rows: Rows, *_: Any, **__: Any) -> Rows:
    """Replaces a tower."""
    return rows


def arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters) - {"self"}


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
