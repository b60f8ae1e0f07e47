"""Tiny block drafters: transformers' MuseGlimmerAssistantModel as an oracle, and checkpoints of it, briefly taught.

transformers has DFlash's layers under that name; the test says which keys each layer's queries see. What DSpark and
DFlash2 add is plain torch. `folder_of` gives the folder of a drafter for a tests/tiny checkpoint, trained on greedy
answers of the target, so some drafts are right.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests import drafters, tiny
from tests.drafters import EPS, HEAD_DIM, HEADS, HIDDEN, NUM_TOKENS, WIDTH
from tests.once import made_once

MASK = 3  # the token of the masks
GROUP = 16  # columns with the same change of a convolution's kernel
NAMES = (("encoder.fc", "fc"), ("encoder.output_norm_enc", "hidden_norm"))  # transformers' names and z-lab's


@dataclass(frozen=True)
class Form:
    """A drafter and how its files are written."""

    dialect: str = "flat"  # or "speculators"
    options: dict[str, Any] = field(default_factory=dict)  # further keys of dflash_config, or at the top
    kinds: tuple[str, ...] = ("full", "full")  # layer_types
    windows: tuple[int, ...] = (0, 0)  # keys that each layer's queries see before their own place; 0: all
    whole: tuple[bool, ...] = (True, True)  # whether each layer's queries see their whole block
    block: int = 8
    streams: tuple[int, ...] = (1, 3)  # of the target; n is the input of layer n
    own_embedding: bool = False
    maps: bool = False  # the head has fewer tokens than the target
    mask_embedding: bool = False
    sinks: bool = False
    kind: str = "dflash"  # or "dspark", "dflash2"
    skipped: int = 1  # 1: queries guess the tokens of their own places; 0: the tokens behind
    rank: int = 0  # numbers that a guess reads of the token before
    markov: str = "vanilla"  # how; or "gated", "rnn"
    taps: int = 0  # of convolutions around the sublayers, for 16 columns at a time
    confident: str = ""  # what the confidence reads: "hidden" or "both"; "": there is none

    def __hash__(self) -> int:
        return hash(repr(self))


def sunk(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **rest: Any) -> Any:
    """Attention of transformers' modules whose softmax has a further logit per head, if the module has `sinks`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * rest["scaling"] + attention_mask
    if hasattr(module, "sinks"):
        extra = module.sinks[None, :, None, None].expand(len(query), -1, query.shape[2], 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class TorchBlocks:
    """A drafter: transformers' module, an embedding and a head."""

    def __init__(self, form: Form, target: Any, seed: int = 5) -> None:
        from transformers import AttentionInterface, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

        AttentionInterface.register("sunk", sunk)
        config = MuseGlimmerAssistantConfig(
            hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=len(form.kinds), num_attention_heads=HEADS,
            num_key_value_heads=2, head_dim=HEAD_DIM, rms_norm_eps=EPS, max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, block_size=form.block,
            mask_token_id=MASK, target_layer_ids=list(form.streams),
            layer_types=["full_attention", "sliding_attention", "full_attention"][: len(form.kinds)],
        )  # fmt: skip
        config._attn_implementation = "sunk"
        self.form, self.model = form, MuseGlimmerAssistantModel(config)
        draw = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.data = 1 + 0.1 * noise if "norm" in name else 0.15 * noise

        def own(*shape: int) -> Tensor:
            return (0.15 * torch.randn(shape, generator=draw)).requires_grad_()

        self.own: dict[str, Tensor] = {}
        if form.own_embedding:
            self.own["embed_tokens.weight"] = own(tiny.VOCAB_SIZE, HIDDEN)
        if form.maps:
            self.own["lm_head.weight"] = own(NUM_TOKENS, HIDDEN)
        if form.mask_embedding:
            self.own["mask_embedding"] = own(HIDDEN)
        for number, layer in enumerate(self.model.layers if form.sinks else ()):
            layer.self_attn.sinks = self.own[f"layers.{number}.self_attn.attention_sink_bias"] = own(HEADS)
        self.embedding = self.own.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
        self.head = self.own.get("lm_head.weight", target.get_output_embeddings().weight.detach())
        self.tokens = torch.arange(len(self.head))  # the target's token of each token of the head
        if form.kind == "dspark" and form.rank:
            self.own["markov_head.markov_w1.weight"] = own(tiny.VOCAB_SIZE, form.rank)
            self.own["markov_head.markov_w2.weight"] = own(len(self.head), form.rank)
            names = {"gated": ("gate_proj", 1), "rnn": ("joint_proj", 3)}
            if form.markov in names:
                name, parts = names[form.markov]
                self.own[f"markov_head.{name}.weight"] = own(parts * form.rank, HIDDEN + (1 + parts // 2) * form.rank)
                self.own[f"markov_head.{name}.bias"] = own(parts * form.rank)
        if form.confident:
            self.own["confidence_head.proj.weight"] = own(1, HIDDEN + form.rank * (form.confident == "both"))
            self.own["confidence_head.proj.bias"] = own(1)
        if form.kind == "dflash2":
            for name in ("predecessor_codebook", "successor_codebook"):
                self.own[f"candidate_selector.{name}"] = own(tiny.VOCAB_SIZE, form.rank)
            self.own["candidate_selector.hidden_projection.weight"] = own(form.rank, HIDDEN)
        self._places = torch.empty(0)
        for number, layer in enumerate(self.model.layers if form.taps else ()):
            for name, first, last in (
                (f"layers.{number}.attention_conv.", layer.input_layernorm, layer.self_attn),
                (f"layers.{number}.mlp_conv.", layer.post_attention_layernorm, layer.mlp),
            ):
                self.own[name + "base_kernel"] = own(2, form.taps, HIDDEN)
                self.own[name + "kernel_projection.weight"] = own(2 * form.taps * HIDDEN // GROUP, HIDDEN)
                self.convolve(name, first, last)

    def convolve(self, name: str, norm: Any, sublayer: Any) -> None:
        """Wraps a sublayer with convolutions of its input and its output, inside each block."""
        kernels: list[Tensor] = []

        def convolved(rows: Tensor, side: int) -> Tensor:
            weight = self.own[name + "base_kernel"][side] + kernels[0][:, :, side]
            parts = [weight[:, :, 0] * rows]
            for tap in range(1, self.form.taps):
                shifted = functional.pad(rows, (0, 0, tap, 0))[:, : rows.shape[1]]
                parts.append(weight[:, :, tap] * shifted * (self._places >= tap)[:, None])
            return torch.stack(parts).sum(0)

        def before(_module: Any, _given: Any, rows: Tensor) -> Tensor:
            delta = rows @ self.own[name + "kernel_projection.weight"].T
            kernels[:] = [delta.view(*rows.shape[:2], 2, self.form.taps, -1).repeat_interleave(GROUP, 4)]
            return convolved(rows, 0)

        def behind(_module: Any, _given: Any, made: Any) -> Any:
            rows = convolved(made[0] if isinstance(made, tuple) else made, 1)
            return (rows, *made[1:]) if isinstance(made, tuple) else rows

        norm.register_forward_hook(before)
        sublayer.register_forward_hook(behind)

    def scores(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits [..., n, D] of n guesses behind the tokens [..., n]; hidden [..., skipped + n, H]."""
        skipped = self.form.skipped
        logits = hidden[..., skipped:, :] @ self.head.T
        if self.form.kind == "dflash2":
            logits = logits * self.form.options.get("output_multiplier", 1.0)
            if cap := self.form.options.get("final_logit_softcapping"):
                logits = cap * (logits / cap).tanh()
            projected = hidden[..., skipped:, :] @ self.own["candidate_selector.hidden_projection.weight"].T
            known = functional.embedding(before, self.own["candidate_selector.predecessor_codebook"])
            further = (known * projected) @ self.own["candidate_selector.successor_codebook"].T
            fewest = logits.topk(self.form.options["selector_top_k"]).values[..., -1:]
            return logits + further.where(logits >= fewest, -1e9)
        if self.form.kind == "dspark" and self.form.rank:
            known = self.mixed(hidden, torch.cat([*[before[..., :1]] * skipped, before], -1))
            logits = logits + known[..., skipped:, :] @ self.own["markov_head.markov_w2.weight"].T
        return logits

    def mixed(self, hidden: Tensor, before: Tensor) -> Tensor:
        """What the bias of queries follows from, [..., n, rank]: of all queries of a block, hidden [..., n, H]."""
        known, (head, kind) = functional.embedding(before, self.own["markov_head.markov_w1.weight"]), self.markov()
        if kind == "vanilla":
            return known
        if kind == "gated":
            return head(torch.cat([hidden, known], -1)).sigmoid() * known
        state, found = torch.zeros_like(known[..., 0, :]), []
        for number in range(known.shape[-2]):
            row = torch.cat([state, known[..., number, :], hidden[..., number, :]], -1)
            keeps, new, out = head(row).unflatten(-1, (3, -1)).unbind(-2)
            state = keeps.sigmoid() * state + (1 - keeps.sigmoid()) * new.tanh()
            found.append(out.tanh())
        return torch.stack(found, -2)

    def markov(self) -> tuple[Any, str]:
        """The product of a Markov head, and its kind."""
        name = {"gated": "gate_proj", "rnn": "joint_proj"}.get(self.form.markov, "")
        weight, bias = (self.own.get(f"markov_head.{name}.{each}") for each in ("weight", "bias"))
        return (lambda rows: functional.linear(rows, weight, bias)), self.form.markov

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits [...] of the confidence in guesses."""
        if self.form.confident == "both":
            known = functional.embedding(before, self.own["markov_head.markov_w1.weight"])
            hidden = torch.cat([hidden, known], -1)
        product = hidden @ self.own["confidence_head.proj.weight"][0]
        return product + self.own["confidence_head.proj.bias"]

    def hidden(self, context: Tensor, ids: Tensor, starts: list[int], size: int) -> Tensor:
        """context [t, n, streams * H] and ids [t, blocks * size] of t texts, each block at the places from its start on
        -> [t, blocks * size, H]."""
        length = context.shape[1]
        places = torch.cat([torch.arange(start, start + size) for start in starts])
        block = torch.arange(len(starts)).repeat_interleave(size)
        number = torch.cat([torch.full((length,), -1), block])
        at = torch.cat([torch.arange(length), places])
        first = torch.tensor(starts).repeat_interleave(size)[:, None]
        masks = {}
        for kind, window, whole in zip(self.model.config.layer_types, self.form.windows, self.form.whole, strict=True):
            seen = ((number < 0) & (at < first)) | (number == block[:, None])
            if not whole:
                seen &= at <= places[:, None]
            if window:
                seen &= at > places[:, None] - window
            masks[kind] = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
        self._places = torch.arange(size).repeat(len(starts))
        embedded = functional.embedding(ids, self.embedding) * self.form.options.get("input_embedding_scale", 1.0)
        if "mask_embedding" in self.own:
            embedded = torch.where((ids == MASK)[..., None], self.own["mask_embedding"], embedded)
        return self.model(embedded, context, masks, at[None]).last_hidden_state

    @torch.no_grad()
    def propose(self, text: list[int], streams: list[Tensor], count: int) -> list[int]:
        """Greedy drafts after a text of n tokens; streams: each [n - 1 or more, H]."""
        return self.proposed(text, streams, count)[0]

    @torch.no_grad()
    def proposed(self, text: list[int], streams: list[Tensor], count: int) -> tuple[list[int], list[float]]:
        """The same, and the confidence in each."""
        last, size = len(text) - 1, count + self.form.skipped
        ids = torch.tensor([[text[-1]] + [MASK] * (size - 1)])
        hidden = self.hidden(torch.cat(streams, -1)[None, :last], ids, [last], size)[0]
        found, sure = [text[-1]], []
        for end in range(self.form.skipped + 1, size + 1):
            before = torch.tensor(found)
            found.append(int(self.tokens[self.scores(hidden[:end], before)[-1].argmax()]))
            if self.form.confident:
                sure.append(float(self.confidence(hidden[end - 1], before[-1]).sigmoid()))
        return found[1:], sure


def used_tokens(texts: list[list[int]]) -> Tensor:
    """The tokens of a head with NUM_TOKENS tokens."""
    used = sorted({token for text in texts for token in text})
    rest = [token for token in range(tiny.VOCAB_SIZE) if token not in used]
    return torch.tensor(sorted((used + rest)[:NUM_TOKENS]))


def teach(target: str, form: Form) -> TorchBlocks:
    """A drafter that follows the target's greedy answers to two random prompts."""
    model, texts = tiny.reference(tiny.checkpoint(target)), drafters.answers(target)
    drafter = TorchBlocks(form, model)
    if form.maps:
        drafter.tokens = used_tokens(texts)
    inverse = torch.full((tiny.VOCAB_SIZE,), -100).index_copy_(0, drafter.tokens, torch.arange(len(drafter.tokens)))
    size, follows = form.block, drafters.Form(streams=form.streams)
    streams = torch.stack([torch.cat(drafters.streams_of(model, text, follows), -1) for text in texts])
    starts = list(range(2, len(texts[0]) - size, 2))
    blocks = torch.tensor(texts).unfold(1, size + 1 - form.skipped, 1)[:, starts]  # [t, blocks, known tokens]
    before, wanted = blocks[..., :-1], inverse[blocks[..., 1:]]
    ids = torch.full((len(texts), len(starts), size), MASK)
    ids[..., 0] = blocks[..., 0]
    optimizer = torch.optim.Adam([*drafter.model.parameters(), *drafter.own.values()], 0.015)
    for _ in range(30 if form.kind == "dflash2" else 12):  # few enough that drafts are wrong too
        optimizer.zero_grad()
        hidden = drafter.hidden(streams, ids.flatten(1), starts, size).view(*ids.shape, HIDDEN)
        scores = drafter.scores(hidden, before)
        loss = functional.cross_entropy(scores.flatten(0, 2), wanted.flatten())
        if form.confident:
            right = (scores.argmax(-1) == wanted).float()
            sure = drafter.confidence(hidden[..., form.skipped :, :].detach(), before)
            loss = loss + functional.binary_cross_entropy_with_logits(sure, right)
        loss.backward()
        optimizer.step()
    return drafter


@functools.cache
def folder_of(target: str, form: Form) -> Path:
    """The folder of a trained drafter."""
    return made_once(f"blocks-{target}", form, lambda folder: write(folder, teach(target, form)))


@functools.cache
def taught(target: str, form: Form) -> TorchBlocks:
    """The trained drafter with the tensors of its folder: the processes of a run train it once."""
    drafter = TorchBlocks(form, tiny.reference(tiny.checkpoint(target)))
    tensors = load_file(folder_of(target, form) / "model.safetensors")
    if form.maps:
        drafter.tokens = tensors["d2t"] + torch.arange(NUM_TOKENS)
    with torch.no_grad():
        for name, tensor in [*named(drafter), *drafter.own.items()]:
            tensor.copy_(tensors[name])
    return drafter


def named(drafter: TorchBlocks) -> Iterator[tuple[str, Tensor]]:
    """The tensors of transformers' module, with their names in z-lab's files."""
    for name, tensor in drafter.model.state_dict().items():
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        if not name.endswith(".sinks"):
            yield name, tensor


def tensors_of(drafter: TorchBlocks) -> dict[str, Tensor]:
    """The tensors by the names of z-lab's files."""
    found = {name: tensor.detach().clone() for name, tensor in named(drafter)}
    if drafter.form.maps:
        found["d2t"] = drafter.tokens - torch.arange(NUM_TOKENS)
    return found | {name: tensor.detach() for name, tensor in drafter.own.items()}


def write(folder: Path, drafter: TorchBlocks) -> None:
    """Writes config.json and model.safetensors in the form's dialect."""
    form = drafter.form
    layer = {
        "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_attention_heads": HEADS,
        "num_key_value_heads": 2, "head_dim": HEAD_DIM, "num_hidden_layers": len(form.kinds),
        "vocab_size": tiny.VOCAB_SIZE, "max_position_embeddings": 512, "rms_norm_eps": EPS, "rope_theta": 10_000.0,
        "hidden_act": "silu", "layer_types": [f"{kind}_attention" for kind in form.kinds],
        "sliding_window": max(form.windows) or None,
    }  # fmt: skip
    names = {"torch_dtype": "float32", "block_size": form.block, "draft_vocab_size": len(drafter.head)}
    options = {"mask_token_id": MASK, **form.options}
    if form.kind == "dspark":
        options |= {"markov_rank": form.rank, "sample_from_anchor": not form.skipped}
        options |= {} if form.markov == "vanilla" else {"markov_head_type": form.markov}
        both = form.confident == "both"
        options |= {"enable_confidence_head": bool(form.confident), "confidence_head_with_markov": both}
    if form.kind == "dflash2":
        options |= {"conv_kernel_size": form.taps, "conv_group_size": GROUP, "selector_rank": form.rank}
    if form.dialect == "flat":
        inner = {"target_layer_ids": [number - 1 for number in form.streams], **options}
        at_top = {"dflash_config": inner} if form.kind != "dspark" else inner
        named = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel"}[form.kind]
        config = {"architectures": [named], **layer, **names, **at_top}
    else:
        config = {
            "architectures": ["ASpeculator"], "speculators_model_type": form.kind,
            "transformer_layer_config": layer, "aux_hidden_state_layer_ids": list(form.streams),
            **names, **options,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors_of(drafter).items()}, folder / "model.safetensors")


def changed(folder: Path, change: Any = None, config: dict[str, Any] | None = None) -> None:
    """Gives a drafter's folder other tensors, or other values in config.json."""
    tensors = load_file(folder / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **(config or {})}))
