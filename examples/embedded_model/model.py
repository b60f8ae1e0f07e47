"""The training forward pass: the modules of transformers' thinker, run over packed sequences.

The parameters belong to a `Qwen2_5OmniThinkerForConditionalGeneration`; only the order of calls is different, so that
one pass takes thousands of sequences of any lengths. On CUDA, attention is the flash kernel over running lengths,
elsewhere a loop over sequences. `logits` computes what transformers computes (tests compare the two).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.embedded_model import blueprint as bp

HEAD = 64  # size of every attention head, in all three towers
GROUP = 2  # query heads that share a key-value head
FULL = bp.vision_config()["fullatt_block_indexes"]
ROPE = bp.text_config()["rope_parameters"]


def parts(thinker: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The modules of text, vision and audio, in the older and the newer layout of transformers."""
    holder = thinker.model if hasattr(thinker.model, "visual") else thinker
    return getattr(holder, "language_model", None) or thinker.model, holder.visual, holder.audio_tower


def canonical(name: str) -> str:
    """A parameter's name as checkpoints write it, for any version of transformers."""
    for long, short in (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
        ("model.audio_tower.", "audio_tower."),
    ):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, causal: bool) -> Tensor:
    """Attention within each sequence: q, k, v [tokens, heads, 64], ends int32 [sequences + 1]."""
    if q.is_cuda:
        out = torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, longest, longest, 0.0, causal, False)
        return out[0]
    pieces = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if end > start:
            one = [x[start:end].transpose(0, 1)[None] for x in (q, k, v)]
            pieces.append(F.scaled_dot_product_attention(*one, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(pieces)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x [tokens, heads, dim], cos and sin [tokens, 1, dim / 2], in x's precision."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def text_angles(positions: Tensor, dim: int, theta: float, section: list[int]) -> tuple[Tensor, Tensor]:
    """cos, sin [tokens, 1, dim / 2] of three-axis positions [3, tokens]."""
    inverse = theta ** -(torch.arange(0, dim, 2, device=positions.device).float() / dim)
    angles = positions[..., None].float() * inverse  # [3, tokens, dim / 2]
    parts = angles.split(section, -1)
    mixed = torch.cat([part[axis] for axis, part in enumerate(parts)], -1)[:, None]
    return mixed.cos(), mixed.sin()


def _gated(x: Tensor, mlp: nn.Module) -> Tensor:
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def text_layer(x: Tensor, layer: nn.Module, cos: Tensor, sin: Tensor, ends: Tensor, longest: int) -> Tensor:
    """One decoder layer over packed tokens [tokens, hidden]."""
    a = layer.self_attn
    h = norm(x, layer.input_layernorm.weight, 1e-6)
    q, k, v = (proj(h).unflatten(-1, (-1, HEAD)) for proj in (a.q_proj, a.k_proj, a.v_proj))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (t.repeat_interleave(GROUP, dim=1) for t in (k, v))
    x = x + a.o_proj(attend(q, k, v, ends, longest, causal=True).flatten(1))
    return x + _gated(norm(x, layer.post_attention_layernorm.weight, 1e-6), layer.mlp)


def vision_layer(x: Tensor, block: nn.Module, cos: Tensor, sin: Tensor, ends: Tensor, longest: int) -> Tensor:
    """One block of the vision tower over packed patches."""
    a = block.attn
    h = norm(x, block.norm1.weight, 1e-6)
    q, k, v = (proj(h).unflatten(-1, (-1, HEAD)) for proj in (a.q, a.k, a.v))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    x = x + a.proj(attend(q, k, v, ends, longest, causal=False).flatten(1))
    return x + _gated(norm(x, block.norm2.weight, 1e-6), block.mlp)


def audio_layer(x: Tensor, layer: nn.Module, ends: Tensor, longest: int) -> Tensor:
    """One layer of the audio tower over packed frames."""
    a = layer.self_attn
    h = layer.self_attn_layer_norm(x)
    q, k, v = (proj(h).unflatten(-1, (-1, HEAD)) for proj in (a.q_proj, a.k_proj, a.v_proj))
    x = x + a.out_proj(attend(q, k, v, ends, longest, causal=False).flatten(1))
    return x + layer.fc2(F.gelu(layer.fc1(layer.final_layer_norm(x))))


@cache
def _mel_filters(device: str) -> Tensor:
    """Slaney's 80 mel filters, [80, 201]."""
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(
        1 + bp.N_FFT // 2, bp.NUM_MELS, 0.0, 8000.0, bp.SAMPLE_RATE, norm="slaney", mel_scale="slaney"
    )
    return torch.from_numpy(bank).float().T.contiguous().to(device)


def log_mel(waves: Tensor) -> Tensor:
    """Whisper's log-mel of zero-padded waves [n, samples] float32: [n, 80, frames]."""
    window = torch.hann_window(bp.N_FFT, device=waves.device)
    power = torch.stft(waves, bp.N_FFT, bp.HOP, window=window, return_complex=True)[..., :-1].abs() ** 2
    logs = (_mel_filters(str(waves.device)) @ power).clamp(min=1e-10).log10()
    floor = logs.amax((1, 2), keepdim=True) - 8.0
    return (torch.maximum(logs, floor) + 4.0) / 4.0


class Packed(nn.Module):
    """Runs a thinker on packed batches (dicts of `encode.pack`, on the model's device)."""

    def __init__(self, thinker: nn.Module, compiled: bool = False) -> None:
        super().__init__()
        self.thinker = thinker
        self.text, self.eyes, self.ears = parts(thinker)
        wrap = (lambda f: torch.compile(f, dynamic=True)) if compiled else (lambda f: f)
        self.text_layer, self.vision_layer, self.audio_layer = wrap(text_layer), wrap(vision_layer), wrap(audio_layer)

    def see(self, batch: dict[str, Tensor]) -> Tensor:
        """Tokens of all pictures and films, [tokens, hidden], in the order of `seen_at`."""
        eyes = self.eyes
        mean = torch.tensor(bp.IMAGE_MEAN, device=batch["seen_at"].device)[:, None, None]
        std = torch.tensor(bp.IMAGE_STD, device=batch["seen_at"].device)[:, None, None]
        kernel = eyes.patch_embed.proj.weight  # [hidden, 3, 2, 14, 14]
        pieces = []
        for name, weight in (("still_patches", kernel.sum(2)), ("film_patches", kernel)):
            if name in batch:
                pixels = batch[name].view(-1, 3, (1 if weight.dim() == 4 else 2), bp.PATCH * bp.PATCH).float() / 255
                pixels = ((pixels - mean) / std).to(weight.dtype)
                pieces.append(F.linear(pixels.flatten(1), weight.flatten(1)))
        x = torch.cat(pieces)
        order = batch["window_order"].long()
        x = x.unflatten(0, (-1, 4))[order].flatten(0, 1)
        places = batch["patch_places"].unflatten(0, (-1, 4))[order].flatten(0, 1).float()
        inverse = 10000.0 ** -(torch.arange(0, 32, 2, device=x.device).float() / 32)
        angles = (places[:, :, None] * inverse).flatten(1)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for number, block in enumerate(eyes.blocks):
            ends, longest = (
                (batch["frame_ends"], int(batch["frame_longest"])) if number in FULL else (batch["window_ends"], 64)
            )
            x = self.vision_layer(x, block, cos, sin, ends, longest)
        merged = eyes.merger.mlp(norm(x, eyes.merger.ln_q.weight, 1e-6).view(-1, 4 * x.shape[1]))
        return torch.zeros_like(merged).index_copy(0, order, merged)

    def hear(self, batch: dict[str, Tensor]) -> Tensor:
        """Tokens of all sounds, [tokens, hidden], in the order of `heard_at`. Every sound is at most one chunk long."""
        ears = self.ears
        mel = log_mel(batch["waves"].float() / 32768).to(ears.conv1.weight.dtype)
        frames = (batch["wave_len"].long() + bp.HOP - 1) // bp.HOP
        mel = mel[:, :, : int(frames.max())]
        inside = torch.arange(mel.shape[2], device=mel.device) < frames[:, None]
        mel = mel * inside[:, None]
        x = F.gelu(ears.conv1(mel)) * inside[:, None]
        x = F.gelu(ears.conv2(x)).transpose(1, 2)
        x = x + ears.positional_embedding.positional_embedding[: x.shape[1]].to(x.dtype)
        halved = (frames - 1) // 2 + 1
        width = x.shape[1]
        keep = torch.arange(width, device=x.device) < halved[:, None]
        ends = F.pad(halved.cumsum(0), (1, 0)).int()
        x = x[keep]
        for layer in ears.layers:
            x = self.audio_layer(x, layer, ends, width)
        pooled = (halved - 2) // 2 + 1
        step = torch.arange(width // 2 + 1, device=x.device)
        first = (ends[:-1, None].long() + 2 * step)[step < pooled[:, None]]
        x = (x[first] + x[first + 1]) / 2
        return ears.proj(ears.ln_post(x))

    def hidden(self, batch: dict[str, Tensor]) -> Tensor:
        """Last hidden state of every token, [tokens, hidden]."""
        text = self.text
        x = text.embed_tokens(batch["ids"].long())
        for name, tower, where in (("patch_places", self.see, "seen_at"), ("waves", self.hear, "heard_at")):
            if name in batch:
                x = x.index_copy(0, batch[where].long(), tower(batch).to(x.dtype))
        cos, sin = text_angles(batch["positions"], HEAD, ROPE["rope_theta"], ROPE["mrope_section"])
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        longest = int(batch["longest"])
        for layer in text.layers:
            x = self.text_layer(x, layer, cos, sin, batch["ends"], longest)
        return norm(x, text.norm.weight, 1e-6)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits [answers, vocabulary] and targets [answers] at the positions before answer tokens."""
        hidden = self.hidden(batch)
        targets = batch["labels"][1:].long()
        at = (targets >= 0).nonzero().squeeze(1)
        logits = F.linear(hidden[at], self.text.embed_tokens.weight)
        return logits, targets[at]
