"""The project as a whole: notebooks and modules agree, presets are right, and a wheel trains where nbdev is not installed."""
import ast, json, os, re, shutil, subprocess, sys
from pathlib import Path

import pytest
import yaml

from debias_clip.keys import imports_of
from debias_clip.runs import notebook_cells, notebook_defaults, read_preset
from debias_clip.train import TrainConfig

REPO = Path(__file__).parents[1]
NOTEBOOKS = sorted(f for f in (REPO/"nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in f.parts)
EXPERIMENTS = [f for f in NOTEBOOKS if f.parent.name == "experiments"]
name = lambda f: f.relative_to(REPO).as_posix()


def copy(to, *names):
    for n in names:
        if (REPO/n).is_dir(): shutil.copytree(REPO/n, to/n, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
        else: shutil.copy(REPO/n, to/n)
    return to


def run(*args, cwd, **env):
    env = {**{k: v for k, v in os.environ.items() if k not in ("IN_TEST", "PYTHONPATH")}, **env}
    done = subprocess.run([*map(str, args)], cwd=cwd, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(folder): return {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file() and "__pycache__" not in f.parts and ".ipynb_checkpoints" not in f.parts}


def nbdev(command, cwd): run(Path(sys.executable).with_name(command), cwd=cwd)


# ---- notebooks and modules

@pytest.mark.parametrize("command", ["nbdev_export", "nbdev_clean"])
def test_leaves_no_difference(command, tmp_path):
    copy(tmp_path, "nbs", "debias_clip", "settings.ini", "pyproject.toml")
    nbdev(command, tmp_path)
    for folder in ("nbs", "debias_clip"):
        before, after = contents(REPO/folder), contents(tmp_path/folder)
        assert sorted(before) == sorted(after), f"{command} adds or removes files"
        assert not [n for n in before if before[n] != after[n]], f"run {command} and commit what it changes"


def test_cleaning_keeps_the_parameters_tag(tmp_path):
    "Without it papermill ignores every setting, and says so only in a warning."
    copy(tmp_path, "settings.ini", "pyproject.toml")
    (tmp_path/"nbs").mkdir()
    cell = dict(cell_type="code", id="a", source="a = 1", outputs=[], execution_count=3, metadata=dict(tags=["parameters"], collapsed=True))
    text = json.dumps(dict(cells=[cell], metadata=dict(kernelspec=dict(name="python3", display_name="Mine", language="python")), nbformat=4, nbformat_minor=5))
    (tmp_path/"nbs"/"x.ipynb").write_text(text)
    nbdev("nbdev_clean", tmp_path)
    cleaned, = notebook_cells(tmp_path/"nbs"/"x.ipynb")
    assert cleaned["metadata"] == {"tags": ["parameters"]} and cleaned["execution_count"] is None


@pytest.mark.parametrize("file", NOTEBOOKS, ids=name)
def test_every_notebook(file):
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for i, cell in enumerate(notebook_cells(file)):
        assert not any(o["output_type"] == "error" for o in cell.get("outputs", [])), f"cell {i} shows an error"
        if re.search(r"(?m)^#\| *export", cell["source"]): assert len(cell["source"].splitlines()) <= 50, f"cell {i} is too long to be read: {cell['source'][:60]}"


def test_modules_import_only_those_before_them():
    exported = {re.search(r"(?m)^#\| *default_exp (\w+)", c["source"])[1]: f for f in NOTEBOOKS for c in notebook_cells(f) if "#| default_exp" in c["source"] and f.name != "index.ipynb"}
    order = list(exported)   # the notebooks' numbers are the order of reading and of importing
    for i, module in enumerate(order):
        late = imports_of((REPO/"debias_clip"/f"{module}.py").read_text(encoding="utf-8")) - set(order[:i])
        assert not late, f"{module} imports {', '.join(sorted(late))}, which comes later"


# ---- experiments and presets

def test_the_papers_experiments_are_there(): assert {"main_table", "ablation", "backbones", "permutation"} <= {f.stem for f in EXPERIMENTS}


@pytest.mark.parametrize("file", EXPERIMENTS, ids=name)
def test_every_experiment(file):
    defaults, cells = notebook_defaults(file), notebook_cells(file)
    assert {"out", "preset"} <= defaults.keys()
    assert not [c for c in cells if c.get("outputs") or "injected-parameters" in c["metadata"].get("tags", [])], "outputs belong into runs/"
    code = "\n".join(c["source"] for c in cells if c["cell_type"] == "code" and not c["source"].lstrip().startswith("%"))
    assert f'"{file.stem}"' in code.replace("'", '"') and "write_metrics(" in code
    long = [d.name for d in ast.walk(ast.parse(code)) if isinstance(d, ast.FunctionDef) and d.end_lineno - d.lineno >= 5]
    assert not long, f"logic belongs into the library: {long}"


@pytest.mark.parametrize("preset", ["smoke", "quick", "toy", "paper-b16", "paper-l14"])
def test_preset_is_valid(preset):
    jobs = read_preset(preset, REPO).jobs
    assert {"main_table", "ablation", "backbones", "permutation"} <= {job.name for job in jobs}


def test_nothing_committed_names_a_machine():
    files = [*NOTEBOOKS, REPO/"README.md", *(f for f in (REPO/"runs").rglob("*") if f.suffix in (".ipynb", ".json", ".yaml", ".csv") and "models" not in f.parts and "cache" not in f.parts)]
    found = {name(f): m[0] for f in files if (m := re.search(r"(?<![\w.~])/(?:home|root|work|Users)/\S{,40}", f.read_text(encoding="utf-8")))}
    assert not found


# ---- the front page

def test_readme_is_the_index_notebook():
    sys.path.insert(0, str(REPO/"tools"))
    try: from readme import readme
    finally: sys.path.pop(0)
    assert (REPO/"README.md").read_text(encoding="utf-8") == readme(), "run `make readme`"


def test_the_readmes_configuration_is_one():
    "What it leaves out are the defaults."
    block, = re.findall(r"```yaml\n(.*?)```", (REPO/"README.md").read_text(encoding="utf-8"), re.S)
    assert TrainConfig.from_dict(yaml.safe_load(block)) == TrainConfig(data="my_folder", init="openai")


def test_the_index_shows_what_running_it_shows():
    "The numbers of the front page are those in runs/toy."
    import nbformat
    from nbclient import NotebookClient
    shown = nbformat.read(REPO/"nbs"/"index.ipynb", as_version=4)
    again = NotebookClient(nbformat.from_dict(json.loads(json.dumps(shown))), timeout=120, kernel_name="python3", resources={"metadata": {"path": str(REPO/"nbs")}}).execute()
    texts = lambda nb: [o.get("data", {}).get("text/markdown", o.get("data", {}).get("text/plain", o.get("text"))) for c in nb.cells if c.cell_type == "code" for o in c.outputs if o.get("name") != "stderr"]
    assert texts(again) == texts(shown), "run `make readme`"


# ---- as others install it

TRAIN_A_LITTLE = """
import sys
for missing in ("nbdev", "fastcore", "execnb", "ghapi"): sys.modules[missing] = None   # importing them raises
import importlib, pkgutil
import debias_clip
assert debias_clip.__file__.startswith(sys.argv[1]), debias_clip.__file__
for module in pkgutil.iter_modules(debias_clip.__path__):
    if not module.name.startswith("_"): importlib.import_module("debias_clip." + module.name)
from debias_clip.train import TrainConfig, train
train(TrainConfig.from_dict(__import__("json").loads(sys.argv[2])), models=sys.argv[3])
print("trained")
"""
TINY = dict(data="scenes", data_options=dict(n=16), backbone="scenes-clip", keep=8, pca_dim=4, batch_size=8, epochs=1, lr=1e-3, warmup=1)


def test_a_wheel_trains_without_nbdev(tmp_path):
    source = tmp_path/"source"; source.mkdir()
    copy(source, "debias_clip", "pyproject.toml", "README.md", "LICENSE")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source, cwd=tmp_path)
    wheel, = tmp_path.glob("debias_clip-*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", tmp_path/"site", wheel, cwd=tmp_path)
    assert contents(tmp_path/"site"/"debias_clip").keys() == contents(REPO/"debias_clip").keys()   # the assets too
    out = run(sys.executable, "-c", TRAIN_A_LITTLE, tmp_path/"site", json.dumps(TINY), "models", cwd=tmp_path, PYTHONPATH=str(tmp_path/"site"))
    assert out.splitlines()[-1] == "trained"


def test_a_python_without_venv_is_told_what_to_install(tmp_path):
    "Debian's python3 comes without python3-venv."
    (tmp_path/"venv.py").write_text("raise SystemExit('ensurepip is not available')")
    done = subprocess.run([sys.executable, str(REPO/"tools"/"make_venv.py"), "env"], cwd=tmp_path, text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path), "PATH": str(tmp_path)})
    assert done.returncode == 1 and "apt-get install python3-venv" in done.stderr


def test_the_environment_is_made_once(tmp_path):
    copy(tmp_path, "Makefile", "pyproject.toml", "tools")
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}   # as typed, also where `make test` runs this
    plan = lambda: subprocess.run(["make", "-n", "run"], cwd=tmp_path, text=True, capture_output=True, env=alone).stdout
    assert "pip install" in plan()
    (tmp_path/".venv").mkdir(); (tmp_path/".venv"/"installed").touch()
    assert plan().strip().endswith("debias-clip run quick") and "pip install" not in plan()
