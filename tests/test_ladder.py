"""The ladder, read from the imports with `ast`: every edge goes down, and
nothing forbidden is used."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNGS = ("kernels", "parallel", "layers", "warpweave")  # lowest first
# The rooms and files of a package, lowest floor first. A file imports from its own room or from
# lower floors. Anything not listed is above them all.
ROOMS = {
    package: tuple(tuple(floor.split()) for floor in floors.split(" < "))
    for package, floors in {
        "warpweave": (
            "kernels < parallel < cli layers < checkpoint compat data hf launch model wrap < "
            "__main__ convert < plan < train < prove < machine"
        ),
        "warpweave.cli": "lazy messages shared_options < command_line < toml",
        "warpweave.layers.sharding": "dtensor explain layouts < memory rules styles < declare",
        "warpweave.launch": (
            "heartbeat interrupt < blame processes < devices supervise < session < ranks"
        ),
        "warpweave.model": (
            "config engine_update plain < engine_graph gpt < generate < "
            "engine_checks engine_passes < engine_text < engine"
        ),
        "warpweave.plan": (
            "device memory options timeline < fits page time < choose layout < explain < command"
        ),
        "warpweave.train": (
            "boards option_kinds replicas state timeline < "
            "export_options idle_options sample_options < options < "
            "batches lr_schedule metrics resume < checks chosen not_finite server < "
            "export sample trainer < elastic < command"
        ),
        "warpweave.wrap": "units < pipeline zero",
        "warpweave.machine": "collectives tune < doctor",
        "warpweave.kernels": (
            "words < reference cost devices rope_scaling structure < runtime < "
            "dropout merge activation rope < gemm < overlap < "
            "attention norm cross_entropy mlp qkv"
        ),
        "warpweave.parallel": (
            "words < buffers shard layout collectives group_options observe algorithms exchange "
            "schedule symmetric < mesh messages < checked run_collective < "
            "simulate context data tensor < pipeline server"
        ),
        "warpweave.parallel.server": "clocks link < shard < server < worker < replay",
        "warpweave.checkpoint": "files < manifest < steps < read < save < background",
        "warpweave.convert": "fields < families < tensors < folder < beside < source < write",
        "warpweave.data": "files < split tokenizer < dataset < token_file < text < source",
        "warpweave.machine.doctor": "check options < machine < kernels ranks times < command",
        "warpweave.train.elastic": "connections seat < membership < trainer < rank < run",
        "warpweave.prove": (
            "layouts recording typecheck < expected options < truth < proof < graph < command"
        ),
        "warpweave.train.server": "log replay_config < roles < replay run",
        "warpweave.machine.tune": "calls timing < aot options < candidates < search < command",
    }.items()
}
STDLIB_ONLY = (
    "warpweave.kernels.structure", "warpweave.kernels.words", "warpweave.parallel.algorithms",
    "warpweave.parallel.schedule", "warpweave.parallel.server.clocks",
    "warpweave.parallel.simulate", "warpweave.parallel.words",
)  # fmt: skip
ALONE = {"warpweave.model.plain"}
LOWER_DEPENDENCIES = {"torch", "triton", "numpy", "spmd_types"}
TOP_DEPENDENCIES = LOWER_DEPENDENCIES | {
    "einops", "safetensors", "tyro", "tokenizers", "tqdm", "rich", "matplotlib", "tensorboard",
    "transformers", "wandb", "liger_kernel",
}  # fmt: skip
FORBIDDEN_MODULES = (
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve",
    "torch.distributed.rpc", "torch.distributed.checkpoint",
)  # fmt: skip
FORBIDDEN_NAMES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
    "scatter_object_list", "send_object_list",
}  # fmt: skip


def climbs(module: str, name: str) -> bool:
    """Return True if `module` imports, in `name`, from a room above its
    own or on the same floor."""
    ours, theirs = module.split("."), name.split(".")
    depth = 0  # of the innermost package that holds both
    while ours[depth : depth + 1] == theirs[depth : depth + 1] != []:
        depth += 1
    floors = ROOMS.get(".".join(ours[:depth]), ())
    if not floors or depth == len(theirs):
        return False
    own, there = (
        next((i for i, rooms in enumerate(floors) if parts[depth:] and parts[depth] in rooms),
             len(floors))
        for parts in (ours, theirs)
    )  # fmt: skip
    return there > own or there == own < len(floors)


def stdlib_only(module: str) -> bool:
    return any(module == room or module.startswith(room + ".") for room in STDLIB_ONLY)


def rung_of(module: str) -> int:
    """Return the index in RUNGS of a module of ours."""
    parts = module.split(".")
    return RUNGS.index(parts[1]) if len(parts) > 1 and parts[1] in RUNGS[:3] else 3


def source_files() -> Iterator[tuple[str, Path]]:
    """List (module name as it is imported, file) of every installed file."""
    for rung in RUNGS:
        for path in sorted((ROOT / rung).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if rung == "warpweave" else ("warpweave", *parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(module: str, tree: ast.AST, known: set[str]) -> Iterator[str]:
    """List every module that `tree` imports, including imports in functions,
    relative ones and import_module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known or full in FORBIDDEN_MODULES else base
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            first = node.args[0] if node.args else None
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value)


def complaints(module: str, text: str, known: set[str]) -> list[str]:
    """List the errors of a source file, given the names of all modules of ours."""
    tree = ast.parse(text)
    rung, found = rung_of(module), []
    for name in imports(module, tree, known):
        top = name.split(".")[0]
        if top in RUNGS[:3]:
            found.append(f"imports bare {name}")
        elif any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN_MODULES):
            found.append(f"imports {name}, which unpickles or executes what it reads")
        elif top == "warpweave":
            if module in ALONE or (stdlib_only(module) and not stdlib_only(name)):
                found.append(f"imports {name}, but must stand alone")
            elif climbs(module, name):
                found.append(f"imports {name} from above")
        elif top not in sys.stdlib_module_names:
            allowed = TOP_DEPENDENCIES if rung == 3 else LOWER_DEPENDENCIES
            if module in ALONE:
                allowed = {"torch", "numpy", "einops"}
            elif module == "warpweave.kernels.reference":  # einops costs time in a kernel's launch
                allowed = {"torch", "einops"}
            if stdlib_only(module) or top not in allowed:
                found.append(f"imports {name}, which it must not need")
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in FORBIDDEN_NAMES:
                found.append(f"uses {name}, an object collective")
            if ast.unparse(node) in ("torch.load", "torch.save"):
                found.append(f"uses {ast.unparse(node)}, a pickle")
            if ast.unparse(node).startswith(("torch.distributed.rpc", "dist.rpc")):
                found.append("uses torch.distributed.rpc")
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            if node.arg == "weights_only" and node.value.value is not True:
                found.append("passes weights_only=False")
            if node.arg == "allow_pickle" and node.value.value is not False:
                found.append("passes allow_pickle=True")
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [f"imports torch.{a.name}" for a in node.names if a.name in ("load", "save")]
        elif isinstance(node, ast.ImportFrom):
            found += [f"imports {a.name}" for a in node.names if a.name in FORBIDDEN_NAMES]
    return found


def test_every_import_goes_down_the_ladder() -> None:
    files = list(source_files())
    known = {module for module, _ in files}
    assert {"warpweave.kernels", "warpweave.parallel", "warpweave.layers", "warpweave"} <= known
    assert len(known) == len(files) > 10
    wrong = [
        f"{path.relative_to(ROOT)} {complaint}"
        for module, path in files
        for complaint in complaints(module, path.read_text(), known)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_package_has_at_most_20_rooms_on_9_floors() -> None:
    """No import goes up or stays on its floor, so rooms on 9 floors have no cycle."""
    rooms = [room for floor in ROOMS["warpweave"] for room in floor]
    assert {name.split(".")[1] for name, _ in source_files() if "." in name} == {*rooms}
    assert len(rooms) <= 20
    assert len(ROOMS["warpweave"]) <= 9


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("warpweave.kernels.norm", "import warpweave.parallel.mesh"),
        ("warpweave.kernels.norm", "def f():\n    from warpweave.layers.norm import RMSNorm"),
        ("warpweave.kernels.norm", "from warpweave.model import gpt"),
        ("warpweave.kernels.norm", "from ..model.gpt import GPT"),
        ("warpweave.kernels.norm", "from ..model import gpt"),
        ("warpweave.kernels.norm", "import safetensors"),
        ("warpweave.kernels.norm", "from einops import rearrange"),
        ("warpweave.kernels.reference", "from warpweave.kernels.norm import rms_norm"),
        ("warpweave.kernels.runtime.dispatch", "from .. import norm"),
        ("warpweave.kernels.runtime.tiles", "from warpweave.kernels.gemm import mainloop"),
        ("warpweave.kernels.gemm.mainloop",
         "from warpweave.kernels.attention.launch import padded"),
        ("warpweave.kernels.norm.forward", "from warpweave.kernels.attention import device"),
        ("warpweave.parallel.data.zero", "from warpweave.parallel.pipeline.stage import Segment"),
        ("warpweave.parallel.context.ring", "from warpweave.parallel.tensor import linear"),
        ("warpweave.parallel.mesh",
         "import importlib; importlib.import_module('warpweave.model.gpt')"),
        ("warpweave.parallel.mesh", "from warpweave.layers import norm"),
        ("warpweave.layers.norm", "from warpweave.model.gpt import GPT"),
        ("warpweave.layers.norm", "import kernels"),
        ("warpweave.layers.norm", "from parallel.mesh import Mesh"),
        ("warpweave.parallel.schedule.passes", "import torch"),
        ("warpweave.parallel.simulate", "from warpweave.parallel.mesh import Mesh"),
        ("warpweave.model.engine", "from warpweave.prove.layouts import Layout"),
        ("warpweave.data.text", "from warpweave.checkpoint import latest"),
        ("warpweave.checkpoint.files", "from warpweave.checkpoint.steps import latest"),
        ("warpweave.checkpoint.read", "from warpweave.checkpoint import save"),
        ("warpweave.prove.expected", "from warpweave.prove.proof import prove_layout"),
        ("warpweave.machine.tune.calls", "from warpweave.machine.tune import aot"),
        ("warpweave.machine.doctor.check", "from warpweave.machine.doctor.machine import drain"),
        ("warpweave.prove.proof", "from warpweave.machine.doctor.check import worst"),
        ("warpweave.prove.command", "from warpweave.machine.doctor.command import run"),
        ("warpweave.train.metrics", "from warpweave.prove.command import run"),
        ("warpweave.model.plain", "from warpweave.kernels.reference import attention"),
        ("warpweave.model.plain", "import safetensors"),
        ("warpweave.model.gpt", "import scipy"),
        ("warpweave.model.gpt", "import pickle"),
        ("warpweave.model.gpt", "from torch.distributed import rpc"),
        ("warpweave.model.gpt", "import torch.distributed.checkpoint as dcp"),
        ("warpweave.model.gpt", "from torch.distributed.checkpoint.state_dict import x"),
        ("warpweave.model.gpt", "dist.all_gather_object(a, b)"),
        ("warpweave.model.gpt", "from torch.distributed import broadcast_object_list"),
        ("warpweave.model.gpt", "torch.load(path)"),
        ("warpweave.model.gpt", "from torch import load"),
        ("warpweave.model.gpt", "read(path, weights_only=False)"),
        ("warpweave.model.gpt", "np.load(path, allow_pickle=True)"),
    ],
)  # fmt: skip
def test_each_planted_fault_is_seen(module: str, text: str) -> None:
    known = {name for name, _ in source_files()} | {"warpweave.model.gpt", "warpweave.kernels.norm"}
    assert complaints(module, text, known) != []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "warpweave.parallel.simulate",
            "from warpweave.parallel.schedule.actions import Action\nimport ast",
        ),
        ("warpweave.layers.norm", "from warpweave.kernels import norm\nimport torch"),
        ("warpweave.kernels.runtime.dispatch", "from warpweave.kernels.reference import x"),
        ("warpweave.kernels.norm.forward", "from warpweave.kernels.norm.shared import load"),
        ("warpweave.parallel.pipeline.stage", "from warpweave.parallel.data.unit import Unit"),
        ("warpweave.prove.proof", "from warpweave.model.engine import Engine"),
        ("warpweave.machine.tune", "from warpweave.machine.tune.command import main"),
        ("warpweave.__main__", "from warpweave import __version__, cli"),
        ("warpweave.model.gpt", "import safetensors\nnp.load(path, allow_pickle=False)"),
    ],
)
def test_what_is_allowed_is_not_complained_of(module: str, text: str) -> None:
    known = {name for name, _ in source_files()} | {"warpweave.kernels.norm"}
    assert complaints(module, text, known) == []


def test_nothing_imports_tests_or_benchmarks_and_they_import_no_bare_rung() -> None:
    for folder in ("tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            names = set(imports("x", ast.parse(path.read_text()), set()))
            bare = {name for name in names if name.split(".")[0] in RUNGS[:3]}
            assert not bare, f"{path.relative_to(ROOT)} imports bare {bare}"


def text_files() -> Iterator[Path]:
    folders = (*RUNGS, "tests", "benchmarks", "examples", "docs", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    for path in sorted(paths + list(ROOT.iterdir())):
        if path.is_file() and path.suffix in (
            "", ".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".sh", ".cfg",
        ):  # fmt: skip
            yield path


def test_no_path_of_any_machine_is_written_down() -> None:
    # A path from the root into somebody's home or workplace; built so as not to match itself.
    homes = "|".join(("work", "root", "home", "Users", "opt", "farm", "mnt", "scratch"))
    pattern = re.compile(rf"(?<![\w.)\]}}>*])/({homes})/\w")
    assert pattern.search("see " + "/wo" + "rk/main")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in text_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


# ---------------------------------------------------------------- one name, one meaning

# `reference` and `cost` have an entry for each op, under its name. The witness draws independently.
# A command is `main`, with options read by `parse` and work done by `run`.
MIRRORS = ("kernels/reference.py", "kernels/cost.py", "warpweave/model/plain.py")
COMMANDS = ("main", "parse", "run")


def _doubles(files: dict[str, str]) -> dict[str, list[str]]:
    """Return names of functions and classes at the top of several files -> these files."""
    places: dict[str, list[str]] = {}
    for path, text in files.items():
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own = path not in MIRRORS and node.name not in COMMANDS
                if own and path not in places.setdefault(node.name, []):
                    places[node.name].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def test_no_name_stands_in_several_files() -> None:
    files = {
        str(path.relative_to(ROOT)): path.read_text()
        for rung in RUNGS
        for path in sorted((ROOT / rung).rglob("*.py"))
    }
    assert _doubles(files) == {}


def test_a_name_in_two_files_is_seen() -> None:
    one, two = "def _save(): ...\n", "class Row: ...\ndef main(): ...\n"
    files = {"a.py": one + two, "b.py": one, "c.py": two, "kernels/cost.py": one}
    assert _doubles(files) == {"_save": ["a.py", "b.py"], "Row": ["a.py", "c.py"]}
