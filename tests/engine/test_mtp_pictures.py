"""MTP behind pictures: the layer's entries have the target's merged embeddings and the positions of all axes."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from tests import drafters, tiny
from tests.engine.test_drafts import PATHS, on_path
from tests.engine.test_mtp_qwen import FULL, LAYERS, NAMES, ROOM, asked, counts
from tests.engine_kit import answer, running
from tests.invariance.test_seeing import request
from tests.models.harness import Harness
from tests.models.harness import load as load_model
from tests.models.seeing import prepare, spliced
from tests.once import new_folder
from tests.tiny_states import qwen3_5

__all__ = ["on_path"]
NAME, MIX, LENGTH = "qwen3_5", "two pictures", 12


class PicturedLayer:
    """transformers' decoder and MtpLayer over merged embeddings, with rows of our own tower."""

    def __init__(self) -> None:
        from transformers.modeling_layers import MtpModel

        self.target = qwen3_5(**LAYERS)
        text = self.target.config.text_config
        text.num_mtp_layers, text.mtp_layer_types = 1, [FULL]
        with tiny.quiet():
            self.model = MtpModel(self.target, 1)
        self.decoder = self.target.model.language_model
        self.folder = new_folder("mtp-pictures") / NAME
        tiny.save(self.target, self.folder)
        made, _ = spliced(NAME, MIX)
        self.prompt, self.delta = made.prompt_token_ids.tolist(), made.position_delta
        self.places = torch.tensor(made.positions)[:, None]  # [3, 1, n]
        row = prepare(NAME, MIX, Harness(load_model(self.folder)))
        self.rows = row.media  # (start, rows)
        self.text = self.greedy()
        self.hidden = self.hidden_of(self.text)
        self.teach()
        tensors = load_file(self.folder / "model.safetensors")
        for key, tensor in self.model.layers[0].state_dict().items():
            own, _, rest = key.partition(".")
            tensors["mtp." + (f"layers.0.{rest}" if own == "mtp_block" else f"{NAMES[own]}.{rest}")] = tensor
        save_file(tensors, self.folder / "model.safetensors")

    def merged(self, ids: list[int]) -> Tensor:
        """The embeddings [1, n, hidden] of a text that begins with the prompt."""
        with torch.no_grad():
            found = self.decoder.embed_tokens(torch.tensor([ids]))
            for start, rows in self.rows:
                found[0, start : start + len(rows)] = rows
        return found

    def positions(self, count: int) -> Tensor:
        """[3, 1, count]: the prompt's, then those of text."""
        behind = torch.arange(len(self.prompt), max(count, len(self.prompt))) + self.delta
        return torch.cat([self.places, behind.expand(3, 1, -1)], 2)[:, :, :count]

    @torch.no_grad()
    def hidden_of(self, ids: list[int]) -> Tensor:
        """Hidden states behind the final norm, [1, n, hidden]."""
        return self.decoder(inputs_embeds=self.merged(ids), position_ids=self.positions(len(ids))).last_hidden_state

    def greedy(self) -> list[int]:
        ids = list(self.prompt)
        for _ in range(LENGTH):
            ids.append(int(self.target.lm_head(self.hidden_of(ids)[0, -1]).argmax()))
        return ids

    def after(self, ids: list[int], before: Tensor, first: int = 1, cache: DynamicCache | None = None) -> Tensor:
        """The layer's output for the tokens at places `first` .. of a text, [1, n, hidden]."""
        count = before.shape[1]
        embedded = self.merged(ids)[:, first : first + count]
        rotated = self.decoder.rotary_emb(embedded, self.positions(len(ids))[:, :, first : first + count])
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        return self.model.layers[0](embedded, before, rotated, mask, None, cache)

    @torch.no_grad()
    def entries(self) -> list[Tensor]:
        """Keys and values of the prompt's tokens from place 1 on, each [n - 1, heads, head_dim]."""
        cache = DynamicCache()
        self.after(self.prompt, self.hidden[:, : len(self.prompt) - 1], 1, cache)
        (own,) = cache.layers
        return [own.keys[0].transpose(0, 1), own.values[0].transpose(0, 1)]

    def teach(self) -> None:
        draw = torch.Generator().manual_seed(3)
        for name, parameter in self.model.layers.named_parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) * (0.05 if "norm" in name else 0.15)
        optimizer = torch.optim.Adam(self.model.layers.parameters(), 0.01)
        wanted = torch.tensor(self.text[2:])
        for _ in range(25):
            out = self.after(self.text, self.hidden[:, :-2])
            again = self.after(self.text, out[:, :-1], 2)
            loss = functional.cross_entropy(self.target.lm_head(out)[0], wanted)
            loss = loss + functional.cross_entropy(self.target.lm_head(again)[0], wanted[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def propose(self, known: list[int], count: int) -> list[int]:
        ids, before = list(known), self.hidden[:, : len(known) - 1]
        for _ in range(count):
            out = self.after(ids, before)
            ids.append(int(self.target.lm_head(out[0, -1]).argmax()))
            before = torch.cat([before, out[:, -1:]], 1)
        return ids[len(known) :]

    def expected(self, most: int) -> tuple[int, int, int]:
        return drafters.summed(drafters.steps_of(self.text, len(self.prompt), most, self.propose))


@functools.cache
def layer() -> PicturedLayer:
    return PicturedLayer()


@pytest.mark.parametrize("settings", [{}, {"max_prefill_chunk": 7}])
@pytest.mark.parametrize("on_path", PATHS[:2], indirect=True)
async def test_drafts_behind_pictures_are_those_of_transformers_layer(on_path, settings):
    wanted = layer().expected(2)
    assert wanted[2] >= 3, "a layer that is never right would not show an error"
    few = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "encoder_cache_tokens": 128}
    async with running(layer().folder, speculative=asked(2), **ROOM, **few, **settings) as own:
        (tokens,) = await answer(own, request(NAME, MIX))
        assert tokens == layer().text[len(layer().prompt) :]
        assert counts(own) == wanted
        pages = await own.on_device(lambda runtime: runtime.executor.backend.rank.caches[-1])
        for held, entries in zip(pages, layer().entries(), strict=True):
            for place, entry in enumerate(entries, 1):
                apart = (held[:, :, place % 16] - entry).abs().amax((1, 2))  # [blocks]
                assert apart.nan_to_num(nan=1.0).min() < 1e-4, place  # pages hold any bits before they are written
