"""The embedded model's recipe: seeded generators, arrays and logits equal to transformers', a folder in order."""

import json

import jsonschema
import numpy as np
import pytest
import torch

from examples.embedded_model import blueprint as bp
from examples.embedded_model import tool_requests, tool_tasks, tool_words
from examples.embedded_model.encode import TABLE, Encoder, pack, patches
from examples.embedded_model.evaluate import wilson
from examples.embedded_model.heldout import items, judge, samples
from examples.embedded_model.media import decode_film, decode_picture
from examples.embedded_model.model import Packed, log_mel
from examples.embedded_model.optim import Optimizer, orthogonal
from examples.embedded_model.phrases import PHRASES
from examples.embedded_model.reference import arguments, prompt
from examples.embedded_model.sample import Dice, Media, Sample, _words
from examples.embedded_model.spoken import utterances
from examples.embedded_model.teach_tools import as_sent
from examples.embedded_model.train import start_from
from server.output.parser_choice import TOOL_SIGNS, by_signs

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


@pytest.fixture(scope="module")
def extractor():
    return transformers.AutoFeatureExtractor.from_pretrained(bp.MODEL_DIR)


def test_same_seed_gives_the_same_items():
    first, second = (list(items(len(TABLE), seed=3)) for _ in range(2))
    assert [(i[0], i[2], i[3]) for i in first] == [(i[0], i[2], i[3]) for i in second]
    assert [json.dumps(i[1])[:600] for i in first] == [json.dumps(i[1])[:600] for i in second]
    assert [i[0] for i in first] == list(TABLE)


def test_other_seeds_give_other_items():
    text = tuple(t for t in TABLE if t.startswith("text_"))
    assert [i[2] for i in items(18, 1, tasks=text)] != [i[2] for i in items(18, 2, tasks=text)]


def test_held_out_phrasings_and_words_are_not_in_training():
    for name, (plain, held) in PHRASES.items():
        assert not set(plain) & set(held), name
        for number in range(60):  # rewording never produces a held-out phrasing
            assert Dice(number)._reworded(Dice(number).pick(plain), held) not in held
    assert not set(_words(False, 9, "reverse")) & set(_words(True, 9, "reverse"))


def test_messages_carry_base64_media_of_every_kind():
    kinds = set()
    for _, messages, expected, check in items(18, seed=5):
        assert messages[-1]["role"] == "user"
        assert expected
        assert check in ("exact", "cased", "json")
        content = messages[-1]["content"]
        kinds |= {"text"} if isinstance(content, str) else {part["type"] for part in content}
    assert kinds == {"text", "image_url", "input_audio", "video_url"}


def test_media_survive_their_files():
    picture = np.full((64, 80, 3), 200, np.uint8)
    assert decode_picture(picture).shape == picture.shape
    assert len(decode_film(np.stack([picture[:, :80]] * 6), 6.0)) == 6


def test_spoken_pack_holds_digits_and_every_command():
    said = [text for text, _ in utterances()]
    assert sum(text.isdigit() for text in said) == 40
    assert len(set(said)) >= 75
    assert all(len(wave) > 1600 and np.abs(wave).max() > 0.1 for _, wave in utterances())


@pytest.mark.parametrize("size", [(64, 64), (640, 480), (100, 1000), (1024, 1024), (301, 77)])
def test_patches_equal_the_image_processor(size):
    processor = transformers.AutoImageProcessor.from_pretrained(bp.MODEL_DIR, use_fast=False)
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    wanted = processor(images=[pixels], return_tensors="pt")
    data, grid = patches([pixels], bp.IMAGE_MIN_PIXELS, bp.IMAGE_MAX_PIXELS)
    assert list(grid) == wanted["image_grid_thw"][0].tolist()
    mine = data.reshape(len(data), 3, 1, -1) / 255.0
    mine = (mine - np.array(bp.IMAGE_MEAN)[:, None, None]) / np.array(bp.IMAGE_STD)[:, None, None]
    mine = np.broadcast_to(mine, (len(data), 3, 2, 196)).reshape(len(data), -1)
    assert np.abs(mine - wanted["pixel_values"].numpy()).max() < 1e-4


def test_log_mel_equals_whispers(extractor):
    wave = utterances()[0][1]
    wanted = extractor(wave, sampling_rate=16000, return_tensors="pt", return_attention_mask=True)
    frames = int(wanted["attention_mask"].sum())
    padded = torch.nn.functional.pad(torch.from_numpy(wave), (0, 800))[None]
    mine = log_mel(padded)[0, :, :frames]
    assert (mine - wanted["input_features"][0, :, :frames]).abs().max() < 1e-3


def _has_track(sample):
    return any(isinstance(p, Media) and p.sound for turn in sample.turns for p in turn.parts)


def test_positions_and_logits_equal_transformers(encoder, extractor):
    thinker = bp.build_model(seed=3).eval()
    chosen = [s for _, s, _ in samples(5, 4, tasks=("image_scene", "audio_digits", "video", "video_sound", "json"))]
    rows = [encoder.row(s) for s in chosen]
    batch = pack(rows)
    with torch.no_grad():
        logits = Packed(thinker).hidden(batch) @ thinker.lm_head.weight.T
        for n, (sample, row) in enumerate(zip(chosen, rows, strict=True)):
            given = arguments(row, extractor, _has_track(sample))
            mask = given.get("feature_attention_mask")
            positions, _ = thinker.model.get_rope_index(
                given["input_ids"],
                given.get("image_grid_thw"),
                given.get("video_grid_thw"),
                given["attention_mask"],
                _has_track(sample),
                mask.sum(1) if mask is not None else None,
                given.get("video_second_per_grid"),
            )
            assert np.array_equal(positions[:, 0].numpy(), np.concatenate(row.positions, 1))
            wanted = thinker(**given).logits[0]
            got = logits[batch["ends"][n] : batch["ends"][n + 1]]
            assert (got - wanted).norm() / wanted.norm() < 5e-3  # sounds are rounded to 16 bits before the encoder


def test_prompt_equals_the_chat_template(encoder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(bp.MODEL_DIR)
    for _, sample, _ in samples(60, 7, tasks=tuple(t for t in TABLE if t.startswith("text_"))):
        messages = [{"role": "system", "content": sample.system}] if sample.system else []
        for turn in sample.turns:
            messages += [
                {"role": "user", "content": "".join(turn.parts)},
                {"role": "assistant", "content": turn.answer},
            ]
        wanted = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        mine = encoder.row(sample).ids
        assert list(wanted[: len(mine)]) == mine


@pytest.mark.parametrize("text", ["Grüße, 世界! 🙂", "a\x00b\r\n\t  c", "12345 + 67890", "<|im_start|>"])
def test_any_text_can_be_encoded(encoder, text):
    ids = encoder.ids(text)
    assert max(ids) < bp.VOCAB_SIZE
    assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone(encoder):
    assert [encoder.tokenizer.decode([i]) for i in encoder.ids("9071")] == list("9071")


def test_folder_is_light_and_complete():
    names = {path.name for path in bp.MODEL_DIR.iterdir()}
    assert {"config.json", "generation_config.json", "preprocessor_config.json", "chat_template.jinja"} <= names
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors", "README.md"} <= names
    assert "video_preprocessor_config.json" in names
    assert sum(path.stat().st_size for path in bp.MODEL_DIR.iterdir()) <= 24_000_000


def test_optimizer_lowers_a_loss_in_both_precisions():
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(dtype)
        optimizer = Optimizer(net, decay=0.0)
        inputs, wanted = torch.randn(64, 8).to(dtype), torch.randn(64, 4).to(dtype)
        losses = []
        for _ in range(60):
            loss = torch.nn.functional.mse_loss(net(inputs).float(), wanted.float())
            loss.backward()
            optimizer.step(1e-2)
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]
        assert all(p.dtype == dtype for p in net.parameters())


def test_the_training_pass_gives_every_part_a_gradient(encoder):
    thinker = bp.build_model(seed=0)
    rows = [encoder.row(s) for _, s, _ in samples(2, 1, tasks=("audio_tones", "image_object"))]
    logits, targets = Packed(thinker)(pack(rows))
    torch.nn.functional.cross_entropy(logits, targets).backward()
    idle = [n for n, p in thinker.named_parameters() if p.grad is None and "bos_eos" not in n and "lm_head" not in n]
    assert not idle


def test_muon_updates_are_near_orthogonal():
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.7
    assert values.max() < 1.2


@pytest.mark.parametrize(
    ("got", "expected", "check", "right"),
    [
        ("a red circle", "A red circle.", "exact", True),
        ("-54", "54", "exact", False),
        ("hello", "HELLO", "cased", False),
        ('{"b": 2, "a": 1}', '{"a": 1, "b": 2}', "json", True),
        ('{"a": 1', '{"a": 1}', "json", False),
    ],
)
def test_judging(got, expected, check, right):
    assert judge(got, expected, check) is right


def test_wilson_interval():
    low, high = wilson(95, 100)
    assert low == pytest.approx(0.888, abs=2e-3)
    assert high == pytest.approx(0.978, abs=2e-3)


# -- tools


def test_tools_stand_in_the_prompt_as_the_template_writes_them(encoder):
    for _, sample, _ in samples(24, 5, tasks=("tool_call", "tool_answer")):
        sent = as_sent(sample)
        if not sent["tools"]:
            continue
        messages = [*sent["messages"][:-1], {**sent["messages"][-1]}]
        last = sample.turns[-1]
        if sample.turns[-1].task == "tool_answer":  # call and result, in the form that clients send
            call = json.loads(sample.turns[-2].answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            result = str(last.parts[0]).removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
            messages[-2:] = [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "content": result},
            ]
        text = encoder.tokenizer.decode(prompt(encoder, sample).ids, skip_special_tokens=False)
        shown = apply_chat_template_text(messages, sent["tools"])
        assert shown == text


def apply_chat_template_text(messages, tools) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(bp.MODEL_DIR)
    return tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=bp.CHAT_TEMPLATE, tokenize=False, add_generation_prompt=True
    )


def test_without_tools_both_templates_write_the_same():
    tokenizer = transformers.AutoTokenizer.from_pretrained(bp.MODEL_DIR)
    asked = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    messages = [{"role": "system", "content": "Be kind."}, asked]
    one, other = (
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
        for template in (bp.PLAIN_TEMPLATE, bp.CHAT_TEMPLATE)
    )
    assert one == other


def test_held_out_tools_are_never_thrown_in_training():
    for where, names in ((tool_words, ("VERBS", "KEYS")), (tool_tasks, ("ASKED", "KNOWN", "TOLD", "TOLD_TWICE"))):
        for name in names:
            assert not set(getattr(where, name)) & set(getattr(where, f"HELD_{name}"))
    tools = [[tool_tasks.tool(thrown(number, held)) for number in range(400)] for held in (False, True)]
    for part in (lambda tool: {tool.name}, lambda tool: {key for key, _ in tool.keys}):
        seen = [set().union(*map(part, side)) for side in tools]
        assert not seen[0] & (seen[1] | set(tool_words.HELD_KEYS))
    pairs = [{tool_tasks._pair(thrown(number, held), "size", 7) for number in range(2000)} for held in (False, True)]
    assert pairs[1] == {"given size 7", "let size be 7", "with size set to 7"}
    assert not pairs[0] & pairs[1]
    assert len(pairs[0]) > 200


def test_put_together_requests_have_no_frame_of_a_held_out_one():
    words = {"T": "{t}", "t": "{t}", "u": "{u}", "v": "{v}", "n": "{n}"}
    told = [question for _, questions in (*tool_tasks.HELD_TOLD, *tool_tasks.HELD_TOLD_TWICE) for question in questions]
    frames = {tool_requests.plain_frame(question.format(**words)) for question in told}
    frames = {frame.replace("{n} people", "{n} {u}").replace("{n} seats", "{n} {u}") for frame in frames}
    assert frames <= tool_requests.HELD_FRAMES
    asked = ("{c}.",)
    thrown_frames = {
        tool_requests.plain_frame(tool_requests.frame(thrown(number, False), number % 2 == 0, asked)[1])
        for number in range(4000)
    }
    assert len(thrown_frames) > 1000
    assert not thrown_frames & tool_requests.HELD_FRAMES


def test_a_training_call_fits_its_tool_and_copies_from_the_question():
    kinds = set()
    for number in range(400):
        dice = thrown(number, False)
        turn = tool_tasks.calls(dice)[-1]
        if turn.check != "call":
            continue
        call = json.loads(turn.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        tools = as_sent(Sample("", [turn], dice.tools))["tools"]
        named = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        jsonschema.validate(call["arguments"], named[call["name"]])
        asked = str(turn.parts[0]).lower()
        assert all(str(value).lower() in asked for value in call["arguments"].values())
        words = set(call["name"].lower().replace("_", "-").split("-"))
        assert not (tool_words.NEVER - set(tool_words.VERBS)) & words  # "start": a verb, and part of a held-out key
        kinds.add((len(tools), len(call["arguments"])))
    assert {tools for tools, _ in kinds} == {1, 2, 3, 4, 5}
    assert {arguments for _, arguments in kinds} == {0, 1, 2, 3}


def thrown(number: int, held: bool) -> Dice:
    dice = Dice(number, held)
    dice.task = "calls"
    return dice


def test_a_held_out_call_fits_its_tool_and_is_judged_as_one():
    calls = [(sample, sample.turns[-1]) for _, sample, _ in samples(60, 3, tasks=("tool_call",))]
    calls = [(sample, turn) for sample, turn in calls if turn.check == "call"]
    assert len(calls) > 40
    for sample, turn in calls:
        call = json.loads(turn.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in as_sent(sample)["tools"]}
        jsonschema.validate(call["arguments"], tools[call["name"]])
        asked = str(turn.parts[0])
        assert all(str(value).lower() in asked.lower() for value in call["arguments"].values())
        assert judge(turn.answer.replace(": ", ":"), turn.answer, "call")
        assert not judge(turn.answer.replace("<tool_call>", ""), turn.answer + "x", "call")


def test_the_parser_of_the_template_is_hermes():
    assert by_signs(bp.CHAT_TEMPLATE, TOOL_SIGNS) == "hermes"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_tool_calls_are_learned_from_the_shipped_weights(encoder):
    thinker = bp.build_model()
    optimizer = Optimizer(thinker, 0.05)
    start_from(bp.MODEL_DIR / "model.safetensors", optimizer)
    batch = pack([encoder.row(sample) for _, sample, _ in samples(6, 1, tasks=("tool_call", "tool_answer", "schema"))])
    losses = []
    for _ in range(8):
        logits, targets = Packed(thinker)(batch)
        loss = torch.nn.functional.cross_entropy(logits.float(), targets)
        loss.backward()
        optimizer.step(1e-3)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
