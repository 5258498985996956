"""The project holds what it says about itself: layers, file sizes, the README's commands."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "dspark_hf"

# A module imports from its own layer and those before it. `mathematics` is pure: not even the model layer.
LAYERS = {
    "leaf": {"_compat", "ops", "stats"},
    "model": {"configuration_dspark", "heads", "modeling_dspark", "draft_cache", "layers", "sharing", "checkpoints"},
    "mathematics": {
        *("sampling", "scheduling", "copying", "draft_gate", "draft_width", "row_values"),
        *("calibration", "confidence_metrics", "throughput", "cost_curves", "fingerprints", "plots"),
    },
    "runtime": {"generation"},
    "edge": {"calibration_run", "training", "benchmarking", "demo", "cli", "__init__"},
}
ALLOWED = {
    "leaf": {"leaf"},
    "model": {"leaf", "model"},
    "mathematics": {"leaf", "mathematics"},
    "runtime": {"leaf", "model", "mathematics", "runtime"},
    "edge": set(LAYERS),
}
LAYER_OF = {unit: layer for layer, units in LAYERS.items() for unit in units}


def unit_of(path: Path) -> str:
    """Top-level module or subpackage of the package that `path` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    """Units of the package that a module imports, at its top or inside functions, but not for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    type_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    # The parts of the package a relative import starts from: one dot is the module's own package.
    here = ("dspark_hf", *path.relative_to(PACKAGE).parts[:-1])
    targets = []
    for node in ast.walk(tree):
        if node in type_only:
            continue
        if isinstance(node, ast.Import):
            targets += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            targets += [(*base, alias.name) for alias in node.names]
    units = {target[1] if len(target) > 1 else "__init__" for target in targets if target[0] == "dspark_hf"}
    # `from .. import DSparkDraftModel` names a class of the package's root, not a module.
    return {unit if unit in LAYER_OF or (PACKAGE / unit).exists() else "__init__" for unit in units}


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_layers(path):
    unit = unit_of(path)
    assert unit in LAYER_OF, f"{unit} belongs to no layer: give it one in LAYERS"
    for imported in imported_units(path):
        assert LAYER_OF[imported] in ALLOWED[LAYER_OF[unit]], f"{unit} ({LAYER_OF[unit]}) imports {imported}"


def test_the_layer_test_sees_relative_and_nested_imports(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    module = tmp_path / "checkpoints" / "native.py"
    module.parent.mkdir()
    module.write_text("from ..heads import MarkovHead\n\ndef late():\n    from .. import generation, DSparkConfig\n")
    assert imported_units(module) == {"heads", "generation", "__init__"}


def test_files_stay_readable():
    folders = (PACKAGE, ROOT / "benchmarks", ROOT / "examples", ROOT / "hub", ROOT / "space")
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for f in folders for path in f.rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > 450} == {}


def test_readme_names_commands_that_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 250
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
    extras = set(re.findall(r"`\[([a-z]+)\]`", readme))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = pyproject.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert extras == set(re.findall(r"^([a-z]+) = \[", section, re.MULTILINE))


def test_readme_names_things_that_exist():
    import dspark_hf

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {"record_generation", *re.findall(r"\b((?:DSpark|Throughput|Round|GenerateDSpark)[A-Z]\w+)\b", readme)}
    assert {name for name in names if not hasattr(dspark_hf, name)} == set()


def test_no_machine_paths_in_the_project():
    # Tests, demo and benchmarks take places as variables or arguments; only the CI script knows where data lies.
    files = [
        path for folder in ("src", "tests", "benchmarks", "docs", "space") for path in (ROOT / folder).rglob("*.py")
    ]
    files += [ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    places = re.compile(r"\.\./" + r"shared|/(?:home|root|Users|tmp)/")
    assert [str(path) for path in files if places.search(path.read_text(encoding="utf-8"))] == []
