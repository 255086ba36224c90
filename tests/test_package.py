"""The package as a whole: its layers, its exported names, and that the documents say what is so."""

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import multitower as mt

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "multitower"
MODULES = sorted(str(p.relative_to(SOURCE).with_suffix("")).replace("/", ".") for p in SOURCE.rglob("*.py"))

# A module imports modules of layers below its own, or of its own that stand before it.
LAYERS = [
    ["errors", "upstream", "device_spec", "device", "parameters", "throughput", "stopping", "storage"],
    ["schedule", "cifar10_files", "pictures", "volume_files"],
    ["tower", "nested", "wiring", "collectives", "moments"],
    ["exchange", "reduce", "norm", "gradient_norms"],
    ["placement", "batches", "hooks", "parts"],
    ["step", "towers"],
    ["checks", "ahead", "loops", "trainer"],
    ["jobs.__init__", "jobs.digits", "jobs.cifar10", "jobs.volumes", "job"],
    ["checkpoint", "epochs", "summaries", "run_directory", "train"],
    [
        f"verification.{m}"
        for m in ("inventory", "row_batches", "model_copy", "twins", "rounding", "experiment", "forward")
    ],
    [f"verification.{m}" for m in ("diagnosis", "comparison", "report", "verifier", "__init__", "job")],
    [f"scaling.{m}" for m in ("exchanges", "report", "advice", "plot", "child", "process", "study", "__init__")],
    [
        f"trials.{m}"
        for m in (
            "guard",
            "space",
            "early",
            "readout",
            "snapshot",
            "store",
            "gpus",
            "lease",
            "slots",
            "process",
            "study",
        )
    ],
    [f"trials.{m}" for m in ("machine", "ray_cluster", "runner", "results", "picture", "live", "search", "__init__")],
    [f"timeline.{m}" for m in ("intervals", "graph", "categories", "pairs", "recording", "profile", "meetings")],
    [f"timeline.{m}" for m in ("breakdown", "critical", "advice", "lanes", "chrome", "picture", "page")],
    [f"timeline.{m}" for m in ("report", "tracing", "__init__", "job")],
    ["start", "console", "cli"],
]
ORDER = [module for layer in LAYERS for module in layer]


def imported(module):
    """Names of our modules that a module imports, anywhere in it."""
    tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            here = module.split(".")[: -node.level]
            yield from [
                ".".join([*here, name]) for name in ([node.module] if node.module else [a.name for a in node.names])
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multitower"):
            yield node.module.removeprefix("multitower").removeprefix(".") or "__init__"


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_go_downwards(module):
    assert module in ORDER, f"{module} has no layer yet: give it one here and in docs/architecture.md"
    known = {m for m in imported(module) if f"{m}.__init__" not in ORDER and m not in ("__init__", "__version__")}
    above = [m for m in known if ORDER.index(m) >= ORDER.index(module)]
    assert not above, f"{module} imports {above}, which stand above it"


def test_only_one_module_speaks_to_each_part_of_tensorflow():
    owners = {
        r"tf\.config\b": {"device"},
        r"Collective(Reduce|Gather)V2\(": {"collectives"},
        r"tf\.distribute\.": set(),
        r"keras\.src|tensorflow\.python|tf\.__internal__|\._keras_mask": {"upstream"},
    }
    for pattern, allowed in owners.items():
        code = {m: "\n".join(_code_lines(m)) for m in MODULES}
        users = {m for m, text in code.items() if re.search(pattern, text)}
        assert users <= allowed, f"{pattern} is used in {users - allowed}"


def _code_lines(module):
    """The lines of a module without docstrings and comments."""
    tree = ast.parse((SOURCE / f"{module.replace('.', '/')}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree).splitlines()


def test_every_exported_name_exists_and_is_documented():
    assert set(mt.__all__) == set(mt._EXPORTS)
    for name in mt.__all__:
        assert getattr(mt, name).__doc__, f"multitower.{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'replicates'"):
        _ = mt.replicates


def test_public_modules_are_loaded_by_their_names():
    assert mt.__getattr__("schedule").staircase is mt.schedule.staircase
    assert "schedule" in dir(mt)


def test_exported_names_are_not_hidden_by_modules_of_the_same_name():
    for module in MODULES:
        importlib.import_module(f"multitower.{module}".removesuffix(".__init__"))
    assert not {name for name, module in mt._EXPORTS.items() if module} & set(MODULES)
    assert callable(mt.devices)


DOCUMENTED = ["towers", "trainer", "norm", "reduce", "schedule", "verification.verifier", "trials"]
DOCUMENTED += ["timeline.tracing", "timeline.intervals"]


@pytest.mark.parametrize("module", DOCUMENTED)
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"multitower.{module}"))
    assert result.attempted
    assert not result.failed


def run(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def python_blocks(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.mark.parametrize("block", python_blocks("README.md"), ids=["fit", "loop"])
def test_programs_in_the_readme_run(block, tmp_path):
    assert run(["-c", block], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["keras_fit", "custom_loop"])
def test_examples_run(example, tmp_path):
    assert "accuracy" in run([str(ROOT / "examples" / f"{example}.py")], tmp_path)


def test_the_file_tree_in_the_readme_is_complete():
    tree = (ROOT / "README.md").read_text().split("src/multitower/")[-1]
    listed = set(re.findall(r"^  (\w+)\.py ", tree, re.MULTILINE))
    assert "  verification/ " in tree
    assert "  scaling/ " in tree
    assert "  trials/ " in tree
    assert all(f"  {package}/ " in tree for package in ("verification", "timeline"))
    assert listed == {m for m in MODULES if "." not in m and m != "__init__"}
