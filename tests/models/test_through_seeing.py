"""Vision models without a file here: transformers' tower, projector, decoder and processor in our steps."""

import asyncio
import copy
import functools
import hashlib
import importlib.util
import json
import shutil
import threading

import greenlet
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AyaVisionProcessor

from engine import Request, SamplingParams
from engine.base.errors import ConfigError
from engine.cache.layout import CacheLayout
from engine.models.registry import MODALITIES, build_model, load_model_config
from engine.models.transformers_backend.pausing import Run
from engine.quant.online import requested
from engine.step.parts.pieces import TowerRun
from engine.weights.load import load_weights, weight_bytes
from mm.errors import MediaError
from mm.item import MediaItem, MediaOptions
from mm.processors.registry import processor_for
from mm.splice import splice
from server import cli
from tests import tiny
from tests.engine.host_accelerator import HostAccelerator
from tests.engine_kit import answer, quiet
from tests.invariance.devices import Device
from tests.mm.made import noise
from tests.models.harness import Harness, generated
from tests.models.test_towers_shared import in_pieces
from tests.tiny_seeing import SQUARE
from tests.tiny_through import CHECKPOINTS

HEARS = "moss_transcribe_diarize"
JOINS = "idefics2"  # its processor joins pictures, and pictures and texts, by text of its own
NAMES = tuple(name for name in CHECKPOINTS if name not in (HEARS, JOINS))
WAYS = {"vipllava": "mixed", "lighton_ocr": "mixed"}  # their decoders have files here
TOKENS, CHUNK = 12, 11
PROMPTS = {
    "text": (),
    "picture": ((60, 90),),
    "three pictures": ((90, 60), (50, 50), (130, 70)),
}


@functools.cache
def load(name):
    config = load_model_config(tiny.checkpoint(name))
    assert (config.implementation, config.modalities) == (WAYS.get(name, "transformers"), ("text", "image"))
    model = build_model(config, torch.float32)
    load_weights(model, config.folder)
    return model


@functools.cache
def oracle(name):
    return tiny.reference(tiny.checkpoint(name))


@functools.cache
def processor(name):
    config = load_model_config(tiny.checkpoint(name))
    return processor_for(config.processor, config.folder, config.raw)


def pictures(prompt):
    return [noise(height, width, seed) for seed, (height, width) in enumerate(PROMPTS[prompt])]


@functools.cache
def spliced(name, prompt):
    reads, tokens, slots, processed = processor(name), [5, 9, 13], [], []
    for number, pixels in enumerate(pictures(prompt)):
        slots.append(len(tokens))
        tokens += [reads.placeholder("image"), 20 + number]
        digest = hashlib.blake2b(repr(pixels.shape).encode() + pixels.tobytes(), digest_size=16).digest()
        processed.append(reads.process(MediaItem("image", pixels), digest, MediaOptions()))
    return splice([*tokens, 7, 8], slots, processed, reads)


@torch.inference_mode()
def prepare(name, prompt, harness):
    made, media = spliced(name, prompt), []
    for item in made.media:
        rows = harness.model.towers["image"].encode({key: torch.tensor(value) for key, value in item.features.items()})
        assert len(rows) == item.num_tokens
        done = 0
        for start, length in item.spans:
            media.append((start, rows[done : done + length]))
            done += length
    positions = None if made.positions is None else torch.tensor(made.positions, dtype=torch.int64)
    return harness.add(made.prompt_token_ids.tolist(), positions=positions, delta=made.position_delta, media=media)


@functools.cache
def oracle_inputs(name, prompt):
    """The whole prompt in one call of transformers' processor, with the texts that we wrote between pictures."""
    theirs, ours = AutoProcessor.from_pretrained(tiny.checkpoint(name)), processor(name)
    images = [Image.fromarray(pixels) for pixels in pictures(prompt)]
    texts = [theirs.tokenizer.decode([20 + number]) for number in range(len(images))]
    text = "".join(ours.marks["image"] + text for text in texts)
    made = theirs(images=images or None, text=[text or "a"], add_special_tokens=False, return_tensors="pt")
    ids = [5, 9, 13, *(made.pop("input_ids")[0].tolist() if images else []), 7, 8]
    assert ids == spliced(name, prompt).prompt_token_ids.tolist()
    kept = {
        key: value for key, value in made.items() if key not in ("attention_mask", "mm_token_type_ids", "num_patches")
    }
    ids = torch.tensor([ids])
    if "mm_token_type_ids" in made and images:
        kept["mm_token_type_ids"] = (ids == ours.row_ids["image"]).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **(kept if images else {})}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_equal_transformers(name, prompt):
    """Logits are equal in one step, in chunks, and together with a row of text."""
    harness = Harness(load(name))
    want = oracle(name)(**oracle_inputs(name, prompt)).logits[0]
    assert (harness.prefill(prepare(name, prompt, harness)) - want).abs().max() <= 2e-4
    assert (harness.prefill(prepare(name, prompt, harness), 7) - want).abs().max() <= 2e-4


def request(name, prompt):
    made = spliced(name, prompt)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return Request(
        made.prompt_token_ids, sampling, media=made.media, positions=made.positions, position_delta=made.position_delta
    )


@functools.cache
def wanted(name, prompt):
    return generated(oracle(name), oracle_inputs(name, prompt), TOKENS)


async def check_busy(name):
    """Checks tokens in batches, in chunks, preempted and recomputed, and from the prefix cache."""
    want = {prompt: await asyncio.to_thread(wanted, name, prompt) for prompt in PROMPTS}
    longest = max(len(spliced(name, prompt).prompt_token_ids) for prompt in PROMPTS) + TOKENS
    one = CacheLayout(load(name).cache_specs(), 16).blocks_for(longest, CHUNK)  # blocks of a row
    few = {"max_prefill_chunk": CHUNK, "max_model_len": longest, "num_gpu_blocks_override": one + 1}
    async with Device("cpu").running(tiny.checkpoint(name), **few) as engine:
        for _ in range(2):
            sent = [answer(engine, request(name, prompt)) for prompt in want for _ in range(2)]
            got = [choices[0] for choices in await asyncio.gather(*sent)]
            assert got == [want[prompt] for prompt in want for _ in range(2)]
        assert engine.stats.preemptions > 0
        for _ in range(2):  # the second time from the prefix cache: no other request takes blocks
            before = engine.stats.prefix_hits
            assert (await answer(engine, request(name, "three pictures")))[0] == want["three pictures"]
        assert engine.stats.prefix_hits > before


async def test_a_picture_is_encoded_once():
    """Several requests with the same picture share its encoding."""
    name, encodes = "vipllava", 0

    def count(step):
        nonlocal encodes
        encodes += step.num_encodes

    async with Device("cpu").running(tiny.checkpoint(name)) as engine:
        engine.on_step = count
        sent = [answer(engine, request(name, prompt)) for prompt in PROMPTS for _ in range(3)]
        got = [choices[0] for choices in await asyncio.gather(*sent)]
    assert got == [wanted(name, prompt) for prompt in PROMPTS for _ in range(3)]
    assert encodes == len({item.hash for prompt in PROMPTS for item in request(name, prompt).media})


def tower_of(name):
    """The tower, a copy that has not tried runs of several pictures yet, and the features of all pictures."""
    tower = load(name).towers["image"]
    fresh = copy.copy(tower)
    fresh.keeps_apart = None
    shown = [item.features for prompt in PROMPTS for item in spliced(name, prompt).media]
    return tower, fresh, [{key: torch.tensor(value) for key, value in features.items()} for features in shown]


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_pictures_that_look_alike_share_a_run(name, monkeypatch):
    """A class that gets sizes with padded pixels joins pictures of any size; LightOnOCR's pixels are not padded."""
    tower, fresh, items = tower_of(name)
    runs, run = [], fresh._run
    monkeypatch.setattr(fresh, "_run", lambda **given: runs.append(len(given["pixel_values"])) or run(**given))
    alone = [tower.encode(features) for features in items]
    assert all(tower.weight(features) >= len(rows) for features, rows in zip(items, alone, strict=True))
    for turn in range(2):
        del runs[:]
        for rows, want in zip(fresh.encode_together(items), alone, strict=True):
            assert (rows - want).abs().max() <= 1e-4
        assert len(runs) == (
            4 if name == "lighton_ocr" else 1 if turn else 6
        )  # first time: four alone and one together as a trial, then the real run; later one run
    assert fresh.keeps_apart is (None if name == "lighton_ocr" else True)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_run_pauses_behind_each_layer_and_another_comes_between(name):
    tower, _, items = tower_of(name)
    in_pieces(tower, items, [tower.encode(features) for features in items])
    dropped = tower.pieces(items[:1])
    assert 0 < next(dropped) < tower.weight(items[0])
    dropped.close()
    pieces = TowerRun(tower, {**items[0], "pixel_values": items[0]["pixel_values"][..., :0]})
    with pytest.raises(Exception, match=r".+"):
        pieces.finish()
    assert not isinstance(greenlet.getcurrent(), Run)


async def test_rows_decode_between_the_pieces_of_a_tower():
    name, prompt = "aya_vision", "three pictures"
    steps = []
    async with Device("cpu").running(tiny.checkpoint(name), encoder_budget=8) as engine:
        engine.on_step = lambda stats: steps.append((stats.num_encodes, stats.num_rows))
        got = await asyncio.gather(*(answer(engine, request(name, each)) for each in ("text", prompt)))
    assert got == [[wanted(name, "text")], [wanted(name, prompt)]]
    assert sum(encodes > 0 and rows > 0 for encodes, rows in steps) > 3


def test_without_greenlet_the_refusal_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "greenlet" else find(name, *more)
    )
    with pytest.raises(
        ConfigError, match=r"AyaVision.* is not supported.*; transformers may serve it: run pip install 'transformers"
    ):
        load_model_config(tiny.checkpoint("aya_vision"))


@torch.inference_mode()
def test_a_tower_that_mixes_pictures_runs_them_alone(monkeypatch):
    tower, fresh, items = tower_of("vipllava")
    run = fresh._run
    alone = [tower.encode(features) for features in items]

    def mixing(**given):
        rows = run(**given).pooler_output
        return rows if len(rows) == 1 else [each + 0.01 * rows[0] for each in rows]

    def failing(**given):
        if len(given["pixel_values"]) > 1:
            raise ValueError("one at a time")
        return run(**given)

    for otherwise in (mixing, failing):
        monkeypatch.setattr(fresh, "_run", otherwise)
        fresh.keeps_apart = None
        assert all(map(torch.equal, fresh.encode_together(items), alone))
        assert fresh.keeps_apart is False


@pytest.mark.parametrize("name", ["vipllava", "paddleocr_vl"])
async def test_pictures_of_several_requests_share_a_run_of_the_tower(name):
    """Prompts that begin in one step share a run and get the tokens that each gets alone."""
    shown = [prompt for prompt in PROMPTS if PROMPTS[prompt]]
    async with Device("cpu").running(tiny.checkpoint(name), enable_prefix_caching=False) as engine:
        before, let_go = engine.stats.encoder.calls, threading.Event()
        held = asyncio.ensure_future(engine.on_device(lambda runtime: let_go.wait(60)))
        jobs = [asyncio.ensure_future(answer(engine, request(name, prompt))) for prompt in shown]
        await asyncio.sleep(0)  # all are submitted; the device thread finds them together
        let_go.set()
        got = [choices[0] for choices in await asyncio.gather(*jobs)]
        assert await held
        await quiet(engine)
        assert engine.stats.encoder.calls - before == 1
    assert got == [wanted(name, prompt) for prompt in shown]


@pytest.mark.parametrize("name", NAMES)
async def test_tokens_of_a_busy_engine_equal_transformers(name):
    await check_busy(name)


@pytest.mark.parametrize("name", ["aya_vision", "paddleocr_vl"])
async def test_so_do_tokens_of_an_accelerators_steps(name, monkeypatch):
    """Tokens are equal in an accelerator's padded steps and recorded graphs, on CPU tensors."""
    monkeypatch.setattr("engine.run.start.open_accelerator", lambda _device: HostAccelerator())
    await check_busy(name)


TEXT = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
GRANITE = {
    "text_config": {**TEXT, "model_type": "granite"}, "vision_config": {**SQUARE, "model_type": "siglip_vision_model"},
    "downsample_rate": "1/2", "deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [1, 1, 1, 1],
    "qformer_config": {"hidden_size": 72, "num_attention_heads": 2, "num_hidden_layers": 1, "encoder_hidden_size": 72},
}  # fmt: skip
REFUSED = {
    "Mllama": ("mllama", {}, "gives its decoder cross_attention_mask, cross_attention_states"),
    "Granite4Vision": ("granite4_vision", GRANITE, "deepstack"),
    "Ovis2": ("ovis2", {"text_config": TEXT}, r"more with a picture than .* \(visual_indicator_features\)"),
    "Molmo2": ("molmo2", {}, "reads image_num_crops of a prompt"),
    "Florence2": ("florence2", {}, "without its attention interface"),
    "Kosmos2": ("kosmos-2", {}, "gives its decoder .*image_embeds"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_more_than_rows_of_a_prompt_is_refused_in_a_line(tmp_path, kind):
    model_type, rest, said = REFUSED[kind]
    name = f"{kind}ForConditionalGeneration"
    config = {"architectures": [name], "model_type": model_type, "vision_config": {}, **rest}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"^{name}: .*{said}") as caught:
        load_model_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_picture_of_which_a_processor_makes_no_token_is_refused():
    with pytest.raises(MediaError, match="makes no token of the image of this size") as caught:
        processor("lighton_ocr").process(MediaItem("image", noise(20, 9, 1)), bytes(16), MediaOptions())
    assert caught.value.status == 400


@torch.inference_mode()
def test_a_decoder_of_ours_has_codes_where_it_is_asked_to():
    """Only the decoder is quantised; the tower has the file's weights."""
    config = requested(load_model_config(tiny.checkpoint("vipllava")), "fp8")
    model = build_model(config, torch.float32)
    load_weights(model, config.folder)
    harness = Harness(model)
    got, want = harness.prefill(prepare("vipllava", "picture", harness)), oracle("vipllava")
    want = want(**oracle_inputs("vipllava", "picture")).logits[0]
    assert 1e-3 < (got - want).norm() / want.norm() < 0.1
    assert weight_bytes(model) < weight_bytes(load("vipllava"))


def test_check_says_how_it_is_served(capsys):
    assert cli.main(["check", str(tiny.checkpoint("aya_vision"))]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said == ("served: through transformers (AyaVisionForConditionalGeneration); takes text, image")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"image_token": "no token"}, "has no single token for the place of the image (image_token='no token')"),
        ({"img_patch_token": "<|VIDEO|>"}, "writes no token 274 where image stands"),
    ],
)
def test_a_processor_that_writes_no_place_is_refused(tmp_path, capsys, words, said):
    folder = shutil.copytree(tiny.checkpoint("aya_vision"), tmp_path / "aya_vision")
    path = folder / "processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **words}))
    assert cli.main(["check", str(folder)]) == 1
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_a_processor_that_joins_pictures_is_refused(capsys):
    assert cli.main(["check", str(tiny.checkpoint(JOINS))]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == (
        "refused: Idefics2ForConditionalGeneration: its processor writes images of one prompt otherwise than each of "
        "them alone"
    )


def test_a_processor_that_numbers_pictures_is_refused(monkeypatch):
    def numbered(self, image_inputs, image_idx, **_):
        return f"{image_idx}{self.img_patch_token}"

    monkeypatch.setattr(AyaVisionProcessor, "replace_image_token", numbered)
    config = load_model_config(tiny.checkpoint("aya_vision"))
    with pytest.raises(ValueError, match="images of one prompt otherwise than each of them alone"):
        processor_for(config.processor, config.folder, config.raw)


@pytest.mark.parametrize(
    ("name", "without"), [("vipllava", ("image",)), ("vipllava", MODALITIES), ("paddleocr_vl", MODALITIES)]
)
@torch.inference_mode()
def test_without_pictures_no_tower_is_built(name, without):
    config = load_model_config(tiny.checkpoint(name), without=without)
    assert config.modalities == ("text",)
    model = build_model(config, torch.float32)
    load_weights(model, config.folder)
    assert weight_bytes(model) < weight_bytes(load(name))
    harness, whole = Harness(model), Harness(load(name))
    got, want = (each.prefill(prepare(name, "text", each)) for each in (harness, whole))
    assert (got - want).abs().max() <= 2e-4


@torch.inference_mode()
def test_a_family_of_ours_goes_that_way_when_it_is_asked_to():
    config = load_model_config(tiny.checkpoint("mistral3"), implementation="transformers")
    assert (config.implementation, config.modalities) == ("transformers", ("text", "image"))
