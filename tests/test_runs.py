"""Batches of notebooks: checked before they start, cached, resumed after a kill, and never silently wrong."""
import json, os, signal, subprocess, sys, time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from debias_clip import runs
from debias_clip.results import find_checkout, read_record, run_folder, write_metrics
from debias_clip.runs import job_state, read_preset, run_preset

REPO = Path(__file__).parents[1]
PARAMETERS = 'out = "runs/demo"\npreset = "demo"\na = 2\nlr = 0.1\nseeds = [0]\nname = "x"'
SAVE = "from debias_clip.results import write_metrics\nwrite_metrics(out, 'NAME', {'table': [{'model': 'demo', 'a': a, 'lr': lr}]})"


class Checkout:
    "A checkout in a temporary folder, with notebooks made of code cells."
    def __init__(self, root):
        self.root = root
        for folder in ("nbs/experiments", "runs/demo"): (root/folder).mkdir(parents=True)
        (root/"settings.ini").write_text("[DEFAULT]\nlib_name = debias_clip\n")

    def notebook(self, name, *cells, parameters=PARAMETERS, tags=("parameters",), save=True):
        made = [(parameters, tag) for tag in tags] + [(c, None) for c in cells] + ([(SAVE.replace("NAME", name), None)] if save else [])
        cells = [dict(cell_type="code", id=f"c{i}", source=s, outputs=[], execution_count=None, metadata={"tags": [t]} if t else {}) for i, (s, t) in enumerate(made)]
        kernel = dict(name="python3", display_name="python3", language="python")
        file = self.root/"nbs"/"experiments"/f"{name}.ipynb"
        file.write_text(json.dumps(dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)))
        return file

    def preset(self, text): (self.root/"runs"/"demo"/"params.yaml").write_text(text)
    def run(self, **options): return run_preset("demo", self.root, **options)
    def job(self, name): return next(j for j in read_preset("demo", self.root).jobs if j.name == name)
    def left(self): return sorted(f.name for f in (self.root/"runs"/"demo").iterdir() if f.name != "params.yaml")

    def command(self, *args, **options):
        env = {**os.environ, "PYTHONPATH": str(REPO)}
        return subprocess.Popen([sys.executable, "-c", "from debias_clip.runs import main; main()", *args], cwd=self.root, env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.fixture
def checkout(tmp_path): return Checkout(tmp_path)


# ---- before anything runs

@pytest.mark.parametrize("text, told", [
    ("experiments: [one]\nparameter: {a: 1}\n", "parameter: no such key; did you mean parameters?"),
    ("experiments: [one, tow]\n", "there is no 'tow'; did you mean two?"),
    ("experiments: [one]\ntwo: {a: 1}\n", "two: not in the list of experiments"),
    ("experiments: [one, one]\n", "listed twice"),
    ("parameters: {a: 1}\n", "a list of notebooks is needed; known: one, two"),
    ("experiments: [one, two]\nparameters: {seed: [1]}\n", "two: it knows no parameter 'seed'; did you mean seeds?"),
    ("experiments: [one]\none: {a: 1.5}\n", "a is 1.5 (float), the notebook's default 2 is of type int"),
    ("experiments: [one]\none: {lr: fast}\n", "lr is 'fast' (str)"),
    ("experiments: [one]\none: {seeds: 3}\n", "seeds is 3 (int)"),
    ("experiments: [one]\none: {name: no}\n", "name is False (bool)"),
    ("experiments: [one]\none: {name: 2024-01-01}\n", "name is datetime.date(2024, 1, 1)"),
    ("experiments: [one]\none: {out: /tmp}\n", "`out` is set by the runner"),
    ("experiments: [one]\none: {a: 1, a: 2}\n", "a given twice"),
    ("experiments: [one]\none: {a: [1}\n", "line 2"),
    ("- experiments\n", "`name: value` lines are needed"),
])
def test_a_wrong_preset_stops_before_the_first_notebook(checkout, text, told):
    checkout.notebook("one"); checkout.notebook("two")
    checkout.preset(text)
    with pytest.raises(ValueError) as e: checkout.run()
    assert told in str(e.value) and "params.yaml" in str(e.value)
    assert checkout.left() == []


@pytest.mark.parametrize("bad, told", [
    (dict(tags=()), "two: 0 cells tagged `parameters`"),
    (dict(tags=("parameters", "parameters")), "two: 2 cells tagged"),
    (dict(parameters=PARAMETERS + "\nb = a * 2"), "`b = a * 2` in the parameters cell"),
    (dict(parameters="a = 2"), "two: it has no parameter `out`"),
])
def test_a_wrong_notebook_stops_before_the_first(checkout, bad, told):
    checkout.notebook("one"); checkout.notebook("two", **bad)
    checkout.preset("experiments: [one, two]\n")
    with pytest.raises(ValueError, match=told.replace("*", r"\*")): checkout.run()
    assert checkout.left() == []


def test_everything_wrong_is_told_at_once(checkout):
    checkout.notebook("one"); checkout.notebook("two", tags=())
    checkout.preset("experiments: [one, two, three]\nparameters: {A: 1}\nextra: 1\n")
    with pytest.raises(ValueError) as e: checkout.run()
    for told in ("no 'three'", "extra: no such key", "one: it knows no parameter 'A'; did you mean a?", "two: 0 cells"): assert told in str(e.value)


def test_yaml_numbers_reach_the_notebook_as_numbers(checkout):
    checkout.notebook("one", "assert lr == 1e-6 and type(lr) is float, lr", "assert seeds == [0, 1] and a == 1000 and type(a) is int")
    checkout.preset("experiments: [one]\nparameters: {lr: 1e-6, a: 1e3}\none: {seeds: [0, 1]}\n")
    assert checkout.run() == {"one": "done"}


def test_unwritable_run_folder(checkout):
    checkout.notebook("one"); checkout.preset("experiments: [one]\n")
    (checkout.root/"runs"/"demo"/".probe.tmp").mkdir()   # chmod would not stop root
    with pytest.raises(ValueError, match="runs/demo cannot be written to .*make it writable"): checkout.run()
    assert checkout.left() == [".probe.tmp"]
    assert checkout.run(dry_run=True) == {"one": "to do"}   # looking writes nothing


def test_unknown_preset_and_experiment(checkout):
    checkout.notebook("one"); checkout.preset("experiments: [one]\n")
    with pytest.raises(ValueError, match="no preset 'dmo' in runs/; did you mean demo?"): run_preset("dmo", checkout.root)
    with pytest.raises(ValueError, match="no experiment 'on'; did you mean one?"): checkout.run(only=["on"])


# ---- done, stale, cached

def test_cached_until_something_that_counts_changes(checkout, monkeypatch):
    checkout.notebook("one", "b = a + 1", "open(f'{out}/one.png', 'w').write(str(b))"); checkout.notebook("two")
    checkout.preset("experiments: [one, two]\n")
    assert checkout.run() == {"one": "done", "two": "done"}
    assert checkout.run() == {"one": "cached", "two": "cached"}
    checkout.notebook("one", "b = a + 1  # one more", "open(f'{out}/one.png', 'w').write(str(b))")
    assert checkout.run() == {"one": "cached", "two": "cached"}      # a comment makes no number
    checkout.preset("about: the same\nexperiments: [two, one]\n")
    assert checkout.run() == {"one": "cached", "two": "cached"}
    checkout.notebook("one", "b = a + 2", "open(f'{out}/one.png', 'w').write(str(b))")
    assert job_state(checkout.job("one")) == "stale: the notebook's code changed"
    checkout.preset("experiments: [one, two]\ntwo: {a: 3}\n")
    assert checkout.run(dry_run=True) == {"one": "stale: the notebook's code changed", "two": "stale: settings changed: a"}
    assert checkout.run(only=["one"]) == {"one": "done"}
    assert checkout.run() == {"one": "cached", "two": "done"}
    assert checkout.run(force=True, only=["two"]) == {"two": "done"}
    (checkout.root/"runs"/"demo"/"one.png").write_text("another")
    assert "not as it was left: one.png" in job_state(checkout.job("one"))
    monkeypatch.setattr(runs, "code_hash", lambda modules: "0"*64)
    assert "the library's code changed" in checkout.run(dry_run=True)["two"]


def test_the_record_holds_what_the_numbers_rest_on(checkout):
    checkout.notebook("one"); checkout.preset("experiments: [one]\none: {a: 5}\n")
    checkout.run()
    record = json.loads((checkout.root/"runs"/"demo"/"one.json").read_text())
    assert record["parameters"] == dict(out="runs/demo", preset="demo", a=5, lr=0.1, seeds=[0], name="x")
    assert record["key"] == checkout.job("one").key and len(record["key"]) == 12
    assert record["metrics"] == {"table": [{"model": "demo", "a": 5, "lr": 0.1}]}
    assert {"python", "torch", "open_clip_torch", "debias_clip"} <= record["versions"].keys()
    assert record["git"] is None and record["seconds"] > 0 and "cores" in record["device"]


def test_no_path_of_this_machine_is_kept(checkout):
    checkout.notebook("one", "import sys, warnings, pathlib\nwarnings.warn('here')\nprint(pathlib.Path.cwd()/'x', sys.executable, pathlib.Path.home())",
                      "print('1%\\r2%\\r3%\\nend')")
    checkout.preset("experiments: [one]\n")
    assert checkout.run() == {"one": "done"}
    text = (checkout.root/"runs"/"demo"/"one.ipynb").read_text()
    for path in (str(checkout.root), sys.prefix, str(Path.home()), "ipykernel_"): assert path not in text, path
    cells = json.loads(text)["cells"]
    assert [o["text"] for o in cells[3]["outputs"]] in (["3%\nend\n"], [["3%\n", "end\n"]])
    metadata = json.loads(text)["metadata"]["papermill"]
    assert (metadata["input_path"], metadata["output_path"]) == ("nbs/experiments/one.ipynb", "runs/demo/one.ipynb")


def test_a_record_cut_in_half_is_not_done(checkout):
    checkout.notebook("one"); checkout.preset("experiments: [one]\n")
    checkout.run()
    record = checkout.root/"runs"/"demo"/"one.json"
    record.write_text(record.read_text()[:200])
    assert job_state(checkout.job("one")) == "to do"
    assert checkout.run() == {"one": "done"}


# ---- failures

def test_a_failing_cell_is_named_and_the_others_go_on(checkout):
    checkout.notebook("one"); checkout.notebook("two")
    checkout.preset("experiments: [one, two]\n")
    checkout.run()
    before = (checkout.root/"runs"/"demo"/"one.json").read_text()
    checkout.notebook("one", "# why\nx = {}['recall']", "never = 1")
    checkout.preset("experiments: [one, two]\ntwo: {a: 3}\n")
    done = checkout.command("run", "demo")
    out, err = done.communicate(timeout=60)
    assert done.returncode == 1
    assert "one failed in cell 2 of 4, `x = {}['recall']`: KeyError: 'recall'" in out and "runs/demo/one.failed.ipynb" in out
    assert "failed, see above: one" in err
    assert (checkout.root/"runs"/"demo"/"one.json").read_text() == before   # nothing already saved is lost
    assert job_state(checkout.job("two")) == "done"
    assert "KeyError" in (checkout.root/"runs"/"demo"/"one.failed.ipynb").read_text()
    checkout.notebook("one")
    assert checkout.run() == {"one": "cached", "two": "cached"} and "one.failed.ipynb" in checkout.left()
    assert checkout.run(force=True, only=["one"]) == {"one": "done"} and "one.failed.ipynb" not in checkout.left()


def test_a_kernel_that_dies_and_a_notebook_without_numbers(checkout):
    checkout.notebook("one", "import os\nos._exit(9)"); checkout.notebook("two", save=False)
    checkout.preset("experiments: [one, two]\n")
    results = checkout.run()
    assert "one failed in cell 2 of 3, `import os`: DeadKernelError" in results["one"]
    assert "ended without write_metrics(out, 'two'" in results["two"]
    assert checkout.left() == ["one.failed.ipynb", "two.failed.ipynb"]


def test_goes_on_after_a_kill(checkout):
    checkout.notebook("one"); checkout.notebook("two", "import os, time, pathlib\nif pathlib.Path('slow').exists():\n    pathlib.Path('pid').write_text(str(os.getpid()))\n    time.sleep(60)")
    checkout.preset("experiments: [one, two]\n")
    (checkout.root/"slow").touch()
    running, pid = checkout.command("run", "demo"), checkout.root/"pid"
    try:
        for _ in range(300):
            if pid.exists() and pid.read_text(): break
            time.sleep(0.1)
        running.send_signal(signal.SIGKILL)
    finally: running.kill(); running.communicate()
    assert "two.partial.ipynb" in checkout.left() and job_state(checkout.job("two")) == "to do"
    for _ in range(100):   # its kernel must not go on alone
        if not _alive(int(pid.read_text())): break
        time.sleep(0.1)
    assert not _alive(int(pid.read_text()))
    (checkout.root/"slow").unlink()
    assert checkout.run() == {"one": "cached", "two": "done"}
    assert checkout.left() == ["one.ipynb", "one.json", "two.ipynb", "two.json"]


def _alive(pid):
    try: return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z" if Path("/proc/self").exists() else os.kill(pid, 0) is None
    except OSError: return False


# ---- the command

def test_the_command_prints_the_main_table_and_where_things_are(checkout):
    checkout.notebook("main_table", "open(f'{out}/main_table.png', 'w').close()"); checkout.notebook("one")
    checkout.preset("about: numbers that mean nothing\nexperiments: [one, main_table]\n")
    done = checkout.command("run", "demo")
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    end = out[out.index("main_table:"):]
    for told in ("model", "demo", "numbers that mean nothing", "runs/demo/main_table.ipynb", "runs/demo/main_table.png"): assert told in end
    done = checkout.command("run", "runs/demo", "--dry-run")
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0 and out.count("cached") == 2


def test_the_command_outside_a_checkout_says_so(tmp_path):
    done = subprocess.run([sys.executable, "-c", "from debias_clip.runs import main; main()", "run", "quick"], cwd=tmp_path, text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(REPO)})
    assert done.returncode == 1 and "no debias_clip checkout" in done.stderr and "Traceback" not in done.stderr


def test_help_is_quick_for_it_imports_nothing_heavy(tmp_path):
    code = "import sys; from debias_clip.runs import app\ntry: app(['COMMAND', '--help'] if 'COMMAND' else ['--help'])\nexcept SystemExit as e: assert not e.code\n" \
           "heavy = {'torch', 'papermill', 'pandas', 'open_clip', 'matplotlib'} & set(sys.modules); assert not heavy, heavy"
    for command in ("", "run", "train", "eval", "data"):
        done = subprocess.run([sys.executable, "-c", code.replace("COMMAND", command)], cwd=tmp_path, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(REPO)})
        assert done.returncode == 0 and "Usage" in done.stdout, (command, done.stderr)


@pytest.fixture
def own_captions(tmp_path):
    from PIL import Image
    rows = ["image,caption"]
    for i, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (48, 48), colour).save(tmp_path/f"{i}.png")
        rows.append(f"{i}.png,A {colour} square. It fills the picture. Nothing else is there.")
    (tmp_path/"captions.csv").write_text("\n".join(rows))
    return tmp_path


def invoke(*args): return CliRunner().invoke(runs.app, [*map(str, args)])


def test_data_show_tells_both_captions(own_captions):
    shown = invoke("data", "show", own_captions, "--n", 1, "--recipe", "no_summary")
    assert shown.exit_code == 0, shown.output
    assert "long:  A red square. It fills the picture. Nothing else is there." in shown.output and "short: It fills the picture. Nothing else is there." in shown.output
    for args, told in [(("show", own_captions, "--recipe", "debia"), "did you mean debias?"), (("show", "doci"), "did you mean dci or docci?"), (("show", "docci"), "--root DIR")]:
        assert told in str(invoke("data", *args).exception)


def test_eval_takes_a_checkpoint_either_way(own_captions):
    from debias_clip.models import create_model, save_checkpoint
    save_checkpoint(create_model("scenes-clip", keep=8), own_captions/"model.safetensors")
    out = [invoke("eval", "--model", "scenes-clip", option, own_captions/"model.safetensors", "--data", own_captions) for option in ("--pretrained", "--checkpoint")]
    for shown in out: assert shown.exit_code == 0, (shown.output, shown.exception)
    assert out[0].output == out[1].output and "t2i_R@1" in out[0].output and "long" in out[0].output
    assert invoke("eval", "--model", "scenes-clip", "--data", own_captions).exit_code == 2


# ---- where results go

def test_results_land_in_the_same_folder_from_anywhere(checkout, monkeypatch):
    for folder in (checkout.root, checkout.root/"nbs"/"experiments"):
        monkeypatch.chdir(folder)
        assert run_folder("runs/demo").resolve() == (checkout.root/"runs"/"demo").resolve()
        assert not run_folder("runs/demo").is_absolute()
        assert write_metrics("runs/demo", "one", {"a": 1}).resolve().parent == (checkout.root/"runs"/"demo").resolve()
    assert find_checkout(checkout.root/"runs"/"demo") == checkout.root.resolve()
    with pytest.raises(ValueError, match="no finished one: debias-clip run demo makes it"): read_record("runs/demo", "one")


def test_the_order_of_the_arms_reaches_the_notebook_and_counts(checkout):
    "An ablation compares each arm with the one before it."
    checkout.notebook("one", "from debias_clip.results import write_metrics\nwrite_metrics(out, 'one', {'table': [{'order': ' '.join(arms)}]})", parameters=PARAMETERS + '\narms = {"start": 1}', save=False)
    params = checkout.root/"runs/demo/params.yaml"
    for order in ("{z: 1, a: {y: 1, b: 2}, m: 3}", "{a: {y: 1, b: 2}, z: 1, m: 3}"):
        params.write_text(f"experiments: [one]\nparameters: {{arms: {order}}}\n")
        assert job_state(read_preset("demo", checkout.root).jobs[0]) != "done"
        run_preset("demo", checkout.root)
        assert json.loads((checkout.root/"runs/demo/one.json").read_text())["metrics"]["table"][0]["order"] == ("z a m" if order[1] == "z" else "a z m")
        assert job_state(read_preset("demo", checkout.root).jobs[0]) == "done"
