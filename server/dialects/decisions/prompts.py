"""The prompts of questions: the state, the question, and its options behind labels; and the tokens of the labels.

Owner: loop; templates and tokenizer run in the renderer's pool. In: a Conversation that ends with the state. Out: a
Prompt per question, behind which the answer's first token is a label. All prompts of a request begin with the same
tokens, so that the state is computed once. Reasoning is off; a prompt that ends inside of reasoning gets its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from server.dialects.decisions.questions import Option, Question
from server.errors import ApiError, invalid, not_here, quoted
from server.output.parser import Parsers
from server.output.reasoning import REASONING, state_of
from server.render.chat import Renderer
from server.render.conversation import Conversation, Part, Turn, text_part
from server.render.items import parts_of
from server.render.prompt import Prompt, id_array
from server.render.tokenizer import Tokenizer
from server.state import AppState

ANSWER_WITH = {
    "truth": "Is it true? Answer with yes or no, without another word.",
    "choice": "Answer with the letter of one option, without another word.",
    "score": "Answer with the number of one level, without another word.",
}
SILENT = {"enable_thinking": False, "thinking": False}  # template variables
FINAL_CHANNEL = "<|channel|>final<|message|>"  # of harmony: the answer without reasoning
TAIL = 8  # tokens of the prompt behind which labels are tokenized
OPENING = tuple({marker for form in REASONING.values() for marker in form.begins if marker.startswith(("<", "[", "◁"))})


@dataclass(frozen=True, slots=True)
class Posed:
    """A question's prompt and the token ids of each option."""

    question: Question
    prompt: Prompt
    label_ids: list[list[int]]


async def posed(state: AppState, conversation: Conversation, question: Question) -> Posed:
    """Render a question. Raises ApiError, or RenderError with the client's paths."""
    prompt = await rendered(state.renderer, conversation, question_parts(question))
    ending = end_of_reasoning(state.parsers, prompt)
    if ending:
        ids = np.concatenate([prompt.token_ids, id_array(state.tokenizer.encode(ending))])
        prompt = replace(prompt, token_ids=ids, text=(prompt.text or "") + ending)
    return Posed(question, prompt, label_ids(state.tokenizer, prompt.token_ids, question))


async def probe_of(state: AppState, conversation: Conversation) -> Prompt:
    """A prompt that differs from those of all questions right behind the state."""
    return await rendered(state.renderer, conversation, [text_part("#", "questions")])


def shared_length(one: Prompt, other: Prompt) -> int:
    """The number of tokens with which both prompts begin."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one.token_ids[:size] != other.token_ids[:size])
    return int(differs[0]) if len(differs) else size


async def rendered(renderer: Renderer, conversation: Conversation, parts: Sequence[Part]) -> Prompt:
    """The prompt of the conversation with these parts at the end of its last user message, or as a new one."""
    whole = Conversation()
    whole.root = conversation.root
    whole.turns = [*conversation.turns]
    last = whole.turns[-1]
    if last.role == "user":
        whole.turns[-1] = replace(last, parts=joined([*last.parts, text_part("\n\n", last.path), *parts]))
    else:
        whole.turns.append(Turn("user", "questions", joined(parts)))
    await whole.settle(renderer)
    with whole.client_paths():
        return await renderer.chat(whole.messages(), template_kwargs=SILENT)


def joined(parts: Sequence[Part]) -> list[Part]:
    """Parts in which neighbouring texts are one."""
    found: list[Part] = []
    for part in parts:
        if found and found[-1].kind == part.kind == "text":
            found[-1] = text_part(found[-1].content["text"] + part.content["text"], found[-1].path, found[-1].held)
        else:
            found.append(part)
    return found


def question_parts(question: Question) -> list[Part]:
    """A question as parts of a message."""
    path = f"{question.path}.instructions"
    asked = parts_of(question.instructions, path)
    lines = [line for option in question.options if (line := option_line(question, option))]
    heads = {"truth": "", "choice": "Options:\n", "score": "Levels, from the lowest to the highest:\n"}
    listed = heads[question.kind] + "".join(f"{line}\n" for line in lines)
    ending = f"\n\n{listed}\n{ANSWER_WITH[question.kind]}"
    return [text_part("Question: ", path), *asked, text_part(ending, path)]


def option_line(question: Question, option: Option) -> str:
    """The line of an option; none for a truth without a description."""
    label, value, text = option.labels[0], option.value, option.description
    if question.kind == "truth":
        return f"{label}: {text}" if text else ""
    spelled = str(value).lower() if isinstance(value, bool) else value
    return f"{label}. {spelled}: {text}" if text else f"{label}. {spelled}"


def label_ids(tokenizer: Tokenizer, prompt_ids: np.ndarray, question: Question) -> list[list[int]]:
    """The ids of each option's label behind a prompt: one for each spelling that is one token for all options."""
    tail = tokenizer.decode(prompt_ids[-TAIL:])
    before = tokenizer.encode(tail)
    found = [[_only_token(tokenizer, tail, before, label) for label in option.labels] for option in question.options]
    spellings = [ids for ids in zip(*found) if None not in ids]
    if not spellings:
        at = next(at for at, ids in enumerate(found) if None in ids)
        label = question.options[at].labels[found[at].index(None)]
        raise invalid(
            question.path,
            f"{question.path}: the label {quoted(label)} is not a single token behind this model's prompt; ask with "
            "fewer options, or as a question of another type",
        )
    ids = [list(each) for each in zip(*spellings)]
    flat = [token for each in ids for token in each]
    if len(set(flat)) < len(flat):
        raise invalid(question.path, f"{question.path}: two labels are the same token of this model")
    return ids


def _only_token(tokenizer: Tokenizer, tail: str, before: list[int], label: str) -> int | None:
    """The token that a label adds behind a text; None if it adds several, or changes the tokens before it."""
    ids = tokenizer.encode(tail + label)
    return ids[-1] if len(ids) == len(before) + 1 and ids[:-1] == before else None


def end_of_reasoning(parsers: Parsers, prompt: Prompt) -> str:
    """The text that must follow the prompt for the answer to begin without reasoning. Raises 501 if none is known."""
    if parsers.harmony is not None:
        return FINAL_CHANNEL
    form, text = parsers.written, prompt.text or ""
    if form is None:
        if text[-64:].rstrip().endswith(OPENING):
            raise must_think(
                "start the server with the model's --reasoning-parser, whose end of reasoning is then used"
            )
        return ""
    state, _ = state_of(form, text)
    if form.prefix:
        raise must_think("its reasoning has no markers")
    if state == "closed" or (state == "may open" and not form.always):
        return ""
    if form.suffix or not form.ends:
        raise must_think("the end of its reasoning is not a fixed text")
    first, before, behind = form.lines
    ending = "\n" * before + form.ends[0] + "\n" * behind
    return ending if state == "open" else form.begins[0] + "\n" * first + ending


def must_think(why: str) -> ApiError:
    return not_here("model", f"this model must think before it answers, and a decision is one step: {why}")
