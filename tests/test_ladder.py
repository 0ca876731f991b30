"""The ladder, read from the imports with `ast`: every edge goes down, nothing forbidden is used."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNGS = ("kernels", "parallel", "layers", "warpweave")  # lowest first
# The rooms and files of a package, lowest first; a file imports from its own room or those before
# it. What is not named stands above them all.
ROOMS = {
    "warpweave": (
        ("kernels",),
        ("parallel",),
        ("layers",),
        ("declare_layouts", "messages", "transfer"),
        (
            "changes",
            "command_line",
            "compat",
            "config",
            "declare_memory",
            "dtypes",
            "exchange",
            "lazy",
            "modes",
            "plain_gpt",
            "shards",
        ),
        ("config_file", "heartbeat", "interrupt", "lr_schedule", "option_kinds"),
        ("processes",),
        ("blame", "declare_rules", "gpus"),
        ("declare", "explain", "styles"),
        ("gpt",),
        ("generate",),
        ("engine_checks", "engine_stage"),
        ("engine_passes",),
        ("boards", "checkpoint", "data", "engine", "hf", "launch", "tune"),
        ("convert", "saved_state"),
        ("timeline",),
        ("plan",),
        ("idle_options",),
        ("export_config", "prove", "sample_config", "train_config"),
        (
            "batches",
            "collectives",
            "doctor",
            "measured",
            "metrics",
            "resume",
        ),
        ("chosen", "not_finite", "replicas", "server"),
        ("agree", "export", "sample"),
        ("trainer",),
        ("train",),
        ("elastic",),
        ("trials",),
        ("cli",),
    ),
    "warpweave.kernels": (
        ("reference", "cost", "devices", "rope_scaling", "words"),
        ("runtime",),
        ("dropout", "merge", "activation", "rope"),
        ("gemm",),
        ("overlap",),
        ("attention", "norm", "cross_entropy", "mlp", "qkv"),
    ),
    "warpweave.parallel": (
        ("words",),
        (
            "buffers",
            "shard",
            "layout",
            "collectives",
            "group_options",
            "observe",
            "algorithms",
            "schedule",
            "symmetric",
        ),
        ("mesh", "messages"),
        ("checked", "run_collective"),
        ("simulate", "context", "data", "tensor"),
        ("pipeline", "server"),
    ),
    "warpweave.parallel.server": (
        ("clocks", "link"),
        ("shard",),
        ("server",),
        ("worker",),
        ("replay",),
    ),
    "warpweave.checkpoint": (
        ("files",),
        ("manifest",),
        ("steps",),
        ("read",),
        ("save",),
        ("background",),
    ),
    "warpweave.convert": (
        ("fields",),
        ("families",),
        ("tensors",),
        ("folder",),
        ("beside",),
        ("source",),
        ("write",),
    ),
    "warpweave.data": (
        ("files",),
        ("split", "tokenizer"),
        ("dataset",),
        ("token_file",),
        ("text",),
        ("source",),
    ),
    "warpweave.doctor": (
        ("check", "options"),
        ("machine",),
        ("kernels", "ranks", "times"),
        ("command",),
    ),
    "warpweave.elastic": (
        ("connections", "seat"),
        ("membership",),
        ("trainer",),
        ("rank",),
        ("run",),
    ),
    "warpweave.prove": (
        ("layouts", "typecheck"),
        ("expected", "options"),
        ("truth",),
        ("proof",),
        ("command",),
    ),
    "warpweave.server": (("log", "replay_config"), ("roles",), ("replay", "run")),
    "warpweave.tune": (
        ("calls", "timing"),
        ("aot", "options"),
        ("candidates",),
        ("search",),
        ("command",),
    ),
}
STDLIB_ONLY = (
    "warpweave.parallel.algorithms",
    "warpweave.parallel.schedule",
    "warpweave.parallel.server.clocks",
    "warpweave.parallel.simulate",
    "warpweave.parallel.words",
)
ALONE = {"warpweave.plain_gpt"}
LOWER_DEPENDENCIES = {"torch", "triton", "numpy", "spmd_types"}
TOP_DEPENDENCIES = LOWER_DEPENDENCIES | {
    "safetensors", "tyro", "tokenizers", "tqdm", "rich", "matplotlib", "tensorboard",
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
    """Whether `module` imports, in `name`, from a room above its own or beside it."""
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
    """The index in RUNGS of a module of ours."""
    parts = module.split(".")
    return RUNGS.index(parts[1]) if len(parts) > 1 and parts[1] in RUNGS[:3] else 3


def source_files() -> Iterator[tuple[str, Path]]:
    """(module name as it is imported, file) of everything that is installed."""
    for rung in RUNGS:
        for path in sorted((ROOT / rung).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if rung == "warpweave" else ("warpweave", *parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(module: str, tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Every module that `tree` imports, also inside functions, relatively or by import_module."""
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
    """What is wrong with a source file, given the names of all modules of ours."""
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
                allowed = {"torch", "numpy"}
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


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("warpweave.kernels.norm", "import warpweave.parallel.mesh"),
        ("warpweave.kernels.norm", "def f():\n    from warpweave.layers.norm import RMSNorm"),
        ("warpweave.kernels.norm", "from warpweave import gpt"),
        ("warpweave.kernels.norm", "from ..gpt import GPT"),
        ("warpweave.kernels.norm", "from .. import gpt"),
        ("warpweave.kernels.norm", "import safetensors"),
        ("warpweave.kernels.reference", "from warpweave.kernels.norm import rms_norm"),
        ("warpweave.kernels.runtime.dispatch", "from .. import norm"),
        ("warpweave.kernels.runtime.tiles", "from warpweave.kernels.gemm import mainloop"),
        (
            "warpweave.kernels.gemm.mainloop",
            "from warpweave.kernels.attention.launch import padded",
        ),
        ("warpweave.kernels.norm.forward", "from warpweave.kernels.attention import device"),
        ("warpweave.parallel.data.zero", "from warpweave.parallel.pipeline.stage import Segment"),
        ("warpweave.parallel.context.ring", "from warpweave.parallel.tensor import linear"),
        ("warpweave.parallel.mesh", "import importlib; importlib.import_module('warpweave.gpt')"),
        ("warpweave.parallel.mesh", "from warpweave.layers import norm"),
        ("warpweave.layers.norm", "from warpweave.gpt import GPT"),
        ("warpweave.layers.norm", "import kernels"),
        ("warpweave.layers.norm", "from parallel.mesh import Mesh"),
        ("warpweave.parallel.schedule.passes", "import torch"),
        ("warpweave.parallel.simulate", "from warpweave.parallel.mesh import Mesh"),
        ("warpweave.engine", "from warpweave.prove.layouts import Layout"),
        ("warpweave.data.text", "from warpweave.checkpoint import latest"),
        ("warpweave.checkpoint.files", "from warpweave.checkpoint.steps import latest"),
        ("warpweave.checkpoint.read", "from warpweave.checkpoint import save"),
        ("warpweave.prove.expected", "from warpweave.prove.proof import prove_layout"),
        ("warpweave.tune.calls", "from warpweave.tune import aot"),
        ("warpweave.doctor.check", "from warpweave.doctor.machine import drain"),
        ("warpweave.prove.proof", "from warpweave.doctor.check import worst"),
        ("warpweave.prove.command", "from warpweave.train import main"),
        ("warpweave.metrics", "from warpweave.cli import main"),
        ("warpweave.plain_gpt", "from warpweave.kernels.reference import attention"),
        ("warpweave.plain_gpt", "import safetensors"),
        ("warpweave.gpt", "import scipy"),
        ("warpweave.gpt", "import pickle"),
        ("warpweave.gpt", "from torch.distributed import rpc"),
        ("warpweave.gpt", "import torch.distributed.checkpoint as dcp"),
        ("warpweave.gpt", "from torch.distributed.checkpoint.state_dict import x"),
        ("warpweave.gpt", "dist.all_gather_object(a, b)"),
        ("warpweave.gpt", "from torch.distributed import broadcast_object_list"),
        ("warpweave.gpt", "torch.load(path)"),
        ("warpweave.gpt", "from torch import load"),
        ("warpweave.gpt", "read(path, weights_only=False)"),
        ("warpweave.gpt", "np.load(path, allow_pickle=True)"),
    ],
)
def test_each_planted_fault_is_seen(module: str, text: str) -> None:
    known = {name for name, _ in source_files()} | {"warpweave.gpt", "warpweave.kernels.norm"}
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
        ("warpweave.prove.proof", "from warpweave.engine import Engine"),
        ("warpweave.tune", "from warpweave.tune.command import main"),
        ("warpweave.__main__", "from warpweave import __version__, cli"),
        ("warpweave.gpt", "import safetensors\nnp.load(path, allow_pickle=False)"),
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

# `reference` and `cost` have an entry for each op, under its name; the witness draws for itself;
# a command is `main`, of which `parse` reads the options and `run` does the work.
MIRRORS = ("kernels/reference.py", "kernels/cost.py", "warpweave/plain_gpt.py")
COMMANDS = ("main", "parse", "run")


def _doubles(files: dict[str, str]) -> dict[str, list[str]]:
    """Names of functions and classes at the top of several files -> these files."""
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
