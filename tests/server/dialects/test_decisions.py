"""/v1/systemone, /v1/decisions and /v1/score of models that generate, against softmax of transformers' logits."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import openai
import pytest
import pytest_asyncio
import torch

from server.output.parser_choice import choose_parsers
from tests import pooling_kit, tiny, tiny_states
from tests.server.conftest import config_of, maker, quiet, ready, until
from tests.server.live import listening, picture, use_template

pytestmark = pytest.mark.asyncio(loop_scope="session")

STATE = "The parcel of order 88 is lost, and the customer asks for it again. "
CHOICE = {"type": "choice", "instructions": "What is it?", "criteria": {"parcel": "about a parcel", "bill": None}}
TRUTH = {"type": "noul", "instructions": "Is the customer angry?", "criteria": {"true": "angry", "false": "calm"}}
DEGREE = {"type": "score", "instructions": {"how": "urgent"}, "criteria": ["low", "middle", "high"]}
THREE = {"kind": CHOICE, "angry": TRUTH, "urgent": DEGREE}
SPELLED = ("y e", "ye s", "n o", "Y e", "Ye s", "N o")  # merges that make yes and no single tokens
LEVELS = [{"label": "a"}, {"label": "b"}]
PAIR = {"query": "Is it a cat? ", "items": ["A cat.", "A dog, no more."], "label_token_ids": [40, 41, 77]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose tokenizer has a token for each of yes, no, Yes and No."""
    made = tmp_path_factory.mktemp("decisions") / "qwen3"
    shutil.copytree(tiny.checkpoint("qwen3"), made)
    path = made / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    model = tokenizer["model"]
    model["vocab"] |= {pair.replace(" ", ""): first + at for at, pair in enumerate(SPELLED)}
    as_lists = isinstance(model["merges"][0], list)
    model["merges"] += [pair.split() if as_lists else pair for pair in SPELLED]
    path.write_text(json.dumps(tokenizer))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def deciding_state(folder):
    async with ready(config_of(model={"model": str(folder), "num_threads": 1})) as state:
        yield state


@pytest.fixture
def deciding(deciding_state):
    return maker(deciding_state)()


@pytest.fixture(scope="module")
def logits_of(folder):
    """A function: token ids -> float64 [vocab], the logits behind them by transformers."""
    model = tiny.reference(folder)

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1].double().numpy()

    return logits


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def shares(logits: np.ndarray, labels: list[list[int]]) -> list[float]:
    """The share of each option among all labels."""
    among = softmax(logits[[token for ids in labels for token in ids]])
    ends = np.cumsum([len(ids) for ids in labels])
    return [float(part.sum()) for part in np.split(among, ends[:-1])]


async def ask(client, questions=None, state=STATE, **fields):
    return await client.post("/v1/systemone", {"state": state, "questions": questions or THREE, **fields})


async def refused(client, questions=None, **fields):
    reply = await ask(client, questions, **fields)
    assert reply.status == 400, reply.content
    return reply.error


async def test_probabilities_are_the_softmax_of_transformers_logits(deciding, logits_of):
    reply = await ask(deciding, return_token_ids=True)
    assert reply.status == 200, reply.content
    answers, found = reply.json()["answers"], reply.json()["diagnostics"]
    wanted = {}
    for name, tokens in found.items():
        logits = logits_of(tokens["prompt_token_ids"])
        flat = [token for ids in tokens["label_token_ids"] for token in ids]
        wanted[name] = shares(logits, tokens["label_token_ids"])
        assert tokens["label_mass"] == pytest.approx(softmax(logits)[flat].sum(), abs=1e-4)
        assert tokens["argmax_is_label"] is (int(logits.argmax()) in flat)
    assert [len(ids) for ids in found["angry"]["label_token_ids"]] == [2, 2]
    assert answers["angry"] == {"type": "noul", "noul": pytest.approx(wanted["angry"][0], abs=1e-4)}
    one, other = wanted["kind"]
    assert answers["kind"]["probabilities"] == pytest.approx({"parcel": one, "bill": other}, abs=1e-4)
    assert answers["kind"]["choice"] == ("parcel" if one > other else "bill")
    assert answers["kind"]["confidence"] == pytest.approx(2 * max(one, other) - 1, abs=2e-4)
    low, middle, high = wanted["urgent"]
    assert answers["urgent"]["score"] == pytest.approx(middle + 2 * high, abs=1e-4)
    assert answers["urgent"]["probabilities"] == pytest.approx({"0": low, "1": middle, "2": high}, abs=1e-4)
    assert answers["urgent"]["confidence"] == pytest.approx((3 * max(wanted["urgent"]) - 1) / 2, abs=2e-4)
    assert answers["urgent"]["legend"] == {"0": "low", "1": "middle", "2": "high"}
    usage = reply.json()["usage"]
    assert usage == {"input_tokens": sum(len(one["prompt_token_ids"]) for one in found.values()), "output_tokens": 0}


async def test_openais_client_gets_the_same_probabilities(deciding):
    questions = [
        {"type": "choice", "name": "kind", "instructions": "What is it?",
         "choices": [{"value": "parcel", "description": "about a parcel"}, {"value": "bill"}]},
        {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is the customer angry?"}]},
        {"type": "score", "instructions": [{"type": "input_json", "data": {"how": "urgent"}}],
         "levels": [{"label": "low"}, {"label": "middle"}, {"label": "high"}]},
        {"type": "choice", "instructions": "Is it lost?", "choices": [{"value": True}, {"value": "true"}]},
    ]  # fmt: skip
    plain = {**THREE, "angry": {**TRUTH, "criteria": None}}
    wanted = (await ask(deciding, plain)).json()["answers"]
    async with listening(deciding) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        hints = {"prompt_cache_key": "a", "safety_identifier": "b", "prompt_cache_options": {"ttl": "30m"}}
        made = await api.decisions.create(model="gpt-6-luna", input=STATE, questions=questions, **hints)
    assert made.model == deciding.state.names[0]
    kind, angry, urgent, typed = made.answers
    assert (kind.type, kind.name, kind.choice) == ("choice", "kind", wanted["kind"]["choice"])
    assert {one.value: one.probability for one in kind.probabilities} == pytest.approx(wanted["kind"]["probabilities"])
    assert (angry.type, angry.name) == ("predicate", None)
    assert angry.probability == pytest.approx(wanted["angry"]["noul"])
    assert [(one.value, one.label) for one in urgent.probabilities] == [(0, "low"), (1, "middle"), (2, "high")]
    assert (urgent.score, urgent.confidence) == pytest.approx(
        (wanted["urgent"]["score"], wanted["urgent"]["confidence"])
    )
    assert [one.value for one in typed.probabilities] == [True, "true"]
    assert made.usage.total_tokens == made.usage.input_tokens > 0
    assert made.usage.output_tokens == made.usage.output_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("long", [True, False])
async def test_a_long_state_is_computed_once_by_each_salt(deciding, long):
    state = STATE * 3 if long else "A cat."
    questions = [
        {"type": "score", "instructions": f"{at}?", "levels": [{"label": "a"}, {"label": "b"}]} for at in "xyz"
    ]
    body = {"input": f"{long} {state}", "questions": questions, "cache_salt": "once", "return_token_ids": True}
    reply = (await deciding.post("/v1/decisions", body)).json()
    ids = [one["prompt_token_ids"] for one in reply["diagnostics"].values()]
    shared = next(at for at, three in enumerate(zip(*ids)) if len(set(three)) > 1)
    details = reply["usage"]["input_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == sum(map(len, ids))
    if long:
        assert details["cached_tokens"] >= 2 * (shared // 16) * 16 > 300
    else:
        assert details["cached_tokens"] == 0
    again = (await deciding.post("/v1/decisions", {**body, "cache_salt": "other"})).json()["usage"]
    assert again["input_tokens_details"] == details


async def test_a_recurrent_model_finds_the_state_at_its_end():
    model = {"model": str(tiny.checkpoint("qwen3_next")), "num_threads": 1}
    assert "qwen3_next" in tiny_states.CHECKPOINTS
    async with ready(config_of(model=model)) as state:
        client = maker(state)()
        questions = [{"type": "score", "instructions": f"{at}?", "levels": LEVELS} for at in "xyz"]
        body = {"input": STATE * 3, "questions": questions, "return_token_ids": True}
        reply = (await client.post("/v1/decisions", body)).json()
        ids = [one["prompt_token_ids"] for one in reply["diagnostics"].values()]
        shared = next(at for at, three in enumerate(zip(*ids)) if len(set(three)) > 1)
        unit = state.engine.block_size
        assert reply["usage"]["input_tokens_details"]["cached_tokens"] >= 2 * (shared // unit - 1) * unit > 0


def levels(count: int) -> dict:
    return {"type": "score", "instructions": "How?", "criteria": [str(at) for at in range(count)]}


def options(count: int) -> dict:
    return {"type": "choice", "instructions": "Which?", "criteria": {f"o{at}": None for at in range(count)}}


async def test_as_many_questions_and_options_as_allowed_are_answered(deciding):
    reply = await ask(deciding, {f"q{at}": levels(10) for at in range(64)}, state="A cat.")
    assert reply.status == 200
    assert len(reply.json()["answers"]) == 64
    questions = [{"type": "score", "instructions": "How?", "levels": LEVELS}] * 70
    reply = await deciding.post("/v1/decisions", {"input": "A cat.", "questions": questions})
    assert len(reply.json()["answers"]) == 70
    reply = await ask(deciding, {"all": options(52)}, state="A cat.")
    assert sum(reply.json()["answers"]["all"]["probabilities"].values()) == pytest.approx(1)
    assert len(reply.json()["answers"]["all"]["probabilities"]) == 52


@pytest.mark.parametrize(
    ("questions", "text"),
    [
        ({f"q{at}": levels(2) for at in range(65)}, "questions: got 65; 1 to 64"),
        ({"a": options(53)}, "got 53 options; 2 to 52"),
        ({"a": options(1)}, "got 1 options; 2 to 52"),
        ({"a": levels(11)}, "got 11 levels; 2 to 10"),
        ({"a": {**CHOICE, "weight": 1}}, "unknown key weight; known keys are type, instructions, criteria"),
        ({"a": {**TRUTH, "criteria": {"maybe": "x"}}}, "unknown key maybe; known keys are true, false"),
        ({"a": {**CHOICE, "type": "essay"}}, "got essay; must be one of noul, choice, score"),
        ({"a": {"type": "noul"}}, "questions.a.instructions: is missing"),
        ({"a": "why?"}, "questions.a: must be an object with type, instructions, criteria"),
        ({"a": {**CHOICE, "criteria": None}}, "must be an object of options"),
        ({"a": {**CHOICE, "criteria": {"b": 1, "c": None}}}, "questions.a.criteria.b: is missing, empty or of"),
        ({"a": {**DEGREE, "criteria": {"low": 1}}}, "must be a list of levels"),
        ({"a": {**DEGREE, "criteria": ["low", ""]}}, "questions.a.criteria[1]: is missing, empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_questions_are_refused_by_their_place(deciding, questions, text):
    error = await refused(deciding, questions)
    assert text in error["message"], error["message"]
    assert error["param"].startswith("questions")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"questions": []}, "questions: got 0; 1 to 400"),
        ({"questions": [{"type": "predicate", "instructions": "x"}] * 401}, "questions: got 401; 1 to 400"),
        ({"questions": [{"type": "predicate", "instructions": "x", "choices": []}]}, "unknown key choices"),
        ({"questions": [{"type": "predicate", "instructions": "x", "name": 1}]}, "questions[0].name: must be a text"),
        ({"questions": [{"type": "choice", "instructions": "x"}]}, "questions[0].choices: is missing"),
        (
            {"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}, {"value": "a"}]}]},
            "an option occurs twice",
        ),
        (
            {"questions": [{"type": "predicate", "instructions": [{"type": "input_json", "data": 1}]}]},
            "data: is missing",
        ),
        ({"questions": [{"type": "predicate", "instructions": [1]}]}, "instructions[0]: must be an object"),
        ({"input": []}, "input: is empty"),
        ({"input": [{"role": "nurse", "content": "a"}]}, "input[0].role: got 'nurse'"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]}, "input[0].content[0].data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_openais_body_cannot_hold_is_named(deciding, fields, text):
    body = {"input": "A cat.", "questions": [{"type": "predicate", "instructions": "x"}], **fields}
    reply = await deciding.post("/v1/decisions", body)
    assert reply.status == 400, reply.content
    assert text in reply.error["message"], reply.error["message"]


async def test_a_label_of_several_tokens_is_named(tiny_client):
    error = await refused(tiny_client, {"angry": TRUTH})
    assert "questions.angry: the label yes is not a single token" in error["message"]
    assert (await ask(tiny_client, {"kind": CHOICE})).status == 200


async def test_an_empty_state_and_a_state_beyond_the_context_are_refused(deciding):
    assert "state: is empty" in (await refused(deciding, state=""))["message"]
    error = await refused(deciding, state="long " * 200)
    assert (error["reason"], error["param"]) == ("context_length_exceeded", "state")


THINKING = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}@{% endif %}BEGIN{% endif -%}"
)


@pytest.mark.parametrize(
    ("parser", "begin", "ending"),
    [
        ("qwen3", "<think>\n", "<think>\n\n</think>\n\n"),
        ("qwen3", "<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("qwen3", "", "assistant\n"),
        ("deepseek_r1", "", "assistant\n<think>\n\n</think>\n\n"),
        ("mistral", "[THINK]", "[THINK]\n[/THINK]\n\n"),
        ("openai_gptoss", "", "assistant\n<|channel|>final<|message|>"),
    ],
)
async def test_reasoning_ends_before_the_label(deciding, parser, begin, ending):
    use_template(deciding, THINKING.replace("BEGIN", begin))
    state = deciding.state
    state.parsers = choose_parsers(state.tokenizer, [], "qwen3", reasoning=parser)
    reply = (await ask(deciding, {"kind": CHOICE}, return_token_ids=True)).json()
    text = state.tokenizer.decode(reply["diagnostics"]["kind"]["prompt_token_ids"])
    assert text.endswith(ending)
    assert "@" not in text


@pytest.mark.parametrize(
    ("parser", "begin", "text"),
    [
        ("minimax_m2_append_think", "", "its reasoning has no markers"),
        ("hy_v3", "<think", "is not a fixed text"),
        ("none", "<think>\n", "--reasoning-parser"),
    ],
)
async def test_a_model_that_must_think_first_is_501(deciding, parser, begin, text):
    use_template(deciding, THINKING.replace("BEGIN", begin))
    deciding.state.parsers = choose_parsers(deciding.state.tokenizer, [], "qwen3", reasoning=parser)
    reply = await ask(deciding, {"kind": CHOICE})
    assert reply.status == 501
    assert "must think before it answers" in reply.error["message"]
    assert text in reply.error["message"]


async def test_messages_calls_and_results_come_before_the_question(deciding):
    use_template(deciding)
    items = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_json", "data": {"order": 88}}]},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"id": 88}'},
        {"type": "function_call_output", "call_id": "c1", "output": "lost"},
    ]
    question = {"type": "choice", "instructions": "Lost?", "choices": [{"value": True}, {"value": False}]}
    body = {"input": items, "questions": [question], "return_token_ids": True}
    reply = (await deciding.post("/v1/decisions", body)).json()
    text = deciding.state.tokenizer.decode(reply["diagnostics"]["0"]["prompt_token_ids"])
    places = [text.index(each) for each in ('{"order":88}', "<call c1 find", "lost", "Question: Lost?", "A. true")]
    assert places == sorted(places)
    assert text.endswith("thinking=False")


async def test_pictures_of_the_input_and_of_a_question_are_visible(client, monkeypatch):
    red, blue = (
        {"type": "input_image", "image_url": f"data:image/png;base64,{picture(name)}"} for name in ("red", "blue")
    )
    level = {"type": "score", "levels": LEVELS}
    body = {
        "input": [{"role": "user", "content": [red, {"type": "input_text", "text": STATE * 2}]}],
        "questions": [
            {**level, "instructions": "Red?"},
            {**level, "instructions": "Blue?"},
            {**level, "instructions": [{"type": "input_text", "text": "Like this?"}, blue]},
        ],
        "return_token_ids": True,
    }
    load, loads = client.state.media.load, []

    async def counted(refs, **named):
        loads.append(len(refs))
        return await load(refs, **named)

    monkeypatch.setattr(client.state.media, "load", counted)
    reports = []
    monkeypatch.setattr(client.state.metrics, "media", lambda report: reports.append(report.items))
    reply = await client.post("/v1/decisions", body)
    assert reply.status == 200, reply.content
    assert loads == reports == [1, 2], "the input's picture is loaded and reported once for two questions"
    image = client.state.renderer.media.ids["image"]
    counts = [one["prompt_token_ids"].count(image) for one in reply.json()["diagnostics"].values()]
    assert counts[0] == counts[1] > 1
    assert counts[2] == 2 * counts[0]
    assert reply.json()["usage"]["input_tokens_details"]["cached_tokens"] > 2 * counts[0]


async def test_nothing_is_held_after_the_client_has_left(deciding):
    call = deciding.call("POST", "/v1/systemone", {"state": STATE * 5, "questions": THREE}).start()
    await until(lambda: deciding.state.places.taken)
    call.leave()
    await asyncio.wait([call.task])
    held = await quiet(deciding.state)
    assert not any(held.get(name) for name in ("streams", "routes"))
    assert deciding.state.places.taken == deciding.state.places.tokens == 0


async def test_priorities_count_where_the_policy_looks_at_them(deciding, deciding_state):
    assert "priority: got 3" in (await refused(deciding, priority=3))["message"]
    queued = maker(deciding_state)(scheduler={"scheduling_policy": "priority"})
    assert (await ask(queued, {"kind": CHOICE}, priority=3)).status == 200


async def test_any_model_name_is_taken(deciding):
    for name in ("jev-latest", None):
        assert (await ask(deciding, {"kind": CHOICE}, model=name)).json()["model"] == deciding.state.names[0]
    deciding.state.names = ("one", "two")
    assert (await ask(deciding, {"kind": CHOICE}, model="two")).json()["model"] == "two"


@asynccontextmanager
async def scoring(folder, mode):
    async with ready(config_of(model={"model": str(folder), "num_threads": 1, "logprobs_mode": mode})) as state:
        yield maker(state)(model={"logprobs_mode": mode})


async def test_a_server_that_reports_logits_gives_the_same_shares(deciding, folder):
    wanted = (await ask(deciding, {"kind": CHOICE})).json()["answers"]
    async with scoring(folder, "processed_logits") as client:
        reply = (await ask(client, {"kind": CHOICE}, return_token_ids=True)).json()
        assert reply["answers"]["kind"]["probabilities"] == pytest.approx(wanted["kind"]["probabilities"], abs=1e-5)
        assert reply["diagnostics"]["kind"]["label_mass"] is None
        assert "apply_softmax" in (await client.post("/score", PAIR)).error["message"]
        assert (await client.post("/score", {**PAIR, "apply_softmax": True})).status == 200


@pytest.mark.parametrize("item_first", [None, True])
@pytest.mark.parametrize("apply_softmax", [None, True])
async def test_scores_of_labels_are_those_of_transformers(deciding, logits_of, item_first, apply_softmax):
    encode, labels = deciding.state.tokenizer.encode, PAIR["label_token_ids"]
    joined = [item + PAIR["query"] if item_first else PAIR["query"] + item for item in PAIR["items"]]
    body = {**PAIR, "item_first": item_first, "apply_softmax": apply_softmax}
    reply = (await deciding.post("/v1/score", body)).json()
    for text, found in zip(joined, reply["scores"], strict=True):
        logits = logits_of(encode(text))
        wanted = softmax(logits[labels]) if apply_softmax else softmax(logits)[labels]
        assert found == pytest.approx(wanted, abs=1e-4)
    assert reply["usage"]["prompt_tokens"] == sum(len(encode(text)) for text in joined)
    ids = {**body, "query": encode(PAIR["query"]), "items": [encode(item) for item in PAIR["items"]]}
    apart = (await deciding.post("/v1/score", ids)).json()["scores"]
    if not item_first:  # the other way the texts join to other tokens
        assert np.allclose(apart, reply["scores"], atol=1e-5)
    alone = (await deciding.post("/score", {**ids, "items": ids["items"][0]})).json()["scores"]
    assert np.allclose(alone, apart[:1], atol=1e-5)


async def test_the_query_of_scores_is_computed_once(deciding):
    body = {**PAIR, "query": STATE * 3, "items": ["x", "y", "z"], "cache_salt": "scores"}
    usage = (await deciding.post("/v1/score", body)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 2 * (len(STATE) // 16 - 8) * 16
    first = {**body, "item_first": True, "cache_salt": "scores of items"}
    assert (await deciding.post("/v1/score", first)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"label_token_ids": None}, 501, "send query, items and label_token_ids"),
        ({"label_token_ids": []}, 400, "label_token_ids: is empty"),
        ({"label_token_ids": [5000]}, 400, "label_token_ids[0]: token id 5000 is out of range"),
        ({"label_token_ids": list(range(129))}, 400, "at most 128"),
        ({"query": None}, 400, "query: is missing"),
        ({"items": None}, 400, "items: is missing"),
        ({"items": []}, 400, "items: got 0; 1 to 1024"),
        ({"items": ["a", [1]]}, 400, "items: must be texts"),
        ({"query": [1], "items": ["a"]}, 400, "items: must be lists of token ids"),
        ({"query": [1], "items": [[2], [900]]}, 400, "items[1][1] is not a token id"),
        ({"text_1": "a"}, 400, "text_1: is for models that score pairs"),
        ({"model": "other"}, 404, "does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_scores_are_refused_by_name(deciding, fields, status, text):
    reply = await deciding.post("/v1/score", {**PAIR, **fields})
    assert reply.status == status, reply.content
    assert text in reply.error["message"], reply.error["message"]


@pytest.mark.parametrize("fields", [{"query": "a"}, {"label_token_ids": [1]}, {"item_first": True}, {"items": [[1]]}])
async def test_a_model_of_pairs_refuses_the_fields_of_the_other_kind(pooling, fields):
    client = await pooling(pooling_kit.encoder("bert", labels=1))
    reply = await client.post("/v1/score", {"queries": "a", "items": "b", **fields})
    assert reply.status == 400
    assert next(iter(fields)) in reply.error["message"]


async def test_without_a_prefix_cache_all_questions_go_at_once(deciding):
    engine = deciding.state.engine
    config, engine.config = engine.config, replace(engine.config, enable_prefix_caching=False)
    try:
        assert (await ask(deciding, state=STATE * 4, cache_salt="none")).status == 200
    finally:
        engine.config = config
