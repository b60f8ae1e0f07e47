"""jina-embeddings-v3 over HTTP in both layouts: transformers' numbers, with the adapter of each request's task.

The oracle's matrices have an adapter merged: W + alpha / rank * B A, and in a table of embeddings
W + alpha / rank * A B, as in
https://huggingface.co/jinaai/xlm-roberta-flash-implementation/blob/main/modeling_lora.py.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engine.run.start
from engine.base.errors import ConfigError
from engine.base.request import PoolingParams
from engine.models.registry import load_model_config
from tests import pooling_kit as kit
from tests import tiny
from tests.asked_vectors import DOCUMENTS, FEW, QUERY, ids_of, scores, vectors
from tests.engine.host_accelerator import HostAccelerator
from tests.engine.test_pooling_steps import answered, arrays, request
from tests.engine_kit import running

session = pytest.mark.asyncio(loop_scope="session")
TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
SHORT = [text for text in FEW if len(text) < 50]
SAID = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
    "separation": "", "classification": "", "text-matching": "",
}  # fmt: skip
LAYERS, HIDDEN, INNER, RANK, ALPHA = 3, 64, 96, 4, 1
LAYOUTS = ("released", "transformers")
NAMES = {  # released names -> transformers' names
    "emb_ln": "embeddings.LayerNorm", "encoder.layers": "layers", "mixer.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_layernorm", "norm2": "post_mlp_layernorm", "mixer.Wqkv": "self_attn.{}_proj",
}  # fmt: skip
Halves = dict[str, tuple[torch.Tensor, torch.Tensor]]


def renamed(name: str) -> str:
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def theirs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Released matrices by transformers' names."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "{}" in (new := renamed(name)):
            made |= {new.format(letter): part.clone() for letter, part in zip("qkv", tensor.chunk(3))}
        else:
            made[new] = tensor
    return made


@functools.cache
def drawn() -> tuple[dict[str, torch.Tensor], Halves]:
    """Matrices by their released names, and the adapters' halves of all tasks by module."""
    generator = torch.Generator().manual_seed(8)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tables = {"embeddings.word_embeddings": tiny.VOCAB_SIZE, "embeddings.token_type_embeddings": 1}
    tensors = {f"{name}.weight": draw(rows, HIDDEN) for name, rows in tables.items()}
    halves: Halves = {name: (draw(5, rows, RANK), draw(5, RANK, HIDDEN)) for name, rows in tables.items()}
    norms = ["emb_ln", *(f"encoder.layers.{k}.{name}" for k in range(LAYERS) for name in ("norm1", "norm2"))]
    for name in norms:
        tensors |= {f"{name}.weight": 1 + draw(HIDDEN) / 4, f"{name}.bias": draw(HIDDEN) / 4}
    sizes = {"mixer.Wqkv": (192, 64), "mixer.out_proj": (64, 64), "mlp.fc1": (INNER, 64), "mlp.fc2": (64, INNER)}
    for number in range(LAYERS):
        for name, (rows, columns) in sizes.items():
            module = f"encoder.layers.{number}.{name}"
            tensors |= {f"{module}.weight": draw(rows, columns) / columns**0.5, f"{module}.bias": draw(rows) / 2}
            halves[module] = draw(5, RANK, columns) / 4, draw(5, rows, RANK) / 4
    return tensors, halves


def merged(task: str | None) -> dict[str, torch.Tensor]:
    """transformers' matrices with a task's adapter merged into them."""
    tensors, halves = drawn()
    tensors = dict(tensors)
    for module, (a, b) in halves.items() if task else ():
        k = TASKS.index(str(task))
        delta = a[k] @ b[k] if module.startswith("embeddings.") else b[k] @ a[k]
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + ALPHA / RANK * delta
    return theirs(tensors)


@functools.cache
def oracle(task: str | None) -> Callable[[list[int]], np.ndarray]:
    """A function: token ids -> hidden states."""
    import transformers

    if not hasattr(transformers, "JinaEmbeddingsV3Model"):
        pytest.skip(f"transformers {transformers.__version__} has no JinaEmbeddingsV3Model, which is the oracle")
    config = transformers.JinaEmbeddingsV3Config(
        vocab_size=tiny.VOCAB_SIZE, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=4, max_position_embeddings=300,
    )  # fmt: skip
    model = transformers.JinaEmbeddingsV3Model(config, add_pooling_layer=False).eval()
    model.load_state_dict(merged(task))

    def hidden(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).last_hidden_state[0].numpy()

    return hidden


@functools.cache
def checkpoint(layout: str) -> Path:
    tensors, halves = drawn()
    folder = kit.home() / f"jina-embeddings-v3-{layout}"
    shutil.copytree(kit.embedder("xlm_roberta", "mean_tokens"), folder)
    about: dict[str, Any] = {
        "hidden_act": "gelu", "hidden_size": HIDDEN, "intermediate_size": INNER, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 300, "num_attention_heads": 4, "num_hidden_layers": LAYERS, "pad_token_id": 1,
        "type_vocab_size": 1, "vocab_size": tiny.VOCAB_SIZE,
    }  # fmt: skip
    if layout == "released":
        code = "jinaai/xlm-roberta-flash-implementation--"
        about |= {
            "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
            "rotary_emb_base": 20000.0, "lora_adaptations": list(TASKS), "lora_rank": RANK, "lora_alpha": ALPHA,
            "task_instructions": SAID, "matryoshka_dimensions": [16, 32, 64], "emb_pooler": None,
            "auto_map": {"AutoModel": code + "modeling_lora.XLMRobertaLoRA"},
        }  # fmt: skip
        made = {}
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            below = ".parametrizations.weight." if kind == "weight" and module in halves else ""
            made[f"roberta.{module}{below or '.' + kind}{below and 'original'}"] = tensor
        for module, (a, b) in halves.items():
            below = f"roberta.{module}.parametrizations.weight.0."
            made |= {f"{below}lora_A": a, f"{below}lora_B": b}
        types = ["custom_st.Transformer", f"{kit.ST}.models.Pooling", f"{kit.ST}.models.Normalize"]
        paths = ("", "1_Pooling", "2_Normalize")
        listed = [
            {"idx": k, "name": str(k), "path": path, "type": kind} for k, (path, kind) in enumerate(zip(paths, types))
        ]
        kit.write(folder / "modules.json", listed)
    else:
        (folder / "modules.json").unlink()  # without this file the server pools by the mean
        about |= {
            "architectures": ["JinaEmbeddingsV3Model"], "model_type": "jina_embeddings_v3",
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        }  # fmt: skip
        made = theirs(tensors)
        for k, task in enumerate(TASKS):
            write_adapter(folder / task.replace("-", "_").replace(".", "_"), k, halves)
    kit.save_file(
        {name: one.contiguous() for name, one in made.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    kit.write(folder / "config.json", about)
    return folder


def write_adapter(folder: Path, k: int, halves: Halves) -> None:
    """Writes one task's adapter as PEFT saves it; queries, keys and values share their A half."""
    found: dict[str, torch.Tensor] = {}
    for module, (a, b) in halves.items():
        name = f"base_model.model.{renamed(module)}"
        if module.startswith("embeddings."):
            found |= {f"{name}.lora_embedding_A": a[k].T, f"{name}.lora_embedding_B": b[k].T}
        elif "{}" in name:
            for letter, part in zip("qkv", b[k].chunk(3)):
                one = name.format(letter)
                found |= {f"{one}.lora_A.weight": a[k], f"{one}.lora_B.weight": part}
        else:
            found |= {f"{name}.lora_A.weight": a[k], f"{name}.lora_B.weight": b[k]}
    modules = ["word_embeddings", "token_type_embeddings", "q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    kit.write(folder / "adapter_config.json", said)
    kit.save_file(
        {name: one.clone(memory_format=torch.contiguous_format) for name, one in found.items()},
        folder / "adapter_model.safetensors",
    )


def mean(task: str | None, ids: list[int]) -> np.ndarray:
    return kit.unit(oracle(task)(ids).mean(0))


@session
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_each_task_has_its_adapter_and_its_instruction(pooling, layout):
    client = await pooling(checkpoint(layout))
    plain = [mean(None, ids) for ids in await ids_of(client, SHORT)]
    kit.close(await vectors(client, SHORT), plain)
    for task in TASKS:
        wanted = [mean(task, ids) for ids in await ids_of(client, [SAID[task] + text for text in SHORT])]
        assert np.abs(np.array(wanted) - plain).max() > 0.05
        kit.close(await vectors(client, SHORT, task=task), wanted)
        kit.close(await vectors(client, SHORT, prompt_name=task), wanted)
    queries = await vectors(client, SHORT, task="retrieval.query")
    np.testing.assert_array_equal(await vectors(client, SHORT, input_type="search_query"), queries)
    ids = await ids_of(client, SHORT)
    kit.close(await vectors(client, ids, task="separation"), [mean("separation", one) for one in ids])


@session
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_dimensions_tokens_and_what_is_refused(pooling, layout):
    client = await pooling(checkpoint(layout))
    whole = await vectors(client, SHORT, task="text-matching", use_activation=False)
    kit.close(await vectors(client, SHORT, task="text-matching", dimensions=16), kit.unit(whole[:, :16]))
    body = {"input": SHORT, "task": "token_embed", "prompt_name": "classification"}
    data = (await client.post("/pooling", body)).json()["data"]
    for entry, ids in zip(data, await ids_of(client, SHORT)):
        kit.close(entry["data"], kit.unit(oracle("classification")(ids)))
    for word in ("translation", "clustering"):  # other models accept these as one of Cohere's words
        answer = await client.post("/v1/embeddings", {"input": "x", "task": word})
        assert answer.status == 400
        assert all(task in answer.json()["error"]["message"] for task in TASKS)


@session
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_scores_are_of_queries_and_of_passages(pooling, layout):
    client = await pooling(checkpoint(layout))
    (query,) = await ids_of(client, [SAID["retrieval.query"] + QUERY])
    passages = await ids_of(client, [SAID["retrieval.passage"] + text for text in DOCUMENTS])
    wanted = [float(mean("retrieval.query", query) @ mean("retrieval.passage", ids)) for ids in passages]
    np.testing.assert_allclose(await scores(client, queries=QUERY, documents=DOCUMENTS), wanted, atol=1e-5)


@session
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_tasks_in_one_step_alone_as_in_a_crowd_and_as_on_the_device_path(layout, monkeypatch):
    """Inputs of five tasks or none; pooled by the mean, or by the first token, which alone passes the last layer."""
    draw = np.random.default_rng(0)
    inputs = [draw.integers(2, 260, draw.integers(1, 129)).astype(np.int32) for _ in range(60)]
    numbers = draw.integers(0, 6, 60).astype(np.int32)
    few = {"max_num_seqs": 8, "max_num_queued_reqs": 64, "max_num_batched_tokens": 192, "num_gpu_blocks_override": 0}

    def asked(places: list[int]) -> Any:
        plain = request([inputs[at] for at in places])
        return replace(plain, pooling=PoolingParams(plain.pooling.starts, adapters=numbers[places]))

    for pooler in ({}, {"pooling_type": "CLS"}):
        async with running(checkpoint(layout), pooler=pooler, **few) as served:
            together = await answered(served, asked(list(range(60))))
            for at in (0, 7, 59):
                np.testing.assert_array_equal((await answered(served, asked([at])))[0], together[at])
            without = await arrays(served, inputs)
        for at in range(60):
            hidden = oracle((None, *TASKS)[numbers[at]])(inputs[at].tolist())
            kit.close(kit.unit(together[at]), kit.unit(hidden[0] if pooler else hidden.mean(0)))
            assert np.array_equal(without[at], together[at]) == (numbers[at] == 0)
        with monkeypatch.context() as patch:
            patch.setattr(engine.run.start, "open_accelerator", lambda _device: HostAccelerator())
            for settings in ({}, {"enforce_eager": True}):
                async with running(checkpoint(layout), pooler=pooler, **few, **settings) as served:
                    for one, other in zip(await answered(served, asked(list(range(60)))), together):
                        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


def test_what_the_files_must_say():
    found = load_model_config(checkpoint("released"))
    assert (found.pooling.adapters, found.max_position, found.pooling.kind) == (TASKS, 300, "mean")
    assert load_model_config(checkpoint("transformers")).pooling.adapters == TASKS
    with pytest.raises(ConfigError, match="task_instructions must be an object with a text for each"):
        load_model_config(checkpoint("released"), {"lora_adaptations": ["separation", "clustering"]})


@session
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_missing_adapter_is_named(layout):
    folder = kit.home() / f"jina-embeddings-v3-{layout}-lacking"
    shutil.copytree(checkpoint(layout), folder)
    file = folder / ("model.safetensors" if layout == "released" else "separation/adapter_model.safetensors")
    tensors = kit.load_file(file)
    gone = next(name for name in tensors if "layers.1" in name and "lora_B" in name and "fc2" in name)
    del tensors[gone]
    kit.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 missing: .*layers\.1\.mlp\.fc2\.lora_B"):
        async with running(folder):
            pass


@session
async def test_transformers_files_without_adapters_make_vectors(pooling):
    folder = kit.home() / "jina-embeddings-v3-bare"
    shutil.copytree(checkpoint("transformers"), folder, ignore=lambda _, names: [n for n in names if "adapter" in n])
    client = await pooling(folder)
    kit.close(await vectors(client, SHORT), [mean(None, ids) for ids in await ids_of(client, SHORT)])


@session
async def test_rerankers_have_a_table_of_positions(pooling):
    """jina-reranker-v2 has the same names, XLM-R's table of positions, and no adapters."""
    folder = kit.encoder("xlm_roberta", 1)
    made: dict[str, torch.Tensor] = {}
    tensors = kit.load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        for old, new in (
            ("embeddings.LayerNorm", "emb_ln"), ("encoder.layer.", "encoder.layers."),
            ("attention.output.dense", "mixer.out_proj"), ("attention.output.LayerNorm", "norm1"),
            ("intermediate.dense", "mlp.fc1"), ("output.dense", "mlp.fc2"), ("output.LayerNorm", "norm2"),
        ):  # fmt: skip
            name = name.replace(old, new)
        if ".self.query." in name:
            named = name.replace("layers.", "layer.")
            parts = [tensors[named.replace("query", one)] for one in ("query", "key", "value")]
            made[name.replace("attention.self.query", "mixer.Wqkv")] = torch.cat(parts)
        elif ".attention.self." not in name:
            made[name] = tensor
    code = "jinaai/jina-reranker-v2-base-multilingual--configuration_xlm_roberta.XLMRobertaFlashConfig"
    flash = kit.changed(folder, "jina-reranker-v2", position_embedding_type="absolute")
    kit.write(flash / "config.json", {**kit.read(flash / "config.json"), "auto_map": {"AutoConfig": code}})
    kit.save_file(made, flash / "model.safetensors", {"format": "pt"})
    asked = {"text_1": QUERY, "text_2": DOCUMENTS}
    wanted = await scores(await pooling(folder), **asked)
    np.testing.assert_allclose(await scores(await pooling(flash), **asked), wanted, atol=1e-6)
