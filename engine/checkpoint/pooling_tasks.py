"""Tasks of a checkpoint that has an adapter for each of them (jina-embeddings-v3, https://arxiv.org/abs/2409.10173).

An input of a task is computed with the task's adapter, and the task's instruction stands before its text. Released
checkpoints hold all adapters in the files of the matrices, and config.json specifies adapters and instructions
(lora_adaptations, task_instructions). Checkpoints for transformers' class have a PEFT folder for each adapter, and no
instructions.
In: a folder and its config.json. Out: fields of PoolingConfig. Thread: any; its only side effect is to look for files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.base.errors import ConfigError
from engine.checkpoint.section import Section

JINA_V3 = "jina_embeddings_v3"  # model_type of transformers' class
ADAPTER_CONFIG = "adapter_config.json"
FOLDERS = {  # folders of adapters for transformers' class, by task
    "retrieval.query": "retrieval_query",
    "retrieval.passage": "retrieval_passage",
    "separation": "separation",
    "classification": "classification",
    "text-matching": "text_matching",
}
INSTRUCTIONS = {  # task -> instruction, as in the released config.json; other tasks have no instruction
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
}


def has_tasks(root: Section) -> bool:
    """Whether the checkpoint is of a family whose inputs may have tasks."""
    return root.values.get("model_type") == JINA_V3 or bool(root.values.get("lora_adaptations"))


def tasks_of(folder: Path, root: Section, prompts: Mapping[str, str]) -> dict[str, Any]:
    """The task fields of PoolingConfig. `prompts`: task -> prefix from the files of sentence-transformers."""
    if not has_tasks(root):
        return {}
    if root.values.get("model_type") == JINA_V3:
        names = tuple(task for task, name in FOLDERS.items() if (folder / name / ADAPTER_CONFIG).is_file())
        said = {task: INSTRUCTIONS.get(task, "") for task in names}
    else:
        names = tuple(map(str, root.items("lora_adaptations", ())))
        said = root.values.get("task_instructions") or {}
        if not isinstance(said, dict) or set(said) != set(names) or not all(isinstance(t, str) for t in said.values()):
            raise ConfigError(
                f"{root.path}: task_instructions must be an object with a text for each of lora_adaptations, which are "
                f"{', '.join(names)}"
            )
    return {"prompts": {**prompts, **{task: prompts.get(task, said[task]) for task in names}}, "adapters": names}
