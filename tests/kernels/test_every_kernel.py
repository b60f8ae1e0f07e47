"""Every Triton kernel has a reference, and cases in the interpreter, for every target and on a device.

The test reads the sources. A kernel's launchers are the functions that launch the kernel, and all functions that call a
launcher, directly or through a dispatch table.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from engine.kernels.target import Target

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests/kernels/accelerator"
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted((ROOT / "engine/kernels").rglob("*.py"))
}
Function = tuple[str, str]  # (module, name)
FUNCTIONS: dict[Function, ast.FunctionDef] = {
    (module, node.name): node
    for module, tree in TREES.items()
    for node in tree.body
    if isinstance(node, ast.FunctionDef)
}
TABLES: dict[Function, ast.expr] = {  # module-level values; dispatch tables contain the names of functions that launch
    (module, target.id): node.value
    for module, tree in TREES.items()
    for node in tree.body
    if isinstance(node, ast.Assign)
    for target in node.targets
    if isinstance(target, ast.Name)
}
IMPORTED: dict[Function, Function] = {
    (module, name.name): (node.module or "", name.name)
    for module, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}


def read_in(module: str, node: ast.AST) -> set[Function]:
    """Functions named in the node, or in a table named there; names that the node itself binds do not count."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    bound = {each.id for each in found if not isinstance(each.ctx, ast.Load)}
    bound |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    named = {(module, each.id) for each in found if each.id not in bound}
    named = {IMPORTED.get(each, each) for each in named}
    in_tables = (read_in(each[0], TABLES[each]) for each in named & TABLES.keys())
    return (named & FUNCTIONS.keys()).union(*in_tables)


def launched_in(module: str, node: ast.AST) -> set[Function]:
    """Kernels launched in the node: kernel[grid](...)."""
    launches = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return set().union(*(read_in(module, at.value) for at in launches if isinstance(at, ast.Subscript)))


READ = {function: read_in(function[0], node) for function, node in FUNCTIONS.items()}
LAUNCHED = {function: launched_in(function[0], node) for function, node in FUNCTIONS.items()}
JITTED = {
    function
    for function, node in FUNCTIONS.items()
    if any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
}
KERNELS = sorted(JITTED & set().union(*LAUNCHED.values()))


def launchers_of(kernel: Function) -> set[Function]:
    found = {function for function, launched in LAUNCHED.items() if kernel in launched}
    while more := {function for function, read in READ.items() if read & found} - found:
        found |= more
    return found


@cache
def used_by(folder: Path, pattern: str) -> set[str]:
    """Names used by these files."""
    found = [ast.walk(ast.parse(path.read_text())) for path in folder.glob(pattern)]
    return {node.id for nodes in found for node in nodes if isinstance(node, ast.Name)}


def test_every_jitted_function_is_a_kernel_or_a_part_of_one():
    reached = set(KERNELS)
    while more := set().union(*(READ[function] & JITTED for function in reached)) - reached:
        reached |= more
    assert reached == JITTED
    assert len(KERNELS) > 15


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel[1])
def test_a_kernel_has_its_reference_and_its_cases(kernel):
    found = launchers_of(kernel)
    launchers = {name for _, name in found}
    references = {f"{name.removeprefix('launch_')}_reference" for name in launchers} & {name for _, name in FUNCTIONS}
    # Several kernels may share a reference: a launcher passes a CPU's tensors to the reference.
    references |= {name for launcher in found for _, name in READ[launcher] if name.endswith("_reference")}
    assert references, launchers
    assert kernel[1] in used_by(CASES, "cases_compile*.py")
    assert launchers & used_by(CASES, "cases_interpreter*.py"), launchers
    assert launchers & used_by(CASES.parent, "test_on_device*.py"), launchers


def early_returns(body: list[ast.stmt]) -> list[ast.Return]:
    """Statements that return a value although other statements follow them or their branch."""
    *earlier, last = body
    found = [each for statement in earlier for each in ast.walk(statement) if isinstance(each, ast.Return)]
    if isinstance(last, ast.If):
        found += early_returns(last.body) + (early_returns(last.orelse) if last.orelse else [])
    return [each for each in found if each.value is not None]


@pytest.mark.parametrize("function", sorted(JITTED), ids=lambda function: function[1])
def test_a_value_is_returned_last(function):
    """Triton 3.6 still compiles the code after a constant branch that returns, with types of the other branch."""
    lines = [each.lineno for each in early_returns(FUNCTIONS[function].body)]
    assert not lines, f"{function[0]}: lines {lines} return before the end; assign in `if` and `else`, return once"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950", "gfx1100"])
def test_only_newer_cuda_devices_begin_early(arch):
    device = Target("cuda" if arch.startswith("sm") else "hip", arch, 100, 32, 64 << 10)
    assert device.begins_early == (arch in ("sm_90", "sm_100"))
    assert device.loads_past_registers == arch.startswith("sm")
