"""Tiny EAGLE-3 drafters: the model in plain torch, as an oracle, and checkpoints of it that were trained for a second.

`eagle3("qwen3")` gives the folder of a drafter for tests/tiny's checkpoint. It is trained on greedy answers of the
target, so some of its drafts are right. The oracle follows the paper (arXiv:2503.01840) without a cache:
each proposal computes the whole text again.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests import tiny
from tests.once import made_once

STREAMS = (1, 2, 3)  # of the tiny targets, which have at least three layers
HIDDEN, HEADS, HEAD_DIM, WIDTH, NUM_TOKENS = 64, 4, 32, 96, 250
EPS = 1e-6
MASK = 3  # the token of the masks
PROMPTS = [
    torch.randint(2, tiny.VOCAB_SIZE, (8,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(4)
]


@dataclass(frozen=True)
class Form:
    """How a drafter's files are written."""

    dialect: str = "flat"  # or "speculators"
    options: dict[str, Any] = field(default_factory=dict)
    own_embedding: bool = False
    maps: bool = True  # the head has fewer tokens than the target
    streams: tuple[int, ...] = STREAMS
    kv_heads: int = 2
    layers: int = 1
    parallel: bool = False  # P-EAGLE: one pass guesses all drafts
    hidden: int = HIDDEN
    joins: bool = True  # streams pass `fc`; else the features are the target's hidden states behind its final norm

    def __hash__(self) -> int:
        return hash(repr(self))


class TorchEagle3:
    """The drafter over its tensors, by the names of speculators."""

    def __init__(self, tensors: dict[str, Tensor], embedding: Tensor, form: Form) -> None:
        self.tensors, self.embedding, self.form = tensors, tensors.get("embed_tokens.weight", embedding), form

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]

    def product(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def feature(self, streams: list[Tensor]) -> Tensor:
        options = self.form.options
        if not self.form.joins:
            return streams[0]
        if options.get("fc_norm"):
            streams = [self.norm(f"fc_norm.{number}", stream) for number, stream in enumerate(streams)]
        joined = torch.cat(streams, -1)
        return self.product("fc", self.norm("input_norm", joined) if options.get("norm_before_fc") else joined)

    def embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids [..., n] at places 1 .. n -> [..., n, H]."""
        return functional.embedding(token_ids, self.embedding)

    def layer(self, token_ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [..., n] at places 1 .. n, before [..., n, H] -> logits of the tokens behind, features."""
        normed = self.norm("layers.0.hidden_norm", before)
        x = torch.cat([self.norm("layers.0.input_layernorm", self.embedded(token_ids)), normed], -1)
        out = normed if self.form.options.get("norm_before_residual") else before
        for number in range(self.form.layers):
            stem = f"layers.{number}."
            out = out + self.attended(stem, self.norm(stem + "input_layernorm", out) if number else x)
            n = self.norm(stem + "post_attention_layernorm", out)
            gate = functional.silu(self.product(stem + "mlp.gate_proj", n))
            out = out + self.product(stem + "mlp.down_proj", gate * self.product(stem + "mlp.up_proj", n))
        hidden = self.norm("norm", out)
        return self.product("lm_head", hidden), hidden if self.form.options.get("norm_output") else out

    def attended(self, stem: str, x: Tensor) -> Tensor:
        """Causal attention of a layer over its input [..., n, width] -> [..., n, H]."""
        places = torch.arange(x.shape[-2])
        q, k, v = (
            self.product(f"{stem}self_attn.{name}_proj", x).unflatten(-1, (-1, HEAD_DIM)).transpose(-2, -3)
            for name in "qkv"
        )
        q, k = rotated(q, places), rotated(k, places)
        k, v = (x.repeat_interleave(HEADS // self.form.kv_heads, -3) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
        scores = scores.masked_fill(places > places[:, None], float("-inf"))
        return self.product(f"{stem}self_attn.o_proj", (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2))

    def masked(self, ids: Tensor, before: Tensor, count: int) -> Tensor:
        """Logits after texts [..., n] and after count - 1 masks behind each."""
        streams = list(self.tensors["mask_hidden"].view(1, -1).chunk(len(self.form.streams), 1))
        ids = torch.cat([ids, torch.full((*ids.shape[:-1], count - 1), MASK)], -1)
        masks = self.feature(streams).expand(*ids.shape[:-1], count - 1, -1)
        return self.layer(ids, torch.cat([before, masks], -2))[0]

    @torch.inference_mode()
    def propose(self, text: list[int], features: Tensor, count: int) -> list[int]:
        """Greedy drafts after a text of n tokens; features [n - 1 or more, H] of the target's tokens."""
        ids, before, found = list(text[1:]), features[: len(text) - 1], []
        if self.form.parallel:
            logits = self.masked(torch.tensor(ids), before, count)[-count:]
            return [token + int(self.tensors["d2t"][token]) for token in logits.argmax(-1).tolist()]
        for _ in range(count):
            logits, made = self.layer(torch.tensor(ids), before)
            token = int(logits[-1].argmax())
            token += int(self.tensors["d2t"][token]) if "d2t" in self.tensors else 0
            found.append(token)
            ids.append(token)
            before = torch.cat([before, made[-1:]])
        return found


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Heads [..., n, HEAD_DIM] at the places [n]."""
    angles = places[:, None] * 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1) * sin


@functools.cache
def eagle3(target: str, form: Form = Form()) -> Path:
    """The folder of a trained drafter."""
    return made_once(f"eagle3-{target}", form, lambda folder: write(folder, trained(target, form), form))


def write(folder: Path, tensors: dict[str, Tensor], form: Form, **changes: Any) -> None:
    """Writes config.json and model.safetensors in the form's dialect."""
    layer = {
        "model_type": "llama", "hidden_size": form.hidden, "intermediate_size": WIDTH, "num_attention_heads": HEADS,
        "num_key_value_heads": form.kv_heads, "head_dim": HEAD_DIM, "num_hidden_layers": form.layers,
        "vocab_size": tiny.VOCAB_SIZE, "max_position_embeddings": 512, "rms_norm_eps": EPS,
        "rope_theta": 10_000.0, "hidden_act": "silu",
    }  # fmt: skip
    count = len(tensors["lm_head.weight"])
    names = {"draft_vocab_size": count, "torch_dtype": "float32", **form.options}
    if form.dialect == "flat":
        ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(form.streams)}}
        if form.parallel:
            names |= {"parallel_drafting": True, "ptd_token_id": MASK}
        if not form.joins:
            ids = {"eagle_config": {"use_aux_hidden_state": False}}
        config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **names, **ids}
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    else:
        method = {"proposal_type": "greedy", "speculative_tokens": 3}
        if form.parallel:
            names |= {"mask_token_id": MASK}
        config = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "peagle" if form.parallel else "eagle3",
            "transformer_layer_config": layer,
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": [method]},
            "eagle_aux_hidden_state_layer_ids": list(form.streams), "target_hidden_size": None, **names,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def oracle(folder: Path, model: Any, form: Form) -> TorchEagle3:
    """The drafter of a folder in plain torch."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return TorchEagle3(tensors, model.get_input_embeddings().weight.detach(), form)


def streams_of(model: Any, ids: list[int], form: Form) -> list[Tensor]:
    """The target's streams [n, hidden], number n is the output of layer n - 1; or its last hidden states."""
    return decoder_streams(model.get_decoder(), form, input_ids=torch.tensor([ids]))


def decoder_streams(decoder: Any, form: Form, **inputs: Tensor) -> list[Tensor]:
    """As streams_of, of one text."""
    if not form.joins:
        with torch.no_grad():
            return [decoder(**inputs, use_cache=False).last_hidden_state[0]]
    layers, found = decoder.layers, {}

    def note(number: int) -> Any:
        def hook(_module: Any, _inputs: Any, made: Any) -> None:
            made = made[0] if isinstance(made, tuple) else made
            found[number] = made.reshape(-1, made.shape[-1]).float().clone()

        return layers[number - 1].register_forward_hook(hook)

    hooks = [note(number) for number in set(form.streams)]
    with torch.no_grad():
        decoder(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [found[number] for number in form.streams]


def steps_of(
    full: list[int], prompt: int, most: int, propose: Callable[[list[int], int], list[int]]
) -> list[tuple[int, int, int]]:
    """By step with drafts: number of the first draft in the answer, drafts, right drafts.

    full: a prompt of so many tokens with its whole answer. propose: drafts after a text, at most so many.
    """
    found = []
    known, last = prompt + 2, len(full) - 1  # two steps are in flight before the first run is read
    while known < last:
        guesses = propose(full[:known], min(most, last - known))
        right = next((k for k, guess in enumerate(guesses) if guess != full[known + k]), len(guesses))
        found.append((known - prompt, len(guesses), right))
        known += right + 1
    return found


def summed(steps: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Steps with drafts, drafts, and right drafts."""
    return len(steps), sum(drafts for _, drafts, _ in steps), sum(right for *_, right in steps)


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The text with the target's next `count` tokens."""
    return greedy_texts(model, [ids], count)[0]


def greedy_texts(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Texts of equal length, each with the target's next `count` tokens."""
    model.generation_config.eos_token_id = None
    given = torch.tensor(prompts)
    rules = {"attention_mask": torch.ones_like(given), "do_sample": False, "pad_token_id": 0}  # a text may have token 0
    return model.generate(given, max_new_tokens=count, **rules).tolist()


def layer_shapes(stem: str, width: int, kv_heads: int, hidden: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    """Tensors of a decoder layer whose attention reads `width` numbers."""
    keys = (kv_heads * HEAD_DIM, width)
    return {
        f"{stem}input_layernorm.weight": (hidden,),
        f"{stem}self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{stem}self_attn.k_proj.weight": keys,
        f"{stem}self_attn.v_proj.weight": keys,
        f"{stem}self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
        f"{stem}post_attention_layernorm.weight": (hidden,),
        f"{stem}mlp.gate_proj.weight": (WIDTH, hidden),
        f"{stem}mlp.up_proj.weight": (WIDTH, hidden),
        f"{stem}mlp.down_proj.weight": (hidden, WIDTH),
    }


@functools.cache
def answers(target: str) -> list[list[int]]:
    """Texts of equal length that drafters are taught: the target's greedy answers to two random prompts."""
    return greedy_texts(tiny.reference(tiny.checkpoint(target)), PROMPTS[:2], 36)


def trained(target: str, form: Form, rounds: int = 40) -> dict[str, Tensor]:
    """Tensors of a drafter that follows the target's answers."""
    model, texts = tiny.reference(tiny.checkpoint(target)), answers(target)
    made, fixed = drawn(form, texts)
    drafter = TorchEagle3(made, model.get_input_embeddings().weight.detach(), form)
    streams = [streams_of(model, text, form) for text in texts]
    teach(drafter, fixed, torch.tensor(texts), [torch.stack(each) for each in zip(*streams)], rounds)
    return {name: tensor.detach() for name, tensor in made.items()} | fixed


def drawn(form: Form, texts: list[list[int]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random tensors of a drafter that can be trained, and the maps of its head, which has all tokens of the texts."""
    draw, hidden = torch.Generator().manual_seed(5), form.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(form.streams) * hidden),
        "layers.0.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (NUM_TOKENS if form.maps else tiny.VOCAB_SIZE, hidden),
    }
    if not form.joins:
        shapes.pop("fc.weight")
    for number in range(form.layers):
        shapes |= layer_shapes(f"layers.{number}.", hidden if number else 2 * hidden, form.kv_heads, hidden)
    if form.options.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (hidden,) for number in range(len(form.streams))}
    if form.options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(form.streams) * hidden,)
    if form.parallel:
        shapes["mask_hidden"] = (1, 1, len(form.streams) * hidden)
    if form.own_embedding:
        shapes["embed_tokens.weight"] = (tiny.VOCAB_SIZE, hidden)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=draw)
        made[name] = (1 + 0.1 * noise if len(shape) == 1 else 0.15 * noise).requires_grad_()
    fixed: dict[str, Tensor] = {}
    if form.maps:
        used = sorted({token for text in texts for token in text})
        rest = [token for token in range(tiny.VOCAB_SIZE) if token not in used]
        chosen = torch.tensor(sorted((used + rest)[:NUM_TOKENS]))
        fixed["d2t"] = chosen - torch.arange(NUM_TOKENS)
        fixed["t2d"] = torch.zeros(tiny.VOCAB_SIZE, dtype=torch.bool).index_fill_(0, chosen, True)
    return made, fixed


def teach(drafter: TorchEagle3, fixed: dict[str, Tensor], ids: Tensor, streams: list[Tensor], rounds: int) -> None:
    """Trains a drafter to follow texts [t, n] with the target's streams, each [t, n, H]."""
    form, wanted = drafter.form, ids[:, 2:]
    if form.maps:
        chosen = fixed["d2t"] + torch.arange(NUM_TOKENS)
        wanted = torch.full((tiny.VOCAB_SIZE,), -100).index_copy_(0, chosen, torch.arange(NUM_TOKENS))[wanted]
    optimizer = torch.optim.Adam(drafter.tensors.values(), 0.01)
    for _ in range(rounds):
        features = drafter.feature(streams)
        logits, out = drafter.layer(ids[:, 1:-1], features[:, :-2])
        again, _ = drafter.layer(ids[:, 2:-1], out[:, :-1])
        pairs = [(logits, wanted), (again, wanted[:, 1:])]
        for end in (9, 14, 20, 26) if form.parallel else ():
            guessed = drafter.masked(ids[:, 1:end], features[:, : end - 1], 5)[:, -5:]
            pairs.append((guessed, wanted[:, end - 2 : end + 3]))
        optimizer.zero_grad()
        loss = torch.zeros(())
        for made, right in pairs:
            loss = loss + len(ids) * functional.cross_entropy(made.flatten(0, 1), right.flatten())
        loss.backward()
        optimizer.step()
