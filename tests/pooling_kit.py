"""Checkpoints of pooling models, made from the tiny checkpoints, and what sentence-transformers computes with them.

Every folder is made once per test process. In: the name of a tiny checkpoint and its pooling modules. Out: a folder.
"""

from __future__ import annotations

import functools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.once import new_folder

TEXTS = ["the cat", "a dog and the bird", "x", "in an other land there are the birds " * 4, "", "Grüße, 東京!"]
ST = "sentence_transformers"
WITH_TYPES = ("bert", "nomic", "electra", "albert")  # the second text of a pair has another token type than the first
ENCODERS = {
    "bert": "Bert", "xlm_roberta": "XLMRoberta", "nomic": "NomicBert", "gte": "Gte", "distilbert": "DistilBert",
    "electra": "Electra", "mpnet": "MPNet", "albert": "Albert", "deberta": "DebertaV2",
    "deberta-v1": "Deberta",
}  # fmt: skip
DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
DEBERTA_V2 = {**DEBERTA, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
DEBERTAS = {"deberta": DEBERTA_V2, "deberta-v1": DEBERTA}
POSITIONED = ("xlm_roberta", "mpnet")  # the position table begins after the row of the padding token
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OF_DISTILBERT = dict(zip(SIZES, ("dim", "hidden_dim", "n_layers", "n_heads")))
PREFIX = {"query": "query: ", "document": "text: "}


MADE: set[Path] = set()  # folders of `embedder`


@functools.cache
def home() -> Path:
    return new_folder("pooling")


def embedder(
    body: str,
    pooling: str = "lasttoken",
    dense: int = 0,
    normalize: bool = True,
    prompts: bool = False,
    old: bool = True,
    include_prompt: bool = True,
) -> Path:
    """A model with modules.json: Pooling, optional Dense and Normalize; `old`: sentence-transformers 5's format."""
    folder = home() / f"{body}-{pooling}-{dense}-{normalize}-{prompts}-{old}-{include_prompt}"
    if folder in MADE:
        return folder
    shutil.copytree(encoder(body) if body in ENCODERS else tiny.checkpoint(body), folder)
    width = read(folder / "config.json")["hidden_size"]
    modules = [("", "models.Transformer"), ("1_Pooling", "models.Pooling")]
    if dense:
        modules.append(("2_Dense", "models.Dense"))
    if normalize:
        modules.append(("3_Normalize", "models.Normalize"))
    listed = [
        {"idx": k, "name": str(k), "path": path, "type": f"{ST}.{kind}"} for k, (path, kind) in enumerate(modules)
    ]
    write(folder / "modules.json", listed)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": False})
    kinds = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    flags: dict[str, Any] = {f"pooling_mode_{kind}": kind == pooling for kind in kinds}
    if not old:
        flags = {"pooling_mode": pooling.removesuffix("_tokens").removesuffix("_token")}
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": width, "include_prompt": include_prompt, **flags},
    )
    if dense:
        settings = {"in_features": width, "out_features": dense, "bias": True}
        write(
            folder / "2_Dense" / "config.json", {**settings, "activation_function": "torch.nn.modules.activation.Tanh"}
        )
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(dense, width, generator=generator) / width**0.5
        save_file(
            {"linear.weight": weight, "linear.bias": torch.ones(dense) / 4}, folder / "2_Dense" / "model.safetensors"
        )
    said = {"prompts": PREFIX, "default_prompt_name": "document"} if prompts else {"prompts": {}}
    write(folder / "config_sentence_transformers.json", {**said, "similarity_fn_name": "cosine"})
    MADE.add(folder)
    return folder


@functools.cache
def ended(folder: Path) -> Path:
    """The same checkpoint with a tokenizer that appends a token to each text, as Qwen3-Embedding's does."""
    copy = home() / f"{folder.name}-ended"
    shutil.copytree(folder, copy)
    name, number = "<|endoftext|>", tiny.IDS["<|endoftext|>"]
    tail = {"SpecialToken": {"id": name, "type_id": 0}}
    first, second = ({"Sequence": {"id": letter, "type_id": 0}} for letter in "AB")
    said = {"id": name, "ids": [number], "tokens": [name]}
    rule = {"single": [first, tail], "pair": [first, tail, second, tail], "special_tokens": {name: said}}
    tokenizer = read(copy / "tokenizer.json")
    write(copy / "tokenizer.json", {**tokenizer, "post_processor": {"type": "TemplateProcessing", **rule}})
    return copy


@functools.cache
def changed(folder: Path, name: str, **values: Any) -> Path:
    """The same checkpoint with other values in config.json."""
    copy = home() / name
    shutil.copytree(folder, copy)
    write(copy / "config.json", {**read(copy / "config.json"), **values})
    return copy


@functools.cache
def classifier(body: str, architecture: str, labels: int) -> Path:
    """A decoder with a `score` head on its last token."""
    folder = changed(
        tiny.checkpoint(body),
        f"{architecture}-{labels}",
        architectures=(architecture,),
        id2label=Names({str(k): f"kind {k}" for k in range(labels)}),
    )
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}
    width = read(folder / "config.json")["hidden_size"]
    tensors["score.weight"] = torch.randn(labels, width, generator=torch.Generator().manual_seed(2)) / width**0.5
    save_file(tensors, path, {"format": "pt"})
    return folder


class Names(dict):
    """A hashable dict of label names, so that functools can cache calls with it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@functools.cache
def body_of(folder: Path) -> Any:
    """Loads the folder's model without a head in transformers: a function of ids -> hidden states [tokens, width]."""
    from transformers import AutoModel

    with tiny.quiet():
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def hidden(ids: list[int], **named: Any) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids]), **named).last_hidden_state[0].numpy()

    return hidden


def hidden_of_t5(folder: Path) -> Any:
    """Like `body_of`, for the encoder of T5 alone."""
    from transformers import T5EncoderModel

    with tiny.quiet():
        model = T5EncoderModel.from_pretrained(folder, dtype=torch.float32).eval()

    def hidden(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).last_hidden_state[0].numpy()

    return hidden


def pooled(hidden: np.ndarray, kind: str) -> np.ndarray:
    """Pools the hidden states of one input as sentence-transformers does."""
    if kind in ("lasttoken", "cls_token"):
        return hidden[-1 if kind == "lasttoken" else 0]
    if kind == "max_tokens":
        return hidden.max(0)
    weights = np.arange(1, len(hidden) + 1)[:, None] if kind == "weightedmean_tokens" else np.ones((len(hidden), 1))
    total = weights.sum() ** (0.5 if kind == "mean_sqrt_len_tokens" else 1)
    return (hidden * weights).sum(0) / total


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


class Words(list):
    """A hashable list of token names, so that functools can cache calls with it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


def oracle(folder: Path) -> Any:
    """The folder loaded by sentence-transformers, float32 on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


def close(found: np.ndarray, wanted: np.ndarray, off: float = 1e-5) -> None:
    """POOLING section 6: cosine >= 1 - 1e-6 and no number off by more than `off`."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
    assert ((found * wanted).sum(-1) / lengths).min() >= 1 - 1e-6
    assert np.abs(found - wanted).max() <= off * max(1.0, np.abs(wanted).max())


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


@functools.cache
def encoder(kind: str, labels: int = 0, **more: Any) -> Path:
    """BERT or a similar family with random weights; `labels` adds a classifier with this number of classes."""
    import transformers

    name = ENCODERS[kind]
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}Config, which makes this checkpoint")
    renamed = OF_DISTILBERT if kind == "distilbert" else {}
    sizes = {renamed.get(key, key): size for key, size in zip(SIZES, (64, 96, 3, 4))}
    if kind in ("electra", "albert"):
        sizes["embedding_size"] = 32
    sizes |= DEBERTAS.get(kind, {})
    config = getattr(transformers, f"{name}Config")(
        vocab_size=tiny.VOCAB_SIZE, max_position_embeddings=130 if kind in POSITIONED else 128, pad_token_id=1,
        type_vocab_size=2 if kind in WITH_TYPES else int(kind not in DEBERTAS), **{**sizes, **more},
        **({"num_labels": labels} if labels else {}),
    )  # fmt: skip
    ending = "ForSequenceClassification" if labels else "Model"
    folder = home() / "-".join(map(str, (kind, labels, *more.values())))
    with tiny.quiet():  # the import of DeBERTa's file warns about torch.jit.script
        model = getattr(transformers, name + ending)
    tiny.save(tiny._model(model, config), folder)
    return framed(folder, kind)


@functools.cache
def t5(form: str) -> Path:
    """T5's encoder with random weights; its heads together are narrower than its hidden states."""
    import transformers

    config = transformers.T5Config(
        vocab_size=tiny.VOCAB_SIZE, d_model=64, d_kv=12, d_ff=96, num_layers=3, num_heads=4, feed_forward_proj=form,
        pad_token_id=1, n_positions=128, dropout_rate=0.0,
    )  # fmt: skip
    return framed(tiny.save(tiny._model(transformers.T5EncoderModel, config), home() / f"t5-{form}"), "roberta")


def framed(folder: Path, kind: str) -> Path:
    """Makes the folder's tokenizer add special tokens around texts and pairs, as BERT's or XLM-R's tokenizer does."""
    first, last = tiny.IDS["<|im_start|>"], tiny.IDS["<|im_end|>"]
    begin, end = ({"SpecialToken": {"id": token, "type_id": 0}} for token in ("<|im_start|>", "<|im_end|>"))
    one = {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": int(kind in WITH_TYPES)}}
    closed = {"SpecialToken": {"id": "<|im_end|>", "type_id": int(kind in WITH_TYPES)}}
    between = [end] if kind in WITH_TYPES else [end, end]
    known = {
        "<|im_start|>": {"id": "<|im_start|>", "ids": [first], "tokens": ["<|im_start|>"]},
        "<|im_end|>": {"id": "<|im_end|>", "ids": [last], "tokens": ["<|im_end|>"]},
    }
    rule = {"single": [begin, one, end], "pair": [begin, one, *between, other, closed], "special_tokens": known}
    tokenizer = read(folder / "tokenizer.json")
    write(folder / "tokenizer.json", {**tokenizer, "post_processor": {"type": "TemplateProcessing", **rule}})
    return folder


MODERN = {
    "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128, "local_attention": 8, "vocab_size": tiny.VOCAB_SIZE, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip


@functools.cache
def modernbert(labels: int = 0, **more: Any) -> Path:
    """ModernBERT with random weights and windows of four tokens to each side."""
    import transformers

    config = transformers.ModernBertConfig(**MODERN, **({"num_labels": labels} if labels else {}), **more)
    kind = transformers.ModernBertForSequenceClassification if labels else transformers.ModernBertModel
    folder = home() / "-".join(map(str, ("modernbert", labels, *more.values())))
    return framed(tiny.save(tiny._model(kind, config), folder), "xlm_roberta")


@functools.cache
def damped(folder: Path, factor: float) -> Path:
    """A copy of the encoder whose matrix products are scaled by `factor`; the embeddings are unchanged."""
    copy = home() / f"{folder.name}-{factor}"
    shutil.copytree(folder, copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    products = {name: factor * one for name, one in tensors.items() if one.dim() == 2 and "embed" not in name}
    save_file({**tensors, **products}, path, {"format": "pt"})
    return copy


@functools.cache
def seeing_all(body: str, **values: Any) -> Path:
    """A tiny decoder with bidirectional attention: Gemma 3 by its own config field, others by is_causal=False."""
    import transformers

    if body != "gemma3":
        return changed(embedder(body, "mean_tokens"), f"{body}-seeing-all-{len(values)}", is_causal=False, **values)
    config = transformers.Gemma3TextConfig(
        vocab_size=tiny.VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=20, query_pre_attn_scalar=24, sliding_window=10, max_position_embeddings=128,
        use_bidirectional_attention=True, layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=1,
        bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return tiny.save(tiny._model(transformers.Gemma3TextModel, config), home() / "embedding-gemma")


def hidden_seeing_all(folder: Path) -> Any:
    """Like `body_of`, with an explicit bidirectional mask: transformers would apply a causal mask to this decoder."""
    hidden = body_of(folder)
    return lambda ids: hidden(ids, attention_mask=torch.zeros(1, 1, len(ids), len(ids)))


@functools.cache
def of_tokens(kind: str) -> Path:
    """A random token classifier with four classes: an encoder's, or Llama with a layer called `score`."""
    import transformers

    if kind == "llama":
        folder = classifier("llama", "LlamaForTokenClassification", 4)
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, "score.bias": torch.arange(4) / 4}, folder / "model.safetensors", {"format": "pt"})
        return folder
    name = {"bert": "Bert", "xlm_roberta": "XLMRoberta", "modernbert": "ModernBert"}[kind]
    sizes: dict[str, Any] = {**MODERN, "type_vocab_size": 2}
    if kind != "modernbert":
        sizes["max_position_embeddings"] = 130
    config = getattr(transformers, f"{name}Config")(**sizes, num_labels=4)
    folder = home() / f"{kind}-of-tokens"
    tiny.save(tiny._model(getattr(transformers, f"{name}ForTokenClassification"), config), folder)
    return framed(folder, "bert" if kind == "bert" else "xlm_roberta")


@functools.cache
def rewarding(architecture: str, labels: int) -> Path:
    """Qwen 2 with a head of two layers, as Qwen2.5-Math's reward models have."""
    folder = changed(
        tiny.checkpoint("qwen2"),
        f"{architecture}-{labels}",
        architectures=(architecture,),
        num_labels=labels,
        id2label=None,
    )
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}
    width, drawn = read(folder / "config.json")["hidden_size"], torch.Generator().manual_seed(3)
    for name, rows in (("score.0", width), ("score.2", labels)):
        tensors[f"{name}.weight"] = torch.randn(rows, width, generator=drawn) / width**0.5
        tensors[f"{name}.bias"] = torch.randn(rows, generator=drawn)
    save_file(tensors, path, {"format": "pt"})
    return folder


@functools.cache
def bge_m3() -> Path:
    """XLM-R with BGE-M3's two additional heads in files of their own."""
    folder = home() / "bge-m3"
    shutil.copytree(encoder("xlm_roberta"), folder)
    drawn = torch.Generator().manual_seed(4)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 64)):
        layer = {"weight": torch.randn(rows, 64, generator=drawn) / 8, "bias": torch.randn(rows, generator=drawn) / 8}
        save_file(layer, folder / f"{name}.safetensors")
    return folder


@functools.cache
def pylate() -> Path:
    """A ColBERT as PyLate saves it: BERT, a Dense without a bias, marker tokens, and words that documents leave out."""
    folder = home() / "pylate"
    shutil.copytree(encoder("bert"), folder)
    kinds = (("", f"{ST}.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense"))
    write(folder / "modules.json", [{"idx": k, "path": path, "type": kind} for k, (path, kind) in enumerate(kinds)])
    settings = {"in_features": 64, "out_features": 24, "bias": False, "use_residual": False}
    write(folder / "1_Dense" / "config.json", {**settings, "activation_function": "torch.nn.modules.linear.Identity"})
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(5)) / 8
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    said = {"model_type": "ColBERT", "query_prefix": "<|vision_bos|>", "document_prefix": "<|vision_eos|>"}
    said |= {"skiplist_words": ["e", "a", "no token at all"], "do_query_expansion": False, "prompts": {}}
    write(folder / "config_sentence_transformers.json", said)
    return folder


@functools.cache
def colbert() -> Path:
    """The same ColBERT in its authors' layout: the projection is in BERT's file, and document punctuation is masked."""
    folder = home() / "colbert"
    shutil.copytree(encoder("bert"), folder)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    linear = load_file(pylate() / "1_Dense" / "model.safetensors")
    save_file({**tensors, **linear}, folder / "model.safetensors", {"format": "pt"})
    write(folder / "config.json", {**read(folder / "config.json"), "architectures": ["HF_ColBERT"]})
    markers = {"query_token_id": "<|vision_bos|>", "doc_token_id": "<|vision_eos|>"}
    write(folder / "artifact.metadata", {**markers, "dim": 24, "mask_punctuation": True, "query_maxlen": 32})
    return folder


@functools.cache
def of_messages() -> Path:
    """A sentence-transformers 6 embedder that renders texts as chat messages, and prompts as system messages."""
    folder = home() / "of-messages"
    shutil.copytree(embedder("qwen3", prompts=True), folder)
    way = {"method": "forward", "method_output_name": "last_hidden_state"}
    about = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    said = {"max_seq_length": 128, "processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    ways = {"text": way, "message": {**way, "format": "flat"}}
    write(folder / "sentence_bert_config.json", {**about, **said, "modality_config": ways})
    return folder


PAIR_TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'system' -%}<|im_start|>{{ m.content }}<|im_end|>{%- endif -%}"
    "{%- if m.role in ('query', 'document') -%}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}"
)


@functools.cache
def logit_score(template: str, opens: bool = False) -> Path:
    """A reranker of sentence-transformers 6: Qwen 3 with LogitScore; its chat template has the roles query and
    document.
    """
    folder = home() / f"logit-score-{len(template)}-{opens}"
    shutil.copytree(tiny.checkpoint("qwen3"), folder)
    kinds = (("", "base.modules.transformer.Transformer"), ("1_LogitScore", "cross_encoder.modules.LogitScore"))
    listed = [{"idx": k, "name": str(k), "path": path, "type": f"{ST}.{kind}"} for k, (path, kind) in enumerate(kinds)]
    write(folder / "modules.json", listed)
    write(folder / "1_LogitScore" / "config.json", {"true_token_id": 11, "false_token_id": 12})
    said = {"processing_kwargs": {"chat_template": {"add_generation_prompt": opens}}, "max_seq_length": 128}
    way = {"method": "forward", "method_output_name": "logits"}
    ways = {"text": way, "message": {**way, "format": "flat"}}
    about = {"transformer_task": "text-generation", "modality_config": ways, "module_output_name": "causal_logits"}
    write(folder / "sentence_bert_config.json", {**about, **said})
    write(
        folder / "config_sentence_transformers.json",
        {"model_type": "CrossEncoder", "prompts": {"web": "Find it"}, "default_prompt_name": "web"},
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder
