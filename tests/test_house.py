"""The house rules as assertions: the direction of imports, the size of files and functions, and forbidden contents."""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from engine.models.lookup import families, files
from tests.house_limits import ATTRIBUTES, attributes_of, attributes_of_cython, squeezed

ROOT = Path(__file__).parent.parent
ROOMS = ("server", "mm", "engine", "_fast")
ALLOWED = {
    "server": {"server", "mm", "engine", "_fast"},
    "mm": {"mm", "engine"},
    "engine": {"engine", "_fast"},
    "_fast": {"_fast"},
}
HAS_DOC = (ast.Module, ast.ClassDef, ast.FunctionDef)
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
CYTHON = sorted((ROOT / "_fast").glob("*.pyx"))
C = sorted(path for path in (ROOT / "_fast" / "c").rglob("*") if path.suffix in (".c", ".h"))
TOP_LEVEL = {
    "setup.py", "pyproject.toml", "server", "engine", "mm", "_fast", "tests", "examples", "README.md", "Makefile",
    "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md",
}  # fmt: skip


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Makes one test that checks all paths: one test per file would spend more time on reporting than on checking."""

    def made(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    broken.append(f"{name_of(path)}: {error}")
            assert not broken, "\n".join(broken)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return made


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def imports_of(path: Path) -> list[str]:
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            found.append(node.module or "")
    return found


@each(SOURCES)
def test_imports_point_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    for module in imports_of(path):
        first = module.split(".")[0]
        if first in ROOMS:
            assert first in ALLOWED[room], f"{room} imports {module}"
            if room == "mm" and first == "engine":
                assert module == "engine.base.request", f"mm may see only engine.base.request, not {module}"
        assert first != "tests"


# Floors of engine/, from the lowest to the highest; a name is a file or a folder. A module imports only from its own
# folder and from lower floors, for types too. Folders on one floor do not import each other.
FLOORS = (
    ("base", "attention"),
    ("kernels",),
    ("device", "checkpoint"),
    ("cache", "sampling", "weights"),
    ("grammar", "quant"),
    ("layers",),
    ("encoders", "pooling"),
    ("models",),
    ("parallel",),
    ("lora",),
    ("step", "explain"),
    ("run",),
    ("engine",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


# Floors of server/, by the same rule: a folder, or a file of the root, imports from lower floors only. Callers use the
# last floor.
SERVER_FLOORS = (
    ("docs",),
    ("schema", "flags"),
    ("render",),
    ("errors", "output"),
    ("ops", "structure", "openapi", "foreign_fields"),
    ("batches",),
    ("state",),
    ("http",),
    ("jobs",),
    ("answers",),
    ("pooling", "speech"),
    ("routes",),
    ("dialects",),
    ("app",),
    ("start",),
    ("bench",),
    ("cli",),
    ("hosted",),
    ("scaleout", "offline", "__main__"),
)
SERVER_FLOOR_OF = {name: floor for floor, names in enumerate(SERVER_FLOORS) for name in names}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of all sources."""
    return {module_of(path): path for path in SOURCES}


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, names: dict[str, Path]) -> set[str]:
    """Our modules that a file imports: anywhere in the file, for types too."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & names.keys()) or {node.module}
    return found & names.keys()


def test_no_modules_import_each_other():
    """Imports form no circle, not even for types: a reader could not understand such modules one after the other."""
    names = modules()
    graph = {name: imported(path, names) - {name} for name, path in names.items()}
    while free := [name for name, uses in graph.items() if not uses]:
        for name in free:
            del graph[name]
        graph = {name: uses - set(free) for name, uses in graph.items()}
    circle = sorted(graph)
    users = {name for uses in graph.values() for name in uses}
    assert not circle, f"in circles, or above them: {[name for name in circle if name in users]}"


@each([p for p in SOURCES if p.relative_to(ROOT).parts[0] == "engine"])
def test_the_engine_is_built_in_floors(path):
    room = path.relative_to(ROOT / "engine").with_suffix("").parts[0]
    if room == "__init__":
        return  # `engine/__init__.py` is the public interface
    for module in imports_of(path):
        first, _, below = module.partition(".")
        below = below.partition(".")[0]
        if first == "engine" and below != room:
            assert below in FLOOR_OF, f"{module}: name its room, not the package"
            assert FLOOR_OF[below] < FLOOR_OF[room], f"{room} (floor {FLOOR_OF[room]}) imports {below}"


MODEL_ROOMS = ("base", "text", "media", "pooling")  # of engine/models, from the lowest to the highest


@each([p for p in SOURCES if p.relative_to(ROOT).parts[:2] == ("engine", "models") and p.parent.name in MODEL_ROOMS])
def test_the_rooms_of_models_lie_on_each_other(path):
    """Folders of engine/models import from lower folders only: decoders know no tower, generating models no pooling
    model.
    """
    below = MODEL_ROOMS[: MODEL_ROOMS.index(path.parent.name) + 1]
    for module in imported(path, modules()):
        parts = module.split(".")
        if parts[:2] == ["engine", "models"] and parts[2] in MODEL_ROOMS:
            assert parts[2] in below, f"{path.parent.name} imports {module}"


def test_no_room_of_models_holds_too_many_files():
    for folder in (ROOT / "engine" / "models").iterdir():
        assert len(list(folder.glob("*.py"))) <= 60, folder.name


@each([p for p in SOURCES if p.relative_to(ROOT).parts[0] == "server"])
def test_the_server_is_built_in_floors(path):
    """Imports go to lower floors only, for types too: no two folders of server/ import each other."""
    room = path.relative_to(ROOT / "server").with_suffix("").parts[0]
    if room == "__init__":
        return  # every module may read the version
    for module in imported(path, modules()):
        parts = module.split(".")
        if parts[0] == "server" and len(parts) > 1 and parts[1] != room:
            below = parts[1]
            assert SERVER_FLOOR_OF[below] < SERVER_FLOOR_OF[room], f"{room} imports {below}, which is no floor below it"


def test_the_tests_of_the_server_lie_as_the_server_does():
    """Tests of a folder of server/ are in the folder of the same name; the root has tests of its files and of the
    whole.
    """
    rooms = {path.name for path in (ROOT / "server").iterdir() if path.is_dir()}
    tests = (ROOT / "tests" / "server").rglob("test_*.py")
    folders = {path.relative_to(ROOT / "tests" / "server").parts[0] for path in tests}
    assert {name for name in folders if not name.endswith(".py")} <= rooms
    assert len([name for name in folders if name.endswith(".py")]) <= 16, "move tests into the folder of their room"


def test_the_root_of_the_server_holds_few_files():
    files = sorted(path.name for path in (ROOT / "server").glob("*.py"))
    assert len(files) <= 12, files


@each([p for p in SOURCES if p.relative_to(ROOT).parts[:2] in (("engine", "layers"), ("engine", "kernels"))])
def test_layers_and_kernels_know_no_family(path):
    """A difference between models is a configuration field: the code names no checkpoint class and no architecture."""
    docs = {ast.get_docstring(node, clean=False) for node in nodes_of(path) if isinstance(node, HAS_DOC)}
    named = {module.rpartition(".")[2] for module in files().values()}
    for node in nodes_of(path):
        names = {getattr(node, field, None) for field in ("id", "attr", "arg", "name")}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docs:
            names.add(node.value)
        for name in names - {None}:
            assert name not in ("architecture", "architectures", "model_type"), f"{name} at line {node.lineno}"
            assert name not in families(), f"{name} at line {node.lineno}"
            assert name not in named, f"{name} at line {node.lineno}"


@each([*SOURCES, *CYTHON, *C])
def test_files_stay_small(path):
    lines = len(path.read_text().splitlines())
    limit = 300 if path.relative_to(ROOT).parts[:2] == ("engine", "models") else 400
    assert lines <= limit, f"{lines} lines; split it by noun"


@each(SOURCES)
def test_functions_stay_small(path):
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # A Triton kernel lists each pointer with its shape. Cutting a kernel would move its registers to memory.
            jitted = any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
            limit = 100 if jitted else 60
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= limit, f"{node.name} has {length} lines"


def test_only_tables_have_a_layout_of_their_own():
    """All other code has the layout, and so the number of lines, that the formatter gives."""
    found = []
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        kernels = name_of(path).startswith(("engine/kernels/", "tests/kernels/"))
        found += [f"{name_of(path)}:{line}" for line in squeezed(path, kernels)]
    assert not found, f"take `# fmt: skip` away, and split by noun what becomes too long: {found}"


def test_classes_know_little():
    """A class has at most 15 attributes; a class listed in tests/house_limits.py has at most its listed number."""
    counts: dict[str, int] = {}
    for path in SOURCES:
        classes = (node for node in nodes_of(path) if isinstance(node, ast.ClassDef))
        counts |= {f"{name_of(path)}: {node.name}": len(attributes_of(node)) for node in classes}
    for path in sorted((ROOT / "_fast").glob("*.p[xy][dx]")):
        counts |= {f"{name_of(path)}: {name}": count for name, count in attributes_of_cython(path).items()}
    grown = {name: count for name, count in counts.items() if count > ATTRIBUTES.get(name, 15)}
    assert not grown, "split the class by noun"
    stale = sorted(name for name in ATTRIBUTES if counts.get(name, 0) <= 15)
    assert not stale, "take them out of tests/house_limits.py"


@each(SOURCES)
def test_modules_know_little(path):
    """A module imports at most 20 modules of ours; imports for types and inside functions count."""
    count = len(imported(path, modules()) - {module_of(path)})
    assert count <= 20, f"{count} modules of ours are imported; split the module by noun"


def text_about(path: Path) -> str:
    """A file's docstrings and comments; for C and Cython, everything but imports."""
    text = path.read_text()
    if path.suffix != ".py":
        return re.sub(r"^(from|import|cimport|#include)\b.*", "", text, flags=re.MULTILINE)
    docs = [ast.get_docstring(node) or "" for node in nodes_of(path) if isinstance(node, HAS_DOC)]
    return "\n".join([*docs, *re.findall(r"#.*", text)])


def test_what_comments_name_is_there():
    """Paths and modules in comments (`engine/run/loop.py`, `engine/run`, `run/loop.py`, engine.run.loop) exist here."""
    there = {str(path.relative_to(ROOT)) for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*")} | {*ROOMS}
    ends = {"/".join(parts[at:]) for parts in (path.split("/") for path in there) for at in range(len(parts))}
    stale = []
    for path in [*SOURCES, *CYTHON, *C, *sorted((ROOT / "_fast").glob("*.pxd"))]:
        text = text_about(path)
        for named in re.findall(r"(?<![\w/.~<>-])((?:\w+/)+\w+(?:\.(?:pyx?|pxd|[ch]))?)\b(?!\()", text):
            first = named.split("/")[0]
            ours = first in (*ROOMS, "tests") or ("." in named and first in ends)
            if ours and not {named, f"{named}.py", f"{named}.pyx"} & ends:
                stale.append(f"{name_of(path)}: {named}")
        for named in re.findall(r"(?<![\w/.-])((?:server|mm|engine|_fast)(?:\.\w+)+)", text):
            start = "/".join(named.split(".")[:2])
            if not {start, f"{start}.py", f"{start}.pyx", f"{start}.pxd"} & there:
                stale.append(f"{name_of(path)}: {named}")
    assert not stale, "\n".join(stale)


@each(SOURCES)
def test_every_module_says_what_it_owns(path):
    assert ast.get_docstring(tree_of(path)), "no module docstring"


@each(SOURCES)
def test_s33_nothing_runs_code_from_data(path):
    banned_calls = {"eval", "exec", "literal_eval"}
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            owner = (
                node.func.value.id
                if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
                else ""
            )
            assert name not in banned_calls or owner in ("model", "self"), f"{name} at line {node.lineno}"
            assert (owner, name) != ("yaml", "load"), f"line {node.lineno}"
            if (owner, name) == ("torch", "load"):  # the process of `convert` alone, with torch's restricted unpickler
                assert name_of(path) == "server/start/unpickle.py", f"torch.load at line {node.lineno}"
                assert {"weights_only": True}.items() <= {
                    k.arg: getattr(k.value, "value", 0) for k in node.keywords
                }.items()
            for keyword in node.keywords:
                assert keyword.arg != "shell", f"shell= at line {node.lineno}"
    banned = {"pickle", "dill", "marshal", "shelve", "cloudpickle"}
    assert not banned & {module.split(".")[0] for module in imports_of(path)}


@each([p for p in SOURCES if p.name not in ("config.py", "__main__.py")])  # they set numpy's variables
def test_only_the_config_reads_the_environment(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in ("environ", "getenv"), f"line {node.lineno}"


VENDOR = re.compile(r"version\.(cuda|hip)\b|(target\(\)|device)\.kind\b|\b(get_device_capability|gcnArchName)\b")


@each(
    [
        p
        for p in SOURCES
        if name_of(p) not in ("engine/device/accelerator.py", "engine/device/host.py", "engine/kernels/target.py")
    ]
)
def test_only_targets_ask_for_the_accelerators_vendor(path):
    assert not VENDOR.search(path.read_text()), "ask engine/kernels/target for what such a device can do"


@each([p for p in SOURCES if p.relative_to(ROOT).parts[0] == "server"])
def test_routes_and_keys_never_look_at_request_url(path):
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr == "url" and isinstance(node.value, ast.Name):
            assert node.value.id != "request", f"request.url at line {node.lineno}"


def test_nothing_heavy_is_imported_at_the_top_of_a_shipped_module():
    heavy = {"transformers", "librosa", "scipy", "av", "numba", "sklearn"}
    for path in SOURCES:
        for node in tree_of(path).body:
            modules = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for module in modules:
                assert module.split(".")[0] not in heavy, f"{name_of(path)} imports {module} at start-up"


def on_import(path: Path) -> set[str]:
    """Modules that importing a file imports at once, and the names that the file imports from them."""
    found = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_what_runs_on_a_device_needs_no_client_library():
    """Files of GPU tests import no client library: the GPU machine has none, so the whole file would fail to import."""
    absent = {
        "openai",
        "anthropic",
        "cohere",
        "ollama",
        "httpx",
        "langchain_openai",
        "llama_index",
        "sentence_transformers",
    }
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    open_ones = [(path, ()) for path in files if path.name != "test_house.py"]
    seen = set(files)
    while open_ones:
        path, way = open_ones.pop()
        for module in on_import(path):
            assert module.split(".")[0] not in absent, f"{module}, by {' <- '.join((name_of(path), *way))}"
            inner = (ROOT / module.replace(".", "/")).with_suffix(".py")
            if module.startswith("tests.") and inner.is_file() and inner not in seen:
                seen.add(inner)
                open_ones.append((inner, (name_of(path), *way)))


def test_top_level_holds_what_was_agreed():
    import subprocess

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    names = {path.split("/")[0] for path in listed}
    extra = {name for name in names if name not in TOP_LEVEL and not name.startswith((".", "Dockerfile"))}
    assert not extra


def test_no_machine_path_or_unfinished_word_is_in_the_sources():
    """A method that each subclass implements is abstract; a method that raises NotImplementedError is missing."""
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise\s+NotImplementedError")
    for path in [*SOURCES, *CYTHON, *C]:
        text = path.read_text()
        assert not unfinished.search(text), name_of(path)
        assert "/work/" not in text, name_of(path)


def test_the_guide_names_what_is_there():
    """Paths in CONTRIBUTING exist; words in capitals match any name. A planned capability lacks at least one path."""
    there, found, planned = (ROOT / "CONTRIBUTING.md").read_text().partition("### Planned")
    assert found, "capabilities to come have a heading of their own"
    missing = sorted(path for path in paths_in(there) if not matches(path))
    assert not missing
    for path, names in re.findall(r"`([\w/]+(?:\.pyx?)?): ([\w, ]+)`", there):
        texts = [each.read_text() for each in matches(path) if each.is_file()]
        for name in names.split(", "):
            assert any(re.search(rf"\b{name}\b", text) for text in texts), f"{path} has no {name}"
    built = [line for line in planned.splitlines() if paths_in(line) and all(map(matches, paths_in(line)))]
    assert not built, "what is in the tree moves out of the plan"


def paths_in(text: str) -> list[str]:
    """Words of a text that have the form of a path: `engine/x.py`, `engine/x/`, `engine/x.py: name`."""
    return re.findall(r"`((?:\w+/)+[\w*]*(?:\.\w+)?|\w+\.(?:py|pyx|md))(?:: [\w, ]+)?`", text)


def matches(path: str) -> list[Path]:
    """Files that match a path below the root or a top folder; capitals match any name. A bare file name matches
    anywhere.
    """
    if "/" not in path:
        return [each for each in (*SOURCES, ROOT / path) if each.name == path and each.exists()]
    pattern = re.sub(r"[A-Z]{2}[A-Z_]*", "*", path).rstrip("/")
    below = (ROOT, *(ROOT / room for room in ROOMS), ROOT / "engine" / "models", ROOT / "tests")
    return [each for folder in below for end in ("", ".py", ".pyx") for each in folder.glob(pattern + end)]


PRIVATE_LOOKS = 54  # lines; the number may only fall


def private_names() -> set[str]:
    """Names of the sources' functions and attributes that begin with an underscore."""
    found = set()
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if re.match(r"_(?!_)", name)}


def test_few_tests_look_at_private_names():
    """Tests use public names; an inner state that a test needs has a public attribute. The test counts lines."""
    names, own = private_names(), {"self", "cls", "tiny"}
    lines = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if names.isdisjoint(re.findall(r"\.\s*(_[A-Za-z]\w*)", text)):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Attribute) or node.attr not in names:
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in own):
                lines.add(f"{name_of(path)}:{node.lineno}: {node.attr}")
    count = len({line.rpartition(": ")[0] for line in lines})
    assert count <= PRIVATE_LOOKS, "\n".join([f"{count} lines, at most {PRIVATE_LOOKS}", *sorted(lines)])
