"""What the rules of tests/test_house.py count: attributes of classes, and `# fmt: skip` outside tables.

A class has at most 15 attributes. The list at the end holds the count of each class that has more. A count may only
become smaller.
"""

import ast
import re
from pathlib import Path

DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
ROWS = 4  # a call with this many keywords, and no other argument, is a row of a table


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Names of a class's attributes: fields, slots, enum members, and attributes that __init__ assigns."""
    is_enum = any("Enum" in ast.unparse(base) for base in node.bases)
    found: set[str] = set()
    for line in node.body:
        targets = line.targets if isinstance(line, ast.Assign) else ()
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if "__slots__" in names:
            found |= {each.value for each in ast.walk(line) if isinstance(each, ast.Constant)}
        elif is_enum:
            found |= names
        elif isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation):
            found.add(ast.unparse(line.target))
        elif isinstance(line, ast.FunctionDef) and line.name == "__init__":
            stored = (each for each in ast.walk(line) if isinstance(each, ast.Attribute))
            stored = (each for each in stored if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self")
            found |= {each.attr for each in stored}
    return found


def attributes_of_cython(path: Path) -> dict[str, int]:
    """Class name -> number of C attributes that a .pxd or .pyx declares for the class."""
    found: dict[str, int] = {}
    name = ""
    for line in path.read_text().splitlines():
        code = line.partition("#")[0].rstrip()
        if opened := re.match(r"cdef class (\w+)", code):
            name = opened[1]
        elif code and not code.startswith(" "):
            name = ""
        elif name and re.match(r"    cdef \S", code) and "(" not in code and not code.endswith(":"):
            found[name] = found.get(name, 0) + len(re.sub(r"\[.*?\]", "", code).split(","))
    return found


def squeezed(path: Path, kernels: bool) -> list[int]:
    """Lines with a `# fmt: skip` that marks no table, so the code takes fewer lines than the formatter would give.

    In kernel files the arguments of a launch or of a kernel count as a table too: outputs, inputs, sizes, strides,
    constants.
    """
    text = path.read_text()
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("  # fmt: skip")]
    if not marked:
        return []
    nodes = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.stmt)]
    decorators = [line for each in nodes for line in getattr(each, "decorator_list", ())]
    found = []
    for line in marked:
        around = [each for each in (*nodes, *decorators) if each.lineno <= line <= (each.end_lineno or 0)]
        node = min(around, key=lambda each: (each.end_lineno or 0) - each.lineno)
        if not holds_table(node, line) and not (kernels and lists_arguments(node)):
            found.append(line)
    return found


def holds_table(node: ast.AST, last: int) -> bool:
    """Whether a display, a union or a record fills the statement (or its head), but for the first and the last line."""
    first = getattr(node, "lineno", last)
    spans = [
        (each.lineno, each.end_lineno or 0) for each in ast.walk(node) if isinstance(each, ast.expr) and is_table(each)
    ]
    return any(begin <= first + 1 and begin < end and end >= last - 1 for begin, end in spans)


def is_table(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return not node.args and len(node.keywords) >= ROWS
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) == "Literal"
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr)
    return isinstance(node, DISPLAYS)


def lists_arguments(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return True
    value = getattr(node, "value", None)
    return isinstance(value, ast.Call)


ATTRIBUTES = {
    # Settings of files, flags and clients: one field for each.
    "engine/base/config.py: EngineConfig": 47,
    "engine/base/limits.py: Limits": 23,
    "engine/base/model_config.py: LayerConfig": 17,
    "engine/base/model_config.py: ModelConfig": 19,
    "engine/base/model_config.py: PoolingConfig": 30,
    "engine/base/model_config.py: RopeConfig": 19,
    "engine/base/model_config.py: TextConfig": 33,
    "engine/base/request.py: SamplingParams": 23,
    "engine/encoders/qwen_vl/config.py: VisionConfig": 19,
    "engine/encoders/vit/config.py: ProjectorConfig": 17,
    "engine/encoders/vit/config.py: VitConfig": 28,
    "engine/encoders/vit/names.py: VitNames": 16,
    "engine/models/base/family.py: Family": 17,
    "mm/limits.py: MediaLimits": 47,
    "server/batches/records.py: BatchRecord": 21,
    "server/bench/options.py: ServeOptions": 41,
    "server/dialects/llama_cpp/answers.py: LlamaCompletion": 17,
    "server/dialects/llama_cpp/schema.py: LlamaFields": 21,
    "server/dialects/sglang/schema.py: SglangBody": 19,
    "server/flags/config.py: ChatConfig": 20,
    "server/flags/config.py: ModelFlags": 23,
    "server/flags/config.py: ServerConfig": 34,
    "server/flags/limits_flags.py: LimitsConfig": 62,
    "server/output/tools/base.py: ToolFormat": 16,
    "server/render/chat.py: RenderConfig": 21,
    "server/schema/answers_batches.py: Batch": 22,
    "server/schema/answers_responses.py: Response": 27,
    "server/schema/chat.py: ChatBody": 22,
    "server/schema/common.py: SamplingFields": 41,
    "server/schema/responses.py: ResponsesBody": 28,
    # Arrays indexed by slot, row or entry, and numbers of a step.
    "_fast/layout.py: SlotWord": 24,
    "_fast/plan.pxd: StepPlan": 41,
    "_fast/planner.pxd: Planner": 16,
    "_fast/queue.pxd: WaitQueue": 26,
    "_fast/ring.pxd: OutputRing": 22,
    "_fast/scheduler.pxd: Scheduler": 16,
    "_fast/step_numbers.py: StepNumbers": 18,
    "_fast/tables.pxd: BlockTables": 18,
    "engine/base/stats.py: EngineStats": 18,
    "engine/base/stats.py: StepStats": 25,
    "engine/kernels/step_tensors.py: StepInputs": 16,
    "engine/layers/batch.py: Batch": 17,
    "engine/step/step.py: Step": 16,
    "server/bench/reply.py: Reply": 17,
    # All other classes have too many attributes: split them by noun.
    "_fast/steady.pxd: SteadyLoop": 24,
    "engine/engine.py: Engine": 22,
    "engine/grammar/row.py: GrammarRow": 22,
    "engine/models/base/decoder.py: Decoder": 23,
    "engine/run/loop.py: DeviceThread": 17,
    "engine/sampling/device.py: DeviceSampler": 16,
    "mm/decode/video.py: FilmFile": 17,
    "mm/processors/gemma4.py: Gemma4": 18,
    "server/answers/answer.py: Answer": 19,
    "server/answers/choice.py: Choice": 17,
    "server/http/exchange.py: Exchange": 31,
    "server/http/protocol.py: Connection": 17,
    "server/state.py: AppState": 38,
}
