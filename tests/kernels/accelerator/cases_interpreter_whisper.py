"""Paged attention as Whisper uses it: each token is a row with one query; several rows share a line of a table."""

from dataclasses import replace

import torch
import triton  # noqa: F401  (must precede the import of any kernel file)

from engine.attention.meta import AttentionMeta
from engine.kernels.attention.paged import launch_paged, paged_attention_reference
from engine.kernels.attention.work import empty_list, launch_list, max_parts

LEAD, WINDOW, BLOCK = 64, 50, 16  # tokens reserved for audio, tokens of audio that are read, tokens per block


def test_tokens_see_the_window_or_the_text_before_them():
    draw = torch.Generator().manual_seed(0)
    heads, dim, lines = 2, 32, 3
    places = torch.tensor([64, 65, 66, 130, 10, 64])  # row 0: text of a prompt; row 1: a later token; row 2: audio
    line_of = torch.tensor([2, 2, 2, 0, 1, 1], dtype=torch.int32)
    tables = torch.randperm(lines * 9, generator=draw).view(lines, 9).to(torch.int32)
    keys, values = (torch.randn(lines * 9, heads, BLOCK, dim, generator=draw) for _ in range(2))
    q = torch.randn(len(places), heads, dim, generator=draw)
    text = AttentionMeta(
        query_start=torch.arange(len(places) + 1, dtype=torch.int32),
        context_len=(places - (LEAD - 1)).clamp(min=1).int(),
        block_tables=tables[:, LEAD // BLOCK :].contiguous(),
        slot_mapping=torch.zeros(len(places), dtype=torch.int64),
        table_row=line_of,
        decode_only=True,
    )
    sound = replace(text, context_len=torch.where(places < LEAD, 1, WINDOW).int(), block_tables=tables)
    for view in (text, sound):
        count = len(places)
        work = empty_list(count, count, max_parts(len(keys), BLOCK, count), heads, dim, "cpu")
        launch_list(work, view, 1, False)
        got = launch_paged(q, keys, values, replace(view, work=work), dim**-0.5, 0, 0.0, None)
        want = paged_attention_reference(q, keys, values, view, dim**-0.5).view_as(got)
        assert (got - want).abs().max() < 1e-5
