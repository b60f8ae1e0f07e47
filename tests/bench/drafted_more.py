"""The engines of gpu_drafts_more: shapes, drafts and measurements of each, and what one process does.

In: folders that `prepare` has written. Out: numbers by measure, in a file that grows with each of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import engine.step.parts.draft_model
import engine.weights.load
from engine import Engine, EngineConfig
from engine.base.grammar import Grammar, GrammarSpec
from engine.base.stats import DraftCounts
from engine.grammar.compile import compile_now
from engine.grammar.vocabulary import GrammarVocabulary
from engine.weights.dummy import STD
from server.flags.config import LimitsConfig
from server.render.load_tokenizer import load_tokenizer
from server.structure.structure import schema_text
from tests.bench.drafted_engines import CURVE, SET, Measure, Notes, Sizes, noted, one_measure, prompts_of, run, started
from tests.bench.gpu_offline import TINY_ENGINE
from tests.bench.gpu_rank_answers import LONGEST, SHORTEST, Answers, answer, differing
from tests.bench.loads import ORDERS
from tests.bench.shapes import SHAPES
from tests.bench.shapes_states import QWEN_27B, QWEN_35B_A3B, in_fp8

MTP_CURVE = (0.93, 0.80, 0.66)  # survivals of the drafts of MTP layers: 1.93, 2.73, 3.39 tokens a step
LIKELY = 1.8  # nats: the entropy of the next token for case 12, about six likely tokens
BLOCK = 50  # answers after which differences are noted
LANES_OF_GRAMMAR = 4  # as the server has for 16 choices
ANSWERS_FILE, RECORDING = "answers.json", "answers.jsonl"


class Lane(NamedTuple):
    """An engine, and what is measured on it."""

    case: str
    shape: str
    weights: str = ""  # a name in FORMS
    drafter: str = ""  # eagle3; "self": the target's own folder
    settings: dict[str, Any] = {}
    does: str = "streams"  # or grammar, acceptance, answers
    measures: tuple[Measure, ...] = ()
    base: str = ""  # the lane that this one is compared with
    rows: int = 64  # most rows of a step
    noise: float = 0.0  # of the draft model's weights, relative to the target's
    longest: float = 110.0  # seconds of the process


ONE, SOME, MANY = Measure("1 stream", 0, ""), Measure("16 streams", 1, ""), Measure("64 streams", 2, "")
ALL, FEW = (ONE, SOME, MANY), (ONE, SOME)
EVERY = {"enable_adaptive_verification": False}
HEAD = {"num_speculative_tokens": 3, **SET, "synthetic_acceptance_rates": list(CURVE)}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, **EVERY}
NEVER = {"method": "replay", "num_speculative_tokens": 3, "synthetic_acceptance_length": 1, **EVERY}
RIGHT = {"method": "replay", "num_speculative_tokens": 4, "synthetic_acceptance_length": 3.5, **EVERY}
VERIFIED = tuple(Measure(f"step of {1 + drafts} tokens", 0, "", drafts=drafts) for drafts in (3, 2, 1))


def mtp(drafts: int) -> dict[str, Any]:
    rates = list(MTP_CURVE[:drafts])
    return {"method": "mtp", "num_speculative_tokens": drafts, **SET, "synthetic_acceptance_rates": rates, **EVERY}


def alike(how: str) -> dict[str, Any]:
    return {"method": "draft_model", "num_speculative_tokens": 3, "draft_sample_method": how, **EVERY}


def headed(case: str, shape: str, weights: str = "") -> dict[str, Lane]:
    """A shape without drafts, and with EAGLE-3."""
    return {
        shape: Lane(case, shape, weights, measures=ALL),
        f"{shape} eagle3": Lane(case, shape, weights, "eagle3", HEAD, measures=ALL, base=shape),
    }


def with_mtp(case: str, shape: str) -> dict[str, Lane]:
    """A shape without drafts, its verify steps alone, and with 3, 2 and 1 drafts of its MTP layer."""
    found = {
        shape: Lane(case, shape, measures=FEW, rows=16),
        f"{shape} replay": Lane(case, shape, settings=NEVER, measures=VERIFIED, base=shape, rows=16),
    }
    return found | {
        f"{shape} mtp {drafts}": Lane(case, shape, settings=mtp(drafts), measures=FEW, base=shape, rows=16)
        for drafts in (3, 1, 2)
    }


def answering(case: str, shape: str, longest: float) -> dict[str, Lane]:
    """Answers without drafts, and with drafts that are verified."""
    base = f"{shape} answers"
    settings = {
        "": {}, " replay": RIGHT, " ngram": LOOKUP, " eagle3": {"num_speculative_tokens": 3, **EVERY},
    }  # fmt: skip
    return {
        base + name: Lane(
            case,
            shape,
            "",
            name.strip() if name == " eagle3" else "",
            each,
            "answers",
            (),
            name and base,
            4,
            longest=longest,
        )
        for name, each in settings.items()
    }


def under_schema() -> dict[str, Lane]:
    """Rows under a JSON Schema without drafts, with the drafts of a random head, and with n-grams."""
    shared: dict[str, Any] = {"does": "grammar", "measures": FEW, "rows": 16}
    base = "8b schema"
    return {
        base: Lane("11", "8b", **shared),
        f"{base} eagle3": Lane(
            "11", "8b", "", "eagle3", {"num_speculative_tokens": 3, **EVERY}, base=base, **shared
        ),
        f"{base} ngram": Lane("11", "8b", settings=LOOKUP, base=base, **shared),
    }  # fmt: skip


def accepted() -> dict[str, Lane]:
    """Draft models that resemble the target more or less, which draw with the row's noise or choose by argmax."""
    return {
        f"0.6b, noise {noise}, {how}": Lane(
            "12", "0.6b", "", "self", alike(how), "acceptance", (ONE,), rows=16, noise=noise
        )
        for noise in (0.05, 0.2)
        for how in ("probabilistic", "greedy")
    }


LANES = {
    **headed("9", "gpt-oss-20b"),
    **headed("10", "30b-a3b", "fp8"),
    **under_schema(),
    **accepted(),
    **answering("13", "0.6b", 200),
    **answering("13b", "8b", 420),
    **with_mtp("14", "qwen-35b-a3b-fp8"),
    **with_mtp("14b", "qwen-27b-fp8"),
}
SIZES = Sizes(rows=(1, 16, 64), runs=(3, 2, 2))
TINY = Sizes(24, 20, (1, 2, 3), (2, 2, 2), engine={**TINY_ENGINE, "max_model_len": 512})
SMALL = {  # of a shape for trying out
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "vocab_size": 2048, "eos_token_id": 1, "num_experts": 12, "num_local_experts": 8,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "torch_dtype": "float32",
}  # fmt: skip
OF_DECODER = (  # keys of a target that its EAGLE-3 head has too
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "torch_dtype", "hidden_act",
    "attention_bias", "tie_word_embeddings",
)  # fmt: skip
WITH_MTP = {"qwen-35b-a3b-fp8": QWEN_35B_A3B, "qwen-27b-fp8": QWEN_27B}
FLOATS_OF_MTP = ("mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate")


def config_of(shape: str, tiny: bool) -> dict[str, Any]:
    """The configuration of a shape, with an MTP layer if one is measured; `tiny`: few small layers of every kind."""
    config = WITH_MTP.get(shape, SHAPES[shape])
    if tiny:
        config = {**config, **{key: value for key, value in SMALL.items() if key in config}}
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: SMALL["num_hidden_layers"]]
    if shape in WITH_MTP:
        config = in_fp8({**config, "mtp_num_hidden_layers": 1})
        config["quantization_config"]["modules_to_not_convert"] += FLOATS_OF_MTP
    return config


def head_of(config: dict[str, Any]) -> dict[str, Any]:
    """The decoder of an EAGLE-3 head: one dense layer, six times as wide inside if the target's layers are experts."""
    found = {key: config[key] for key in OF_DECODER if key in config}
    sparse = "num_experts" in config or "num_local_experts" in config
    return {**found, "intermediate_size": 6 * config["hidden_size"]} if sparse else found


async def measured(name: str, folders: Path, args: argparse.Namespace, notes: Notes) -> None:
    """Starts the engine of a lane and measures it."""
    lane, sizes = LANES[name], TINY if args.tiny else SIZES
    folder = folders / f"{lane.shape} {lane.weights}".strip()
    speculative = dict(lane.settings)
    if lane.drafter:
        speculative["model"] = str(folder if lane.drafter == "self" else folders / f"{lane.shape} {lane.drafter}")
    if speculative.get("method") == "replay":
        speculative["replay_file"] = str(folders / (RECORDING if lane.does == "answers" else f"{lane.shape}.jsonl"))
    given = {"load_format": "dummy", "device": args.device, "enable_prefix_caching": False, "max_num_seqs": lane.rows}
    if args.tiny and lane.shape in WITH_MTP:
        given["block_size"] = 8  # so that states fill their blocks
    config = EngineConfig(str(folder), speculative=speculative, **{**given, **sizes.engine})

    async def body(own: Engine) -> None:
        if lane.does == "acceptance":
            await acceptance(own, sizes, notes)
        elif lane.does == "answers":
            await answers(own, lane, folders, args, notes)
        else:
            grammar = grammar_of(folder) if lane.does == "grammar" else None
            for measure in lane.measures:
                await one_measure(own, measure, sizes, notes, grammar)

    if lane.does == "acceptance":
        with resembling(lane.noise, config_of(lane.shape, args.tiny)):
            await started(config, notes, body)
    else:
        await started(config, notes, body)


def grammar_of(folder: Path) -> Grammar:
    """A schema that random weights cannot end early, with as many lanes as the server would make."""
    tokenizer = load_tokenizer(folder)
    vocabulary = GrammarVocabulary(tokenizer.token_bytes, tokenizer.is_special, tokenizer.vocab_size, tokenizer.encode)
    spec = GrammarSpec("schema", schema_text(ORDERS, "schema", LimitsConfig()))
    found = compile_now(spec, vocabulary)
    found.lanes.extend(compile_now(spec, vocabulary).lanes[0] for _ in range(LANES_OF_GRAMMAR - 1))
    return found


@contextmanager
def resembling(noise: float, config: dict[str, Any]) -> Iterator[None]:
    """Random weights whose next token is as open as a trained model's; the draft model's are the target's with noise.

    The logits of random weights are nearly equal. A larger last norm gives them the standard deviation at which the
    entropy of a normal distribution over the vocabulary is LIKELY. `noise`: of each matrix, relative.
    """
    entropy = math.log(config["vocab_size"])
    wanted = math.sqrt(2 * max(entropy - LIKELY, 1.0))
    factor = wanted / (STD * math.sqrt(config["hidden_size"]))
    draw, load, in_drafter = engine.weights.load.draw, engine.step.parts.draft_model.load_drafter, [False]

    def drawn(name: str, tensor: Tensor, seed: int) -> Tensor:
        draw(name, tensor, seed)
        if name == "norm.weight":
            tensor *= factor
        elif in_drafter[0] and tensor.dim() > 1:
            tensor += noise * draw(name, torch.empty_like(tensor), seed + 1)
            tensor /= math.sqrt(1 + noise**2)
        return tensor

    def loaded(*args: Any) -> None:
        in_drafter[0] = True
        load(*args)

    with (
        mock.patch.object(engine.weights.load, "draw", drawn),
        mock.patch.object(engine.step.parts.draft_model, "load_drafter", loaded),
    ):
        yield


async def acceptance(own: Engine, sizes: Sizes, notes: Notes) -> None:
    """How often drafts are right, by place and temperature."""
    prompts = prompts_of(sizes.rows[1], 0, sizes, own.limits.vocab_size)
    for temperature in (0.0, 0.7, 1.0):
        before = own.stats.drafts or DraftCounts()
        await run(own, prompts, sizes.answer, {"temperature": temperature})
        now = own.stats.drafts or DraftCounts()
        count = now.drafts - before.drafts
        earlier = (*before.accepted_per_place, 0, 0, 0)
        places = [right - then for right, then in zip(now.accepted_per_place, earlier)]
        tried = [count, *places]
        notes.add(f"temperature {temperature}", {
            "steps with drafts": count,
            "right of those tried, by place": [right / max(of, 1) for right, of in zip(places, tried)],
            "tokens a step": 1 + sum(places) / max(count, 1),
        })  # fmt: skip


async def answers(own: Engine, lane: Lane, folders: Path, args: argparse.Namespace, notes: Notes) -> None:
    """Greedy answers one at a time, without drafts also four at a time, and how many differ."""
    draw, vocab = np.random.default_rng(0), own.limits.vocab_size
    prompts = [
        draw.integers(2, vocab, draw.integers(SHORTEST, LONGEST), dtype=np.int32)
        for _ in range(args.answers or (200 if lane.shape == "0.6b" else 48))
    ]
    path = folders / ANSWERS_FILE
    if lane.base:
        base: Answers = json.loads(path.read_text())
        await compared(own, prompts, base, 1, "with drafts and without", args.tokens, notes)
        found = own.stats.drafts or DraftCounts()
        notes.add("drafts", {"steps": found.drafts, "tried": found.draft_tokens, "right": found.accepted_tokens})
        return
    base = []
    for prompt in prompts:
        base.append(await answer(own, prompt, args.tokens, asyncio.Semaphore()))
    path.write_text(json.dumps(base))
    lines = [
        {"prompt_token_ids": prompt.tolist(), "token_ids": tokens} for prompt, tokens in zip(prompts, base, strict=True)
    ]
    (folders / RECORDING).write_text("\n".join(map(json.dumps, lines)))
    await compared(own, prompts, base, lane.rows, f"between 1 and {lane.rows} rows", args.tokens, notes)
    await compared(own, prompts[: BLOCK // 2], base, 1, "when repeated", args.tokens, notes)


async def compared(
    own: Engine, prompts: Sequence[np.ndarray], base: Answers, rows: int, what: str, tokens: int, notes: Notes
) -> None:
    """Notes how many answers differ from the first ones, after every BLOCK; and how soon: places before a difference
    are equal, and one differs."""
    found, places = Answers(), asyncio.Semaphore(rows)
    for begin in range(0, len(prompts), BLOCK):
        some = prompts[begin : begin + BLOCK]
        found += await asyncio.gather(*(answer(own, prompt, tokens, places) for prompt in some))
        wanted = base[: len(found)]
        differ = differing(found, wanted)
        equal = sum(equal_tokens(one, other) for one, other in zip(found, wanted, strict=True))
        rate = 1000 * differ / max(equal, 1)
        notes.add(what, {"answers": len(found), "differ": differ, "first differences per 1,000 tokens": rate})


def equal_tokens(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def inside(name: str, folders: Path, args: argparse.Namespace, path: Path) -> int:
    """One engine; its numbers go to `path`."""
    return noted(path, lambda notes: asyncio.run(measured(name, folders, args, notes)))
