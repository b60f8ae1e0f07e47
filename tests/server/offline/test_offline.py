"""LLM without HTTP: the answers of the routes, in a script, in a running loop, as a context manager."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from engine.base.errors import ConfigError
from server.app import make_app
from server.flags.command_line import UsageError
from server.offline import LLM, SamplingParams
from server.offline import llm as module
from tests import pooling_kit as kit
from tests import tiny
from tests.end_to_end.process import ROOT
from tests.server.asgi import Client

FLAGS = {"num_threads": 1, "max_num_seqs": 8, "num_gpu_blocks_override": 512, "pool_threads": 2}
PROMPTS = ["the cat and", "a dog", "the bird in the land", "x"]
GREEDY = {"temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(tiny.checkpoint("qwen3")), **FLAGS) as made:
        yield made


def over_http(llm, path, body):
    """The JSON of a route of the same app, asked on its loop."""

    async def post():
        reply = await Client(make_app(llm.state)).post(path, body)
        assert reply.status == 200, reply.content
        return reply.json()

    return llm.background.run(post())


def test_texts_and_ids_are_continued_as_by_completions(llm):
    wanted = over_http(llm, "/v1/completions", {"prompt": PROMPTS, **GREEDY, "return_token_ids": True})["choices"]
    found = llm.generate(PROMPTS, SamplingParams(**GREEDY))
    assert [one.prompt for one in found] == PROMPTS
    for one, other in zip(found, wanted, strict=True):
        (output,) = one.outputs
        assert (output.text, output.finish_reason) == (other["text"], other["finish_reason"])
        assert (output.token_ids, one.prompt_token_ids) == (other["token_ids"], other["prompt_token_ids"])
    ids = [{"prompt_token_ids": one.prompt_token_ids} for one in found]
    assert [one.outputs for one in llm.generate(ids, SamplingParams(**GREEDY))] == [one.outputs for one in found]
    assert llm.generate(found[0].prompt_token_ids, SamplingParams(**GREEDY))[0].outputs == found[0].outputs
    assert llm.generate({"prompt": PROMPTS[1]}, SamplingParams(**GREEDY))[0].outputs == found[1].outputs


def test_sampled_answers_and_log_probabilities_are_those_of_http(llm):
    fields = {"temperature": 0.8, "seed": 7, "n": 2, "max_tokens": 6, "logit_bias": {"40": 2.0}, "top_p": 0.9}
    body = {"prompt": PROMPTS[0], **fields, "logprobs": 2, "return_tokens_as_token_ids": True, "prompt_logprobs": 1}
    wanted = over_http(llm, "/v1/completions", body)["choices"]
    params = SamplingParams(**{**fields, "logit_bias": {40: 2.0}}, logprobs=2, prompt_logprobs=1)
    (found,) = llm.generate(PROMPTS[0], params)
    for one, other in zip(found.outputs, wanted, strict=True):
        assert one.text == other["text"]
        own = [place[token].logprob for place, token in zip(one.logprobs, one.token_ids)]
        assert own == pytest.approx(other["logprobs"]["token_logprobs"])
        assert one.cumulative_logprob == pytest.approx(sum(own))
        for place, top in zip(one.logprobs, other["logprobs"]["top_logprobs"]):
            named = {f"token_id:{token}": value.logprob for token, value in place.items()}
            assert named == pytest.approx(top)
            assert min(value.rank for value in place.values()) == 1
    assert found.prompt_logprobs[0] is None
    assert len(found.prompt_logprobs) == len(found.prompt_token_ids)


def test_conversations_are_answered_as_by_chat(llm):
    talks = [[{"role": "user", "content": text}] for text in PROMPTS]
    wanted = [over_http(llm, "/v1/chat/completions", {"messages": talk, **GREEDY}) for talk in talks]
    texts = [one["choices"][0]["message"]["content"] for one in wanted]
    assert [one.outputs[0].text for one in llm.chat(talks, SamplingParams(**GREEDY))] == texts
    (one,) = llm.chat(talks[0], SamplingParams(**GREEDY))
    assert one.outputs[0].text == texts[0]
    assert one.prompt.endswith("assistant\n")
    left_open = {"add_generation_prompt": False, "continue_final_message": True}
    opened = llm.chat([*talks[0], {"role": "assistant", "content": "so"}], SamplingParams(**GREEDY), **left_open)
    assert opened[0].prompt.endswith("so")


def test_each_prompt_may_have_its_own_parameters(llm):
    short, stopped = SamplingParams(**{**GREEDY, "max_tokens": 2}), SamplingParams(**GREEDY, stop=["zzz"])
    found = llm.generate(PROMPTS[:2], [short, stopped])
    assert [len(one.outputs[0].token_ids) for one in found] == [2, 5]
    structured = llm.generate("say", SamplingParams(temperature=0, structured_outputs={"choice": ["a", "the"]}))
    assert structured[0].outputs[0].text in ("a", "the")
    beams = llm.generate("say", SamplingParams(temperature=0, max_tokens=3, n=2, use_beam_search=True))
    assert len(beams[0].outputs) == 2


def test_more_prompts_than_the_queue_takes_are_answered_in_order(llm):
    prompts = [[5 + at % 200, 6, 7] for at in range(100)]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
    assert [one.prompt_token_ids for one in found] == prompts
    assert llm.state.places.taken == llm.state.places.tokens == 0
    assert not llm.state.open_exchanges


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (["a", "b " * 600], {}, r"prompts\[1\]: This model's maximum context length"),
        ("a", {"top_p": 3.0}, "prompts: top_p: got 3.0"),
        ("a", {"stop": 5}, "stop: got an integer"),
        ("a", {"stream": True}, "stream: has no meaning without HTTP"),
        (["a", {"text": "b"}], {}, r"prompts\[1\]: prompt: has an unknown key text"),
        ([{"prompt": None}], {}, "must be a text, token ids, or an object"),
        ([[5000]], {}, "is not a token id"),
    ],
)
def test_bad_prompts_and_parameters_are_value_errors(llm, prompts, params, text):
    with pytest.raises(ValueError, match=text):
        llm.generate(prompts, SamplingParams(**params))
    assert llm.generate("a", SamplingParams(**GREEDY))


def test_parameters_must_be_as_many_as_prompts(llm):
    with pytest.raises(ValueError, match="sampling_params: got 1 for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="makes no embeddings"):
        llm.embed("a")
    with pytest.raises(ValueError, match="makes no embeddings"):
        llm.score("a", "b")


def test_it_works_inside_of_a_running_loop(llm):
    async def cell():
        return llm.generate("a", SamplingParams(**GREEDY))

    found = asyncio.run(cell())[0].outputs
    assert found == llm.generate("a", SamplingParams(**GREEDY))[0].outputs


def engines() -> int:
    return len([thread for thread in threading.enumerate() if thread.name == "omniloop-offline"])


def test_an_interrupt_ends_the_call_and_closes_the_engine(monkeypatch):
    before = engines()
    made = LLM(str(tiny.checkpoint("qwen3")), **FLAGS)
    began, real = threading.Event(), module.plain_job

    async def job(*given):
        began.set()
        return await real(*given)

    monkeypatch.setattr(module, "plain_job", job)

    def interrupt():
        began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        made.generate(["a"] * 64, SamplingParams(max_tokens=400, ignore_eos=True))
    sender.join()
    assert engines() == before
    with pytest.raises(RuntimeError, match="closed"):
        made.generate("a")
    made.close()


def test_wrong_flags_and_models_are_refused_before_or_while_loading(tmp_path):
    before = engines()
    with pytest.raises(UsageError, match="max-model-length"):
        LLM(str(tiny.checkpoint("qwen3")), max_model_length=5)
    with pytest.raises(UsageError, match="port"):
        LLM(str(tiny.checkpoint("qwen3")), port=9000)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((ConfigError, UsageError)):
        LLM(str(tmp_path))
    assert engines() == before


def test_flags_are_those_of_the_command_line():
    given = {"max_model_len": 64, "enable_prefix_caching": False, "trust_clients": True, "api_key": None}
    given |= {"served_model_name": ["a", "b"], "override_generation_config": {"top_k": 3}}
    assert module.words_of(given) == [
        *("--max-model-len", "64", "--no-enable-prefix-caching", "--trust-clients"),
        *("--served-model-name", "a", "b", "--override-generation-config", '{"top_k": 3}'),
    ]


def test_vectors_and_scores_are_those_of_the_routes():
    texts = [f"{text} {at}" for at, text in enumerate(PROMPTS * 6)]
    folder = kit.changed(kit.embedder("qwen3", prompts=True), "tei", is_matryoshka=True)
    with LLM(str(folder), **FLAGS) as made:
        for fields in ({}, {"prompt_name": "query"}, {"dimensions": 8}, {"use_activation": False}):
            wanted = over_http(made, "/v1/embeddings", {"input": texts, **fields})["data"]
            found = made.embed(texts, **fields)
            np.testing.assert_allclose(
                [one.outputs.embedding for one in found], [one["embedding"] for one in wanted], atol=1e-6
            )
        (one,) = made.embed(found[3].prompt_token_ids, use_activation=False)
        np.testing.assert_allclose(one.outputs.embedding, found[3].outputs.embedding, atol=1e-6)
        pairs = over_http(made, "/score", {"text_1": texts[0], "text_2": texts})["data"]
        np.testing.assert_allclose(
            [one.outputs.score for one in made.score(texts[0], texts)], [one["score"] for one in pairs], atol=1e-6
        )
        assert len(made.score(texts, texts)) == len(texts)
        with pytest.raises(ValueError, match=r"prompts: .*maximum context length"):
            made.embed("b " * 600)
        with pytest.raises(ValueError, match="generates no text"):
            made.generate("a")


def test_media_come_with_a_text_or_in_messages():
    picture = Image.new("RGB", (56, 56), "red")
    sound = np.sin(np.arange(16000) / 20).astype(np.float32)
    with LLM(str(tiny.checkpoint("omni")), **FLAGS, max_model_len=512) as made:
        text = "<|vision_bos|><|IMAGE|><|vision_eos|> and <|audio_bos|><|AUDIO|><|audio_eos|>"
        data = {"audio": (sound, 16000), "image": picture}
        (found,) = made.generate({"prompt": text, "multi_modal_data": data}, SamplingParams(**GREEDY))
        assert found.prompt_token_ids.count(tiny.IDS["<|IMAGE|>"]) > 1
        assert found.prompt_token_ids.count(tiny.IDS["<|AUDIO|>"]) > 1
        bare = {"prompt": text.partition(" and")[0], "multi_modal_data": {"image": [picture]}}
        (seen,) = made.generate(bare, SamplingParams(**GREEDY))
        other = {**bare, "multi_modal_data": {"image": Image.new("RGB", (56, 56), "blue")}}
        assert made.generate(other, SamplingParams(**GREEDY, logprobs=0))[0].outputs != seen.outputs
        for wrong, words in (({"image": 5}, "must be bytes of a file"), ({"smell": b""}, "must be image, audio or")):
            with pytest.raises(ValueError, match=words):
                made.generate({**bare, "multi_modal_data": wrong})
        with pytest.raises(ValueError, match="image"):
            made.generate({"prompt": "no place", "multi_modal_data": {"image": picture}})


SCRIPT = """
from server.offline import LLM, SamplingParams
llm = LLM({folder!r}, num_threads=1, max_num_seqs=4, num_gpu_blocks_override=64, pool_threads=1)
print([one.outputs[0].finish_reason for one in llm.generate(["a", "b"], SamplingParams(temperature=0, max_tokens=3))])
"""


def test_a_script_that_closes_nothing_ends():
    code = SCRIPT.format(folder=str(tiny.checkpoint("qwen3")))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("['length', 'length']")
    assert "Traceback" not in done.stderr
