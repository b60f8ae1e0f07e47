"""--deterministic on a GPU with experts, quantised weights and a quantised cache: no bit depends on other requests.

Few layers of real widths, random weights, bfloat16. tests/invariance checks the same on tiny models in float32.
"""

import pytest
import torch

from tests.bench.shapes import few_layers, write_folder
from tests.engine.circumstances import drawn, same_in_every_circumstance
from tests.invariance.devices import Device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
CUDA = Device("cuda")
EXACT = {"load_format": "dummy", "dtype": "bfloat16", "deterministic": True}
# Six watched requests of up to 2,000 tokens with 250 others. A step takes 2,048 tokens, the cache has 2,000 blocks.
SIZES = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 2000, "max_model_len": 4096}
WATCHED, BESIDE = (6, (1400, 2000), 40), (250, (1, 120), 60)  # (requests, range of prompt tokens, answer tokens)
CASES = {  # shape and form of its weights -> settings
    "30b-a3b": {},
    "30b-a3b fp8-blocks": {},
    "gpt-oss-20b": {},
    "8b fp8": {},
    "8b fp8-blocks": {},
    "8b w4": {},
    "8b with an FP8 cache": {"kv_cache_dtype": "fp8"},
    "8b fp8 with an FP8 cache": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("case", CASES)
async def test_alone_in_company_chunked_cached_and_preempted(case, tmp_path):
    shape, *form = case.partition(" with ")[0].split()
    config = few_layers(shape)
    async with CUDA.running(write_folder(tmp_path, config, *form), **EXACT, **SIZES, **CASES[case]) as engine:
        watched = drawn(WATCHED[0], config["vocab_size"], *WATCHED[1:], seed=1, logprobs=2)
        await same_in_every_circumstance(engine, watched, drawn(BESIDE[0], config["vocab_size"], *BESIDE[1:], seed=2))
