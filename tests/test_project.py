"""The project as a whole: notebooks and modules agree and read well, and a wheel trains without nbdev."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from debias_clip.config import TrainConfig, read_config
from debias_clip.preset import imports_of, notebook_cells, notebook_defaults, read_preset

REPO = Path(__file__).parents[1]
NOTEBOOKS = sorted(f for f in (REPO/"nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in f.parts)
EXPERIMENTS = [f for f in NOTEBOOKS if f.parent.name == "experiments"]
MODULES = sorted((REPO/"debias_clip").glob("[!_]*.py"))
CAUSES = {"ablation", "backbones", "main_table", "permutation"}   # the paper's own experiments


def name(file): return file.relative_to(REPO).as_posix()


def ignored(folder, names):
    "What copying a folder leaves out."
    return [n for n in names if n in ("__pycache__", ".ipynb_checkpoints", "models", "cache")]


def copy(to, *names):
    for n in names:
        if (REPO/n).is_dir(): shutil.copytree(REPO/n, to/n, ignore=ignored)
        else: shutil.copy(REPO/n, to/n)


def run(*args, cwd, **env):
    outside = {k: v for k, v in os.environ.items() if k not in ("IN_TEST", "PYTHONPATH")}
    done = subprocess.run([*map(str, args)], cwd=cwd, env=outside | env, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(folder):
    "The files of a folder by name."
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and not set(ignored("", f.parts))]
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}


def installed(command): return Path(sys.executable).with_name(command)


# ---- notebooks and modules

@pytest.mark.parametrize("command", ["nbdev_export", "nbdev_clean"])
def test_leaves_no_difference(command, tmp_path):
    copy(tmp_path, "nbs", "debias_clip", "settings.ini", "pyproject.toml")
    run(installed(command), cwd=tmp_path)
    for folder in ("nbs", "debias_clip"):
        before, after = contents(REPO/folder), contents(tmp_path/folder)
        assert sorted(before) == sorted(after), f"{command} adds or removes files"
        assert not [n for n in before if before[n] != after[n]], f"run {command} and commit what it changes"


def test_cleaning_keeps_the_parameters_tag(tmp_path):
    "Without it papermill ignores every setting, and says so only in a warning."
    copy(tmp_path, "settings.ini", "pyproject.toml")
    (tmp_path/"nbs").mkdir()
    metadata = dict(tags=["parameters"], collapsed=True)
    cell = dict(cell_type="code", id="a", source="a = 1", outputs=[], execution_count=3, metadata=metadata)
    kernel = dict(kernelspec=dict(name="python3", display_name="Mine", language="python"))
    text = json.dumps(dict(cells=[cell], metadata=kernel, nbformat=4, nbformat_minor=5))
    (tmp_path/"nbs"/"x.ipynb").write_text(text)
    run(installed("nbdev_clean"), cwd=tmp_path)
    cleaned, = notebook_cells(tmp_path/"nbs"/"x.ipynb")
    assert cleaned["metadata"] == {"tags": ["parameters"]} and cleaned["execution_count"] is None


def test_ruff_finds_nothing(): run(installed("ruff"), "check", "--no-cache", ".", cwd=REPO)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=name)
def test_every_notebook(file):
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for i, cell in enumerate(notebook_cells(file)):
        faults = [o for o in cell.get("outputs", []) if o["output_type"] == "error"]
        assert not faults, f"cell {i} shows an error"
        if cell["cell_type"] == "code" and "parameters" not in cell["metadata"].get("tags", []):   # an entry a line
            assert len(cell["source"].splitlines()) <= 40, f"cell {i} is too long to be read: {cell['source'][:60]}"


@pytest.mark.parametrize("file", MODULES, ids=name)
def test_no_line_of_a_module_is_too_long(file):
    "Of 120 columns, but for the list of names that nbdev writes. ruff checks the notebooks."
    text = re.sub(r"(?s)\n__all__ = \[.*?\]\n", "\n", file.read_text(encoding="utf-8"))
    assert not [line for line in text.splitlines() if len(line) > 120]


def tree_of(file):
    "A module's syntax tree, without what it does as a command."
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))]
    return tree


def test_imports_run_one_way():
    "Those within functions, too. Raises CycleError naming the modules of a circle."
    order = list(TopologicalSorter({f.stem: imports_of(ast.unparse(tree_of(f))) for f in MODULES}).static_order())
    assert set(order) == {f.stem for f in MODULES}


def imported(tree):
    "(names imported from this package, attributes of its modules) in a tree."
    ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            and (node.level or (node.module or "").startswith("debias_clip"))]
    names = [alias.name for node in ours for alias in node.names]
    modules = {alias.asname or alias.name for node in ours for alias in node.names} & {f.stem for f in MODULES}
    attributes = [node.attr for node in ast.walk(tree)
                  if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules]
    return names + attributes


@pytest.mark.parametrize("file", [*MODULES, *EXPERIMENTS], ids=name)
def test_no_private_name_is_imported(file):
    if file.suffix == ".py": tree = tree_of(file)
    else: tree = ast.parse("\n".join(c["source"] for c in notebook_cells(file) if c["cell_type"] == "code"))
    private = [n for n in imported(tree) if n.startswith("_") and not n.startswith("__")]
    assert not private, f"make them public where they are, or do without: {private}"


@pytest.mark.parametrize("file", MODULES, ids=name)
def test_no_method_is_attached_after_its_class(file):
    tree = tree_of(file)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    attached = [ast.unparse(t) for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) in classes]
    patched = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
               and "patch" in map(ast.unparse, node.decorator_list)]
    assert not attached + patched


# ---- experiments and presets

def test_the_papers_experiments_are_there(): assert CAUSES <= {f.stem for f in EXPERIMENTS}


@pytest.mark.parametrize("file", EXPERIMENTS, ids=name)
def test_every_experiment(file):
    defaults, cells = notebook_defaults(file), notebook_cells(file)
    assert {"out", "preset"} <= defaults.keys()
    injected = [c for c in cells if "injected-parameters" in c["metadata"].get("tags", [])]
    assert not injected and not [c for c in cells if c.get("outputs")], "outputs belong into runs/"
    sources = [c["source"] for c in cells if c["cell_type"] == "code" and not c["source"].lstrip().startswith("%")]
    code = "\n".join(sources)
    assert f'"{file.stem}"' in code.replace("'", '"') and "write_metrics(" in code
    functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
    long = [f.name for f in functions if f.end_lineno - f.lineno >= 5]
    assert not long, f"logic belongs into the library: {long}"


@pytest.mark.parametrize("preset", ["smoke", "quick", "toy", "paper-b16", "paper-l14"])
def test_preset_is_valid(preset): assert CAUSES <= {job.name for job in read_preset(preset, REPO).jobs}


def test_nothing_committed_names_a_machine():
    kinds = {".ipynb", ".json", ".yaml", ".csv", ".py", ".md", ".slurm", ".toml"}
    folders = [REPO/f for f in ("nbs", "debias_clip", "runs", "tools")]
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in kinds and not set(ignored("", f.parts))]
    named = {}
    for file in [*files, *REPO.glob("*.md"), REPO/"Makefile"]:
        match = re.search(r"(?<![\w.~])/(?:home|root|work|Users)/\S{,40}", file.read_text(encoding="utf-8"))
        if match: named[name(file)] = match[0]
    assert not named


# ---- the front page

def test_readme_is_the_index_notebook(monkeypatch):
    monkeypatch.syspath_prepend(REPO/"tools")
    from readme import readme
    assert (REPO/"README.md").read_text(encoding="utf-8") == readme(), "run `make readme`"


def test_the_readmes_configuration_is_one(tmp_path):
    "What it leaves out are the defaults."
    block, = re.findall(r"```yaml\n(.*?)```", (REPO/"README.md").read_text(encoding="utf-8"), re.S)
    (tmp_path/"config.yaml").write_text(block)
    assert read_config(tmp_path/"config.yaml")[0] == TrainConfig(data="my_folder", init="openai")


def shown_by(notebook):
    "What the code cells of a notebook show, pictures apart."
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs if o.get("name") != "stderr"]
    return [o.get("data", {}).get("text/markdown", o.get("data", {}).get("text/plain", o.get("text"))) for o in outputs]


@pytest.mark.long
def test_the_index_shows_what_running_it_shows():
    "The numbers of the front page are those in runs/toy."
    kept = nbformat.read(REPO/"nbs"/"index.ipynb", as_version=4)
    copied = nbformat.from_dict(json.loads(json.dumps(kept)))
    place = {"metadata": {"path": str(REPO/"nbs")}}
    again = NotebookClient(copied, timeout=120, kernel_name="python3", resources=place).execute()
    assert shown_by(again) == shown_by(kept), "run `make readme`"


# ---- as others install it

TRAIN_A_LITTLE = """
import importlib, json, pkgutil, sys
for missing in ("nbdev", "fastcore", "execnb", "ghapi"): sys.modules[missing] = None   # importing them raises
import debias_clip
assert debias_clip.__file__.startswith(sys.argv[1]), debias_clip.__file__
for module in pkgutil.iter_modules(debias_clip.__path__):
    if not module.name.startswith("_"): importlib.import_module("debias_clip." + module.name)
from debias_clip.config import TrainConfig
from debias_clip.train import train
train(TrainConfig.from_dict(json.loads(sys.argv[2])), models=sys.argv[3])
print("trained")
"""
TINY = dict(data="scenes", data_options=dict(n=16), backbone="scenes-clip", keep=8, pca_dim=4, batch_size=8, epochs=1,
            lr=1e-3, warmup=1)


@pytest.mark.long
def test_a_wheel_trains_without_nbdev(tmp_path):
    source = tmp_path/"source"
    source.mkdir()
    copy(source, "debias_clip", "pyproject.toml", "README.md", "LICENSE")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "wheel", *build, "-w", tmp_path, source, cwd=tmp_path)
    wheel, = tmp_path.glob("debias_clip-*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", tmp_path/"site", wheel, cwd=tmp_path)
    assert contents(tmp_path/"site"/"debias_clip").keys() == contents(REPO/"debias_clip").keys()   # the assets too
    scripts = (tmp_path/"site"/"bin"/"debias-clip").read_text()
    assert "from debias_clip.cli import main" in scripts
    given = tmp_path/"site", json.dumps(TINY), "models"
    out = run(sys.executable, "-c", TRAIN_A_LITTLE, *given, cwd=tmp_path, PYTHONPATH=str(tmp_path/"site"))
    assert out.splitlines()[-1] == "trained"


def test_a_python_without_venv_is_told_what_to_install(tmp_path):
    "Debian's python3 comes without python3-venv."
    (tmp_path/"venv.py").write_text("raise SystemExit('ensurepip is not available')")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)}
    make = [sys.executable, str(REPO/"tools"/"make_venv.py"), "env"]
    done = subprocess.run(make, cwd=tmp_path, text=True, capture_output=True, env=env)
    assert done.returncode == 1 and "apt-get install python3-venv" in done.stderr


def test_the_environment_is_made_once(tmp_path):
    copy(tmp_path, "Makefile", "pyproject.toml", "tools")
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}   # as typed
    def plan(target):
        return subprocess.run(["make", "-n", target], cwd=tmp_path, text=True, capture_output=True, env=alone).stdout
    assert "pip install" in plan("run")
    (tmp_path/".venv").mkdir()
    (tmp_path/".venv"/"installed").touch()
    assert plan("run").strip().endswith("debias-clip run quick --processes 2") and "pip install" not in plan("run")
    assert "pip install -e '.[docs]'" in plan("docs")   # the tools of the site, when it is built
    (tmp_path/".venv"/"docs").touch()
    assert "mkdocs build" in plan("docs") and "pip install" not in plan("docs")
    assert "pytest" in plan("test").strip().splitlines()[-1] and "pytest" in plan("check").strip().splitlines()[-1]
