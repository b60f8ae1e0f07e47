"""EAGLE-3 behind pictures: the head's entries have the target's media rows in the places of pictures."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests import drafters, tiny
from tests.drafters import HEAD_DIM, Form, TorchEagle3, rotated
from tests.engine.test_drafter import numbers
from tests.engine.test_drafts import PATHS, on_path
from tests.engine_kit import answer, running
from tests.invariance.test_seeing import request
from tests.models.harness import Harness
from tests.models.harness import load as load_model
from tests.models.seeing import prepare, spliced
from tests.once import new_folder

__all__ = ["on_path"]
NAME, MIX, LENGTH = "llava", "two pictures", 12
FORMS = {"lent": Form(hidden=96, maps=False), "own": Form("speculators", hidden=96, own_embedding=True, layers=2)}


class PicturedHead(TorchEagle3):
    """A head over texts that begin with one prompt with pictures."""

    rows: list[tuple[int, Tensor]]  # (place, media rows) of the prompt

    def embedded(self, token_ids: Tensor) -> Tensor:
        found = super().embedded(token_ids).clone()
        for start, rows in self.rows:
            if len(token_ids) >= start + len(rows):  # else a training step over a later part of the text
                found[start - 1 : start - 1 + len(rows)] = rows
        return found


class Pictured:
    """The target in transformers behind the prompt, and a trained head."""

    def __init__(self, form: Form) -> None:
        self.target = tiny.reference(tiny.checkpoint(NAME))
        self.decoder = self.target.model.language_model
        made, _ = spliced(NAME, MIX)
        self.prompt = made.prompt_token_ids.tolist()
        self.rows = prepare(NAME, MIX, Harness(load_model(tiny.checkpoint(NAME)))).media
        self.text = list(self.prompt)
        for _ in range(LENGTH):
            hidden = self.decoder(inputs_embeds=self.merged(self.text)).last_hidden_state
            self.text.append(int(self.target.lm_head(hidden[0, -1]).argmax()))
        streams = drafters.decoder_streams(self.decoder, form, inputs_embeds=self.merged(self.text))
        tensors, fixed = drafters.drawn(form, [self.text])
        self.head = PicturedHead(tensors, self.decoder.embed_tokens.weight.detach(), form)
        self.head.rows = self.rows
        self.teach(streams, fixed)
        self.features = self.head.feature(streams).detach()
        self.folder = new_folder("eagle3-pictures")
        drafters.write(self.folder, {name: one.detach() for name, one in tensors.items()} | fixed, form)

    @torch.no_grad()
    def merged(self, ids: list[int]) -> Tensor:
        """The embeddings [1, n, hidden] of a text that begins with the prompt."""
        found = self.decoder.embed_tokens(torch.tensor([ids]))
        for start, rows in self.rows:
            found[0, start : start + len(rows)] = rows
        return found

    def teach(self, streams: list[Tensor], fixed: dict[str, Tensor]) -> None:
        ids = torch.tensor(self.text)
        optimizer = torch.optim.Adam(self.head.tensors.values(), 0.01)
        wanted = ids[len(self.prompt) + 1 :]
        if self.head.form.maps:
            tokens = fixed["d2t"] + torch.arange(len(fixed["d2t"]))
            wanted = torch.tensor([tokens.tolist().index(token) for token in wanted.tolist()])
        for _ in range(14):
            logits, _ = self.head.layer(ids[1:-1], self.head.feature(streams)[:-2])
            loss = torch.nn.functional.cross_entropy(logits[-len(wanted) :], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.head.tensors |= fixed

    @torch.no_grad()
    def entries(self) -> list[Tensor]:
        """Keys and values of the first layer for the prompt's tokens from place 1 on, each [n - 1, heads, head_dim]."""
        head, ids = self.head, torch.tensor(self.prompt[1:])
        parts = head.embedded(ids), self.features[: len(ids)]
        names = "layers.0.input_layernorm", "layers.0.hidden_norm"
        x = torch.cat([head.norm(name, part) for name, part in zip(names, parts)], -1)
        keys, values = (
            head.product(f"layers.0.self_attn.{name}_proj", x).view(len(ids), -1, HEAD_DIM) for name in "kv"
        )
        return [rotated(keys.transpose(0, 1), torch.arange(len(ids))).transpose(0, 1), values]

    @torch.no_grad()
    def expected(self, most: int) -> tuple[int, int, int]:
        def propose(known: list[int], count: int) -> list[int]:
            return self.head.propose(known, self.features, count)

        return drafters.summed(drafters.steps_of(self.text, len(self.prompt), most, propose))


@functools.cache
def pictured(form: str) -> Pictured:
    return Pictured(FORMS[form])


@pytest.mark.parametrize(("form", "settings"), [("lent", {}), ("own", {"max_prefill_chunk": 7})])
@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_drafts_behind_pictures_are_those_of_the_head_in_plain_torch(on_path, form, settings):
    own = pictured(form)
    wanted = own.expected(2)
    assert 3 <= wanted[2] < wanted[1], "a head that is never or always right would not show an error"
    few = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "encoder_cache_tokens": 128}
    speculative = {"model": str(own.folder), "num_speculative_tokens": 2}
    async with running(tiny.checkpoint(NAME), speculative=speculative, **few, **settings) as engine:
        (tokens,) = await answer(engine, request(NAME, MIX))
        assert tokens == own.text[len(own.prompt) :]
        assert numbers(engine) == wanted
        layers = own.head.form.layers
        pages = await engine.on_device(lambda runtime: runtime.executor.backend.rank.caches[-layers])
        for held, entries in zip(pages, own.entries(), strict=True):
            for place, entry in enumerate(entries, 1):
                apart = (held[:, :, place % 16] - entry).abs().amax((1, 2))  # [blocks]
                assert apart.nan_to_num(nan=1.0).min() < 1e-4, place  # pages hold any bits before they are written
