"""Audio towers on a real accelerator against the CPU's rows: exact in float32, roughly equal in bfloat16."""

import numpy as np
import pytest
import torch

from engine.device.accelerator import Accelerator
from engine.models.registry import build_model, load_model_config
from engine.weights.load import load_weights
from tests.models.harness import load
from tests.models.test_sounds import processed
from tests.tiny_sounds import SOUNDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
SAMPLES = (1500, 20000, 70001)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("family", SOUNDS, ids=lambda family: family.name)
@torch.inference_mode()
def test_rows_of_sounds_are_those_of_the_cpu(family, dtype, error):
    stream = torch.cuda.current_stream()
    accelerator = Accelerator("cuda:0")
    try:
        model = build_model(load_model_config(family.folder), dtype, "cuda:0")
        load_weights(model, str(family.folder))
        wanted = load(family.folder).towers["audio"]
        for count in SAMPLES:
            arrays = processed(family, count).parts[0].features
            features = {key: torch.from_numpy(np.asarray(array)) for key, array in arrays.items()}
            want = wanted.encode(features)
            got = model.towers["audio"].encode(features).float().cpu()
            assert got.shape == want.shape
            assert (got - want).norm() <= error * want.norm(), count
    finally:
        accelerator.close()
        torch.cuda.set_stream(stream)
