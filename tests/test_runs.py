"""Batches of notebooks: checked before they start, cached, resumed after a kill, and never silently wrong."""
import ast, errno, json, os, re, signal, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from debias_clip import runs
from debias_clip.results import find_checkout, read_record, run_folder, write_metrics
from debias_clip.runs import job_state, read_preset, run_job, run_preset

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


def test_unwritable_run_folder(checkout, monkeypatch):
    checkout.notebook("one"); checkout.preset("experiments: [one]\n")
    def refuse(**where): raise OSError(errno.EROFS, "Read-only file system", str(where["dir"]))
    monkeypatch.setattr(runs.tempfile, "TemporaryFile", refuse)                       # chmod would not stop root
    with pytest.raises(ValueError, match="runs/demo cannot be written to .Read-only file system.: make it writable"): checkout.run()
    assert checkout.left() == []
    assert checkout.run(dry_run=True) == {"one": "to do"}   # looking writes nothing


def test_many_commands_may_look_whether_a_folder_can_be_written(checkout):
    with ThreadPoolExecutor(8) as pool: assert list(pool.map(lambda _: runs._check_writable(checkout.root, "runs/demo"), range(400))) == [None]*400
    assert checkout.left() == []


@pytest.mark.parametrize("settings, told", [
    ("one: {arms: {A: {recipe: debias}, B: {recpie: debias}}}", "one: .*recpie"),
    ("one: {arms: {A: {recipe: debais}}}", "one: There is no recipe 'debais'"),
    ("one: {finetuning: {data: scenes, data_options: {split: trian}, backbone: scenes-clip, batch_size: 32, pca_dim: 8, context_length: 88, keep: 8}}", "one: data scenes: The offline world has no split 'trian'"),
    ("one: {finetuning: {data: scenes, data_options: {spilt: train}, backbone: scenes-clip, batch_size: 32, pca_dim: 8, context_length: 88, keep: 8}}", "one: data scenes: .*spilt"),
    ("one: {finetuning: {data: mine.csv, backbone: scenes-clip, batch_size: 32, pca_dim: 8, context_length: 88, keep: 8}}", "one: data mine.csv is not there"),
    ("one: {finetuning: {data: sharegpt4v, root: disk, backbone: scenes-clip, batch_size: 32, pca_dim: 8, context_length: 88, keep: 8}}", "one: sharegpt4v: there is no folder disk"),
    ("one: {tests: {t: {data: docic, root: x}}}", "one: tests: t: there is no data set 'docic'; did you mean dci or docci"),
    ("one: {tests: {t: {data: docci}}}", "one: tests: t: where does docci lie"),
    ("one: {tests: {t: {data: docci, rot: x}}}", "one: tests: t is .*`data` is needed, and `root` and `options`"),
    ("one: {tests: {t: {root: x}}}", "one: tests: t is .*`data` is needed"),
    ("one: {pretraining: {batch_size: 32}, finetuning: {batch_size: 32}}", "one: KeyError..backbone"),
])
def test_what_would_stop_a_notebook_after_hours_stops_it_before(checkout, settings, told):
    "One at a time and side by side; the plan says it too."
    experiment(checkout, "one"); checkout.notebook("two")
    checkout.preset(f"experiments: [two, one]\n{settings}\n")
    for start in (checkout.run, lambda: runs.run_side_by_side("demo", checkout.root)):
        with pytest.raises(ValueError, match=told): start()
    assert checkout.left() == []
    preset = read_preset("demo", checkout.root)
    if "arms" not in settings and "KeyError" not in told: assert re.search("not ready: " + told, runs.plan_text(preset, preset.jobs, {}))


def test_everything_that_is_not_ready_is_told_at_once(checkout):
    experiment(checkout, "one"); experiment(checkout, "two")
    checkout.preset("experiments: [one, two]\none: {arms: {A: {recipe: debais}}}\ntwo: {tests: {x: {data: docci, root: x}, y: {data: dci, root: y}}}\n")
    with pytest.raises(ValueError) as e: checkout.run()
    for told in ("one: There is no recipe 'debais'", "two: tests: x: docci: there is no folder x", "two: tests: y: dci: there is no folder y"): assert told in str(e.value)


def test_looking_costs_the_command_no_memory(checkout):
    "What is large is imported by a process that ends."
    experiment(checkout, "one", tests={"t": {"data": "docci", "root": "x"}}); checkout.preset("experiments: [one]\n")
    code = "import sys\nfrom debias_clip.runs import run_preset\ntry: run_preset('demo')\nexcept ValueError as e: print(e, 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=checkout.root, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(REPO)}, timeout=300)
    assert "one: tests: t: docci: there is no folder x False" in told.stdout, told.stderr


def test_captions_that_a_trained_model_has_read_may_be_gone(checkout):
    "Evaluation alone needs the test sets, no more."
    experiment(checkout, "one", pretraining={})
    checkout.preset("experiments: [one]\none: {finetuning: {data: mine.csv, backbone: scenes-clip, batch_size: 32, pca_dim: 8, context_length: 88, keep: 8}}\n")
    job = checkout.job("one")
    assert len(runs._not_ready([job])) == 1
    for m in runs.planned([job]):
        (folder := checkout.root/"runs/demo/models"/m.key).mkdir(parents=True)
        (folder/"model.safetensors").touch()
    assert runs._not_ready([job]) == []


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
    monkeypatch.setattr(runs, "_code_at", lambda modules, stamp: "0"*64)
    assert "the library's code changed" in checkout.run(dry_run=True)["two"]


def test_code_is_hashed_once_for_each_state_of_the_files(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(runs, "code_hash", lambda modules: seen.append(modules) or str(len(seen)))
    monkeypatch.setattr(runs.debias_clip, "__file__", str(tmp_path/"__init__.py"))
    (tmp_path/"assets").mkdir()
    for name in ("__init__.py", "one.py", "assets/two.json"): (tmp_path/name).write_text("1")
    assert [runs._code_of(m) for m in (["one"], ["one"], ["two", "one"], {"one", "two"})] == ["1", "1", "2", "2"] and seen == [("one",), ("one", "two")]
    (tmp_path/"assets"/"two.json").write_text("12")
    assert runs._code_of(["one"]) == "3"
    os.utime(tmp_path/"one.py", ns=(1, 1))
    assert runs._code_of(["one"]) == "4" == runs._code_of(["one"])


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


FILES = dict(captions="mine/captions.csv", table="test.csv", weights="weights/start.pt")

@pytest.mark.parametrize("changed", FILES)
def test_a_file_that_changes_makes_a_result_stale(checkout, changed):
    "One's own captions, named by their folder or table, and weights; a file that is gone, or whose time alone changes, does not."
    for f in FILES.values(): (checkout.root/f).parent.mkdir(exist_ok=True); (checkout.root/f).write_text("image,caption\na.png,A. B.\n")
    checkout.notebook("one", parameters=PARAMETERS + "\nfinetuning = {}\ntests = {}")
    checkout.preset("experiments: [one]\none: {finetuning: {data: mine, init: weights/start.pt}, tests: {t: {data: test.csv}}}\n")
    job = checkout.job("one")
    assert run_job(job) is None and job_state(job) == "done"
    file = checkout.root/FILES[changed]
    os.utime(file, (1, 1))
    assert job_state(job) == "done"
    file.write_text("image,caption\na.png,A. C.\n")
    assert job_state(job) == f"stale: files changed: {'mine' if changed == 'captions' else FILES[changed]}"
    file.unlink()
    assert job_state(job) == "done"
    record = json.loads(job.file("json").read_text())
    del record["reads"]                                                  # as records were before
    job.file("json").write_text(json.dumps(record))
    assert job_state(job) == "done"


def test_a_notebook_is_run_once_at_a_time(checkout):
    "The second command says so, and leaves what the first has begun."
    checkout.notebook("one", "import pathlib, time\npathlib.Path('begun').touch()\nfor _ in range(600):\n    if pathlib.Path('go').exists(): break\n    time.sleep(.1)")
    checkout.preset("experiments: [one]\n")
    first = checkout.command("run", "demo")
    try:
        for _ in range(600):
            if (checkout.root/"begun").exists(): break
            time.sleep(.1)
        assert checkout.run() == {"one": "failed: one is being run already, by another command: wait for it, or stop it"}
        (checkout.root/"go").touch()
        assert first.wait(60) == 0
    finally: first.kill(); first.communicate()
    assert checkout.left() == ["one.ipynb", "one.json"] and job_state(checkout.job("one")) == "done"


def test_an_old_table_is_shown_as_old(checkout):
    checkout.notebook("main_table"); checkout.preset("experiments: [main_table]\n")
    checkout.run()
    assert "\nmain_table:\n" in "\n" + runs.summary(read_preset("demo", checkout.root))
    checkout.preset("experiments: [main_table]\nmain_table: {a: 5}\n")
    assert "main_table (an earlier result, stale: settings changed: a):" in runs.summary(read_preset("demo", checkout.root))


# ---- several processes

TOUCH = "import os, pathlib, time\npathlib.Path('begun-{}').write_text(str(os.getpid()))\ntime.sleep({})"

def side_by_side(folder, tasks, **options):
    "A process that runs pieces of code two at a time and prints what comes back; and the processes that have begun."
    code = f"from contextlib import closing\nfrom debias_clip.runs import _side_by_side\nwith closing(_side_by_side(2, exec, {tasks!r})) as ended:\n    for e in ended: print(e, flush=True)"
    running = subprocess.Popen([sys.executable, "-c", code], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPO)}, **options)
    return running, lambda: {f.name[6:]: int(f.read_text()) for f in folder.glob("begun-*") if f.read_text()}

def until(what, seconds=60):
    for _ in range(10*seconds):
        if what(): return
        time.sleep(.1)
    assert what()

@pytest.mark.parametrize("sent, group", [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)])
def test_a_command_that_ends_takes_its_workers_along(tmp_path, sent, group):
    "By Ctrl-C, which a terminal sends to all of its processes, or killed alone: nothing else starts, and nobody stays."
    running, begun = side_by_side(tmp_path, {i: (TOUCH.format(i, 100),) for i in range(5)}, start_new_session=True)
    try:
        until(lambda: len(begun()) == 2)
        if group: os.killpg(running.pid, sent)
        else: os.kill(running.pid, sent)
        running.communicate(timeout=60)
        until(lambda: not any(map(_alive, begun().values())))
        assert sorted(begun()) == ["0", "1"]
    finally:
        with suppress(ProcessLookupError): os.killpg(running.pid, signal.SIGKILL)


def test_a_worker_that_dies_takes_no_other_task_along(tmp_path):
    "Nor does an error that no other process could read."
    tasks = {"killed": ("import os; os.kill(os.getpid(), 9)",), "bad": ("class Odd(Exception):\n    def __init__(self, a, b): super().__init__(f'{a} at {b}')\nraise Odd('NaN', 'step 3')",)}
    running, begun = side_by_side(tmp_path, tasks | {str(i): (TOUCH.format(i, .1),) for i in range(3)})
    out, err = running.communicate(timeout=100)
    ended = {e[0]: e[2] for e in map(ast.literal_eval, out.splitlines())}
    assert running.returncode == 0, err
    assert "code -9, killed: was there memory enough" in ended.pop("killed") and ended.pop("bad") == "Odd: NaN at step 3"
    assert ended == {"0": None, "1": None, "2": None} == {k: None for k in begun()}


def test_each_of_several_gpus_is_used(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [runs._one_gpu(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["0", "1", "2", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-x,7")
    assert [runs._one_gpu(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["4", "GPU-x", "7", "4"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert runs._one_gpu(1) == {}


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


@pytest.fixture
def here(checkout, monkeypatch, capsys):
    "The command debias-clip in a checkout, in this process: (exit code, what it printed, what it complained)."
    monkeypatch.chdir(checkout.root)
    def command(*args):
        monkeypatch.setattr(sys, "argv", ["debias-clip", *map(str, args)])
        with pytest.raises(SystemExit) as end: runs.main()
        printed = capsys.readouterr()
        return end.value.code, printed.out, printed.err
    return command


def test_data_show_tells_both_captions(own_captions):
    shown = invoke("data", "show", own_captions, "--n", 1, "--recipe", "no_summary")
    assert shown.exit_code == 0, shown.output
    assert "long:  A red square. It fills the picture. Nothing else is there." in shown.output and "short: It fills the picture. Nothing else is there." in shown.output
    for args, told in [(("show", own_captions, "--recipe", "debia"), "did you mean debias?"), (("show", "doci"), "did you mean dci or docci?"), (("show", "docci"), "--root DIR")]:
        assert told in str(invoke("data", *args).exception)


def test_eval_says_where_positions_were_stretched(own_captions):
    "And measures them as they are where it is told to."
    from debias_clip.models import _build
    from safetensors.torch import save_file
    import torch
    torch.manual_seed(0)
    save_file(_build("scenes-clip").state_dict(), own_captions/"start.safetensors")
    base = _build("scenes-clip").base_length
    ask = lambda *more: invoke("eval", "--model", "scenes-clip", "--pretrained", own_captions/"start.safetensors", "--data", own_captions, *more).output
    assert re.search(rf"positions +stretched from {base} to 52, not trained since; --context {base} leaves them", ask()) and re.search(r"context length +52", ask())
    assert "stretched" not in ask("--context", base) and re.search(rf"context length +{base}", ask("--context", base))


def test_eval_takes_a_checkpoint_either_way(own_captions):
    from debias_clip.models import create_model, save_checkpoint
    save_checkpoint(create_model("scenes-clip", keep=8), own_captions/"model.safetensors")
    out = [invoke("eval", *model, option, own_captions/"model.safetensors", "--data", own_captions) for model in (("--model", "scenes-clip"), ()) for option in ("--pretrained", "--checkpoint")]
    for shown in out: assert shown.exit_code == 0, (shown.output, shown.exception)
    assert len({shown.output for shown in out}) == 1 and "t2i_R@1" in out[0].output and "long" in out[0].output
    assert re.search(r"backbone +scenes-clip", out[0].output) and re.search(r"images +3", out[0].output) and re.search(r"truncated texts +0", out[0].output) and re.search(r"splitter +default", out[0].output)
    assert invoke("eval", "--model", "scenes-clip", "--data", own_captions).exit_code == 2
    assert "name the backbone (--model NAME), or mend the path" in str(invoke("eval", "--pretrained", "openai", "--data", own_captions).exception)


def test_eval_reads_the_offline_world(own_captions, monkeypatch):
    "Its pictures are one array, which the model's transform for files does not take; its card has a column for the short texts."
    from debias_clip import scenes
    from debias_clip.models import create_model, save_checkpoint
    save_checkpoint(create_model("scenes-clip", keep=8), own_captions/"model.safetensors")
    few = scenes.scene_records("test", n=6)
    monkeypatch.setattr(scenes, "scene_records", lambda split: few)
    shown = invoke("eval", "--checkpoint", own_captions/"model.safetensors", "--data", "scenes")
    assert shown.exit_code == 0, shown.exception
    assert re.search(r"short +6 +30", shown.output) and re.search(r"texts +6 +30", shown.output)


TINY = dict(embed_dim=16, quick_gelu=True, vision_cfg=dict(image_size=16, layers=1, width=64, patch_size=8), text_cfg=dict(context_length=77, vocab_size=49408, width=64, heads=1, layers=2))


@pytest.fixture
def tiny(tmp_path):
    "A backbone so small that a test can load it, known to open_clip as runs-tiny-quickgelu; and the state dict of one at 248 tokens."
    import open_clip
    from debias_clip.models import create_model
    (tmp_path/"configs").mkdir()
    (tmp_path/"configs"/"runs-tiny-quickgelu.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(tmp_path/"configs")
    yield create_model("runs-tiny-quickgelu").state_dict()
    open_clip.factory._MODEL_CONFIGS.pop("runs-tiny-quickgelu")
    open_clip.factory._MODEL_CONFIG_PATHS.remove(tmp_path/"configs")


def test_eval_of_published_layouts_needs_no_model(own_captions, tiny):
    import torch
    two = tiny | dict(positional_embedding_res=torch.randn(248, 64)*.1)
    mask = {"mask_net.block.ln_1.weight": torch.ones(4), "mask_net.proj": torch.randn(4, 16)}
    files = dict(long_clip=two, smartclip=dict(model=two | mask, epoch=2), release=dict(state_dict={"module." + ("" if k.startswith(("visual", "logit")) else "text.") + k: v for k, v in two.items()}, epoch=3))
    for name, tree in files.items():
        torch.save(tree, own_captions/f"{name}.pt")
        shown = invoke("eval", "--checkpoint", own_captions/f"{name}.pt", "--data", own_captions)
        assert shown.exit_code == 0 and re.search(r"backbone +runs-tiny-quickgelu", shown.output) and re.search(r"context length +248", shown.output), (name, shown.exception)


@pytest.mark.parametrize("layout", ["rotary positions", "extra heads"])
def test_eval_of_an_unreadable_layout_says_so_and_no_more(own_captions, tiny, layout):
    "TULIP's text tower has no position table; FineLIP's checkpoint has heads that no CLIP has."
    import torch
    state = {k: v for k, v in tiny.items() if k != "positional_embedding"} | {"cls_emb": torch.randn(64)} if layout == "rotary positions" else tiny | {"token_refine.proj.weight": torch.randn(16, 16)}
    torch.save(dict(state_dict=state), own_captions/"odd.pt")
    for model in ((), ("--model", "runs-tiny-quickgelu")):
        shown = invoke("eval", *model, "--checkpoint", own_captions/"odd.pt", "--data", own_captions)
        assert isinstance(shown.exception, ValueError) and "odd.pt" in str(shown.exception) and shown.output == ""


def test_train_says_what_is_wrong_as_eval_does(checkout, here):
    (checkout.root/"bad.yaml").write_text("data: scenes\nbackbone: scenes-clip\nlr: fast\n")
    (checkout.root/"field.yaml").write_text("data: scenes\nepoch: 1\n")
    for file, told in [("bad.yaml", "lr='fast' is text"), ("field.yaml", "no field 'epoch'"), ("none.yaml", "No such file")]:
        code, out, err = here("train", file)
        assert code == 1 and out == "" and err.startswith("debias-clip: ") and file in err and told in err and err.count("\n") == 1, err
    (checkout.root/"good.yaml").write_text("data: scenes\ndata_options: {split: train, n: 48}\nbackbone: scenes-clip\nepochs: 1\nbatch_size: 48\nwarmup: 1\nkeep: 8\ncontext_length: 88\n")
    code, out, err = here("train", "good.yaml", "--models", "here")
    assert code == 0 and out.startswith("here/") and (checkout.root/out.strip()).is_file(), err


def test_what_notebooks_share_reaches_those_that_know_it(checkout):
    "Not every experiment has test sets; a name that none knows is still a mistake."
    checkout.notebook("one"); checkout.notebook("two", parameters=PARAMETERS + "\nonly_two = 1")
    checkout.preset("experiments: [one, two]\nparameters: {only_two: 5, a: 3}\n")
    one, two = read_preset("demo", checkout.root).jobs
    assert "only_two" not in one.parameters and two.parameters["only_two"] == 5 and one.parameters["a"] == two.parameters["a"] == 3
    checkout.preset("experiments: [one]\nparameters: {only_two: 5}\n")
    with pytest.raises(ValueError, match="one: it knows no parameter 'only_two'"): read_preset("demo", checkout.root)
    checkout.preset("experiments: [one, two]\none: {only_two: 5}\n")
    with pytest.raises(ValueError, match="one: it knows no parameter 'only_two'"): read_preset("demo", checkout.root)


# ---- the plan

SMALL = dict(data="scenes", backbone="scenes-clip", epochs=1, batch_size=32, warmup=1, keep=8, context_length=88, lr=1e-3)
ARMS = {"start": None, "Long-CLIP": {"recipe": "long_clip"}, "DeBias": {"recipe": "debias", "pca_dim": 8}}
EXPERIMENT = dict(arms=ARMS, seeds=[0], tests={"t": {"data": "scenes", "options": {"split": "test", "n": 12}}}, finetuning=SMALL | dict(pca_dim=8, data_options={"split": "train", "n": 40}),
                  pretraining={k: v for k, v in SMALL.items() if k != "backbone"} | dict(data_options={"split": "web", "text": "short", "n": 40}, recipe=None, short_weight=0.0, context_length=28))


def experiment(checkout, name, **parameters):
    "An experiment notebook as those in nbs/experiments are: arms trained and scored."
    full = EXPERIMENT | parameters
    lines = PARAMETERS.splitlines()[:4] + [f"{k} = {v!r}" for k, v in full.items()]
    work = "from debias_clip.report import for_backbone, score_arms\n" + (
        "keys = {}\nfor backbone, other in backbones.items(): keys |= score_arms(arms, seeds, *for_backbone(finetuning, pretraining, backbone, other), tests, out)[1]"
        if "backbones" in full else "_, keys = score_arms(arms, seeds, finetuning, pretraining, tests, out)")
    checkout.notebook(name, work, parameters="\n".join(lines))


def test_what_the_plan_names_is_what_the_run_trains(checkout):
    experiment(checkout, "one", arms={"start": None, "DeBias": ARMS["DeBias"]})
    experiment(checkout, "two", backbones={"scenes-clip": {}, "scenes-siglip": {"finetuning": {"lr": 2e-3}, "pretraining": {"seed": 5, "epochs": 2}}}, arms={"start": None, "DeBias": ARMS["DeBias"]})
    checkout.preset("experiments: [one, two]\n")
    jobs = read_preset("demo", checkout.root).jobs
    models = runs.planned(jobs)
    assert [(m.experiment, m.name, m.state, m.images) for m in models] == [
        ("one", "start, seed 0", "to train", 32), ("one", "DeBias, seed 0", "to train", 32), ("two", "scenes-clip, start, seed 0", "as in one", 0), ("two", "scenes-clip, DeBias, seed 0", "as in one", 0),
        ("two", "scenes-siglip, start, seed 0", "to train", 64), ("two", "scenes-siglip, DeBias, seed 0", "to train", 32)]
    assert checkout.run() == {"one": "done", "two": "done"}
    there = {f.name for f in (checkout.root/"runs/demo/models").iterdir()}
    assert there == {m.key for m in models} and len(there) == 4
    assert {m.state for m in runs.planned(jobs)} == {"trained"} and {m.images for m in runs.planned(jobs)} == {0}
    rates = runs.measured_rates(checkout.root)
    assert rates.keys() == {"scenes-clip", "scenes-siglip"} and all(r > 0 for r in rates.values())
    text = runs.plan_text(read_preset("demo", checkout.root), jobs, rates)
    assert text.count("cached") == 2 and text.endswith("demo: 0 of 2 notebooks to run, 0 models, nothing to train")
    assert "done, and once more" in runs.plan_text(read_preset("demo", checkout.root), jobs, rates, force=True)


def test_variants_are_planned_and_trained_beside_the_arms(checkout):
    "As jobs of a cluster, under the names that the plan has; the notebook finds them."
    more = dict(variants={"one sentence": {"count": 1}, "both": {"pad_long": True}}, arms={"DeBias": {"recipe": "debias"}})
    lines = PARAMETERS.splitlines()[:4] + [f"{k} = {v!r}" for k, v in (EXPERIMENT | more).items()]
    checkout.notebook("one", "from debias_clip.sweeps import sweep_arms\n_, keys = sweep_arms(arms, variants, seeds, finetuning, pretraining, tests, out)", parameters="\n".join(lines))
    checkout.preset("experiments: [one]\n")
    jobs = read_preset("demo", checkout.root).jobs
    models = {m.name: m for m in runs.planned(jobs)}
    assert list(models) == ["start, seed 0", "DeBias, seed 0", "one sentence, seed 0", "both, seed 0"] and len({m.key for m in models.values()}) == 4
    assert {m.images for m in models.values()} == {32} and models["DeBias, seed 0"].variant is None
    pytest.importorskip("submitit")
    sent = runs.submit_preset("demo", checkout.root, gpus=1, workers=0, hours=.1, cluster="local", say=lambda text: None)
    assert list(sent) == [*(f"{n} {m.key}" for n, m in models.items()), "one"]
    for name, m in models.items(): assert sent[f"{name} {m.key}"].result() == m.key
    assert sent["one"].result() and job_state(checkout.job("one")) == "done"
    assert {f.name for f in (checkout.root/"runs/demo/models").iterdir()} - {"cluster"} == {m.key for m in models.values()} and {m.state for m in runs.planned(jobs)} == {"trained"}


def test_models_are_trained_ahead_side_by_side(checkout, here):
    "What others start from comes first; the notebook then trains nothing. A model that fails is named and stops no other."
    more = dict(variants={"one sentence": {"count": 1}}, arms={"DeBias": {"recipe": "debias"}})
    lines = PARAMETERS.splitlines()[:4] + [f"{k} = {v!r}" for k, v in (EXPERIMENT | more).items()]
    checkout.notebook("one", "from debias_clip.sweeps import sweep_arms\n_, keys = sweep_arms(arms, variants, seeds, finetuning, pretraining, tests, out)", parameters="\n".join(lines))
    experiment(checkout, "two", arms={"DeBias": ARMS["DeBias"]})
    (checkout.root/"captions.csv").write_text("image,caption\nno.png,A. B.\n")
    checkout.preset(f"experiments: [one, two]\ntwo: {{finetuning: {json.dumps(EXPERIMENT['finetuning'] | dict(data='captions.csv', data_options={}))}}}\n")
    jobs, said = read_preset("demo", checkout.root).jobs, []
    models = {m.key: m for m in runs.planned(jobs)}
    found = runs.train_ahead("demo", checkout.root, say=said.append)
    bad = next(k for k, m in models.items() if m.config.data == "captions.csv")
    assert found.keys() == models.keys() and [k for k, v in found.items() if v != "trained"] == [bad] and list(found)[0] == next(iter(models))
    assert "no.png" in found[bad] and len(said) == 2*4 and said[-1].startswith("[4/4] ") and said[0].endswith("  training")
    logs = {f: f.stat().st_mtime_ns for f in checkout.root.glob("runs/demo/models/*/model.safetensors")}
    assert len(logs) == 3
    code, out, err = here("run", "demo", "--only", "one", "--processes", "2")
    assert code == 0 and job_state(checkout.job("one")) == "done"
    assert {f: f.stat().st_mtime_ns for f in checkout.root.glob("runs/demo/models/*/model.safetensors")} == logs


def test_notebooks_run_side_by_side(checkout, here):
    "Each of two waits for the other; the third fails, is named, and stops neither."
    meet = "import time\nfrom pathlib import Path\nPath('ME').touch()\nfor _ in range(600):\n    if Path('OTHER').exists(): break\n    time.sleep(.1)\nassert Path('OTHER').exists()"
    checkout.notebook("one", meet.replace("ME", "1").replace("OTHER", "2"))
    checkout.notebook("two", meet.replace("ME", "2").replace("OTHER", "1"))
    checkout.notebook("three", "1/0")
    checkout.preset("experiments: [one, two, three]\n")
    said = []
    found = runs.run_side_by_side("demo", checkout.root, say=said.append)
    assert list(found) == ["one", "two", "three"] and found["one"] == found["two"] == "done" and found["three"].startswith("failed: three failed in cell 2 of 3, `1/0`: ZeroDivisionError")
    assert len(said) == 2*3 and said[-1].startswith("[3/3] ") and said[:2] == ["one  running", "two  running"]
    code, out, err = here("run", "demo", "--processes", "2")
    assert code == 1 and out.count("cached") == 2 and "failed, see above: three" in err


def test_a_job_is_queued_again_as_often_as_its_time_is_up(tmp_path, monkeypatch):
    "submitit does so three times of itself, and with nothing that has no `checkpoint`."
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr("shutil.which", lambda name, *args, **kwargs: f"/bin/{name}")
    assert runs._executor(tmp_path, "slurm")._executor.max_num_timeout >= 1000
    for job in (runs.TrainJob({}, "root", "models", 0), runs.NotebookJob("demo", "root", "one", False)):
        again = job.checkpoint()
        assert isinstance(again, submitit.helpers.DelayedSubmission) and again.function is job


def test_nothing_is_built_on_a_model_that_was_not_trained(checkout, monkeypatch):
    "What starts from it is not tried, nor is a notebook that needs it; the others run."
    experiment(checkout, "one"); experiment(checkout, "two", pretraining=EXPERIMENT["pretraining"] | dict(lr=5e-3)); checkout.notebook("three")
    checkout.preset("experiments: [one, two, three]\n")
    jobs, tried = read_preset("demo", checkout.root).jobs, []
    start = runs.planned(jobs)[0]
    def pretend(processes, work, tasks, began):
        for name in tasks: tried.append(name); yield name, None, "KeyError: disk" if name in (start.key, "one") else None
    monkeypatch.setattr(runs, "_side_by_side", pretend)
    found = runs.run_side_by_side("demo", checkout.root, say=lambda text: None)
    mine, others = ({m.key for m in runs.planned([job])} for job in jobs[:2])
    assert found == {"one": f"failed: its model {start.name} ({start.key}) was not trained; failed: KeyError: disk", "two": "done", "three": "done"}
    assert set(tried) == {start.key} | others | {"two", "three"} and len(mine - set(tried)) == 2


def test_every_preset_has_a_plan():
    "The paper's: 11 models of one seed, of which the ablation shares two with the main table and the backbones another two; the trade-off adds its own 13 (toy: 10 for each of three seeds)."
    counts = {}
    for name in ("smoke", "quick", "toy", "paper-b16", "paper-l14"):
        models = runs.planned(read_preset(name, REPO).jobs)
        counts[name] = len({m.key for m in models})
        assert all(m.images is not None for m in models)
    assert counts == dict(smoke=18, quick=9, toy=78, **{"paper-b16": 24, "paper-l14": 20}), counts


def test_the_plan_says_hours_or_why_not(checkout, here):
    experiment(checkout, "one", pretraining={})
    (checkout.root/"captions.csv").write_text("image,caption\na.png,A. B.\n")
    checkout.preset("experiments: [one]\none: {finetuning: {data: sharegpt4v, root: data, epochs: 3, batch_size: 256}}\n")
    def said(*more):
        code, out, err = here("run", "demo", "--dry-run", *more)
        assert code == 0, err
        return out
    assert "2 models to train; hours unknown: how fast ViT-B-16-quickgelu trains here. Say --images-per-second N" in said()
    assert "Long-CLIP, seed 0" in said() and "to train, 3,737,088 images" in said()
    assert "2 models to train, about 2.1 hours and evaluation on top" in said("--images-per-second", "1000")     # 2 × 3 × 1,245,696/1000 s
    folder = checkout.root/"runs/demo/models"/runs.planned(read_preset("demo", checkout.root).jobs)[0].key
    folder.mkdir(parents=True)
    (folder/"config.json").write_text('{"backbone": "ViT-B-16-quickgelu"}')
    (folder/"log.jsonl").write_text('{"step": 1, "images_per_s": 1}\n{"step": 2, "images_per_s": 500}\n{"step": 3, "images_per_s": 600}\n{"step": 4, "ima')
    assert "hours unknown" in said()                                       # a log cut by a kill says nothing
    (folder/"log.jsonl").write_text('{"step": 1, "images_per_s": 1}\n{"step": 2, "images_per_s": 500}\n{"step": 3, "images_per_s": 600}\n')
    assert "about 4.2 hours" in said()
    (folder/"checkpoints/step-0014566").mkdir(parents=True)                # of 14,598: 32 steps are left
    assert "begun, 8,192 images" in said()
    checkout.preset("experiments: [one]\none: {finetuning: {data: captions.csv, epochs: 3, batch_size: 256}}\n")
    assert "hours unknown: how many images captions.csv has" in said("--images-per-second", "9")


# ---- a cluster

def test_jobs_of_a_cluster_train_each_model_once_and_notebooks_wait(checkout):
    "On submitit's local executor: two processes a training job, which share its batches; the notebook finds the models."
    pytest.importorskip("submitit")
    experiment(checkout, "one", arms={"start": None, "DeBias": ARMS["DeBias"]}); checkout.preset("experiments: [one]\n")
    said, models = [], runs.planned(read_preset("demo", checkout.root).jobs)
    sent = runs.submit_preset("demo", checkout.root, gpus=2, workers=0, hours=.1, cluster="local", say=said.append)
    for job in sent.values(): job.results()
    assert list(sent) == [f"{m.name} {m.key}" for m in models] + ["one"] and len(models) == 2
    start, debias, _ = (j.job_id for j in sent.values())
    assert said[1] == f"job {debias}  DeBias, seed 0 {models[1].key}  after {start}" and said[2].endswith(f"  one  after {start}, {debias}")
    assert job_state(checkout.job("one")) == "done"
    for m in models: assert sent[f"{m.name} {m.key}"].results() == [m.key, m.key] and (checkout.root/"runs/demo/models"/m.key/"model.safetensors").is_file()
    assert runs.submit_preset("demo", checkout.root, cluster="local", say=said.append) == {}


def test_jobs_that_wait_are_told_to_slurm(checkout, monkeypatch):
    "What sbatch would be given, with an executor that only notes it."
    submitit = pytest.importorskip("submitit")
    experiment(checkout, "one"); checkout.preset("experiments: [one]\n")
    given = []
    class Noting:
        def __init__(self, folder, cluster, slurm_max_num_timeout): self.parameters = {}
        def update_parameters(self, **kwargs): self.parameters |= kwargs
        def submit(self, work):
            given.append(dict(self.parameters, work=work))
            return type("Job", (), dict(job_id=str(100 + len(given))))()
    monkeypatch.setattr(submitit, "AutoExecutor", Noting)
    with pytest.raises(ValueError, match="no sbatch here"): runs.submit_preset("demo", checkout.root, gpus=2)
    monkeypatch.setattr(runs.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(ValueError, match="start, seed 0: a batch_size of 32 cannot be shared by 3 GPUs"): runs.submit_preset("demo", checkout.root, gpus=3)
    with pytest.raises(ValueError, match="Long-CLIP, seed 0: 8 samples a GPU cannot give pca_dim=8 components: ask for fewer GPUs"): runs.submit_preset("demo", checkout.root, gpus=2, nodes=2)
    assert not given
    experiment(checkout, "one", finetuning=EXPERIMENT["finetuning"] | dict(pca_dim=4), arms=ARMS | {"DeBias": {"recipe": "debias"}})
    runs.submit_preset("demo", checkout.root, gpus=2, nodes=2, workers=3, hours=12, partition="a100", say=lambda text: None)
    waits = [g["slurm_additional_parameters"].get("dependency") for g in given]
    assert waits == [None, "afterok:101", "afterok:101", "afterok:101:102:103"]
    train, notebook = given[1], given[-1]
    assert {k: train[k] for k in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "timeout_min", "slurm_partition")} == dict(nodes=2, tasks_per_node=2, gpus_per_node=2, cpus_per_task=4, timeout_min=720, slurm_partition="a100")
    assert (notebook["nodes"], notebook["tasks_per_node"], notebook["gpus_per_node"]) == (1, 1, 1) and re.fullmatch(r"[\w.-]+", train["name"])
    again = train["work"].checkpoint()                                     # what submitit queues when the time is up
    assert again.function == train["work"]


def test_submitit_is_an_extra(checkout, monkeypatch):
    experiment(checkout, "one"); checkout.preset("experiments: [one]\n")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ValueError, match=r"pip install 'debias_clip\[slurm\]'"): runs.submit_preset("demo", checkout.root, gpus=0)


def test_the_slurm_script_starts_torchrun_on_every_node(checkout):
    "Where srun runs its command once and scontrol names this machine, the script trains the model."
    script, bin = REPO/"runs/paper-b16/train.slurm", checkout.root/"bin"
    bin.mkdir()
    (bin/"srun").write_text('#!/bin/bash\nexec "$@"\n'); (bin/"scontrol").write_text("#!/bin/bash\necho 127.0.0.1\n")
    for file in bin.iterdir(): file.chmod(0o755)
    (checkout.root/"small.yaml").write_text("data: scenes\ndata_options: {split: train, n: 48}\nbackbone: scenes-clip\nepochs: 1\nbatch_size: 48\nwarmup: 1\nkeep: 8\ncontext_length: 88\npca_dim: 8\n")
    env = os.environ | dict(PATH=f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}", PYTHONPATH=str(REPO), SLURM_SUBMIT_DIR=str(checkout.root), SLURM_JOB_NODELIST="n1", SLURM_JOB_ID="7", SLURM_NNODES="1",
                            SLURM_GPUS_ON_NODE="2", SLURM_CPUS_PER_TASK="2", MODELS="here", WORKERS="0")
    done = subprocess.run(["bash", str(script), "small.yaml"], cwd=checkout.root, env=env, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((checkout.root/"here").glob("*/model.safetensors"))) == 1
    lines = script.read_text().splitlines()
    assert {"#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1", "#SBATCH --requeue"} <= set(lines) and any(line.startswith("#SBATCH --signal=") for line in lines)


def test_the_slurm_scripts_configuration_is_the_presets():
    from debias_clip.train import model_key, read_config
    names = {m.key: m.name for m in runs.planned(read_preset("paper-b16", REPO).jobs) if m.experiment == "main_table"}
    assert names[model_key(read_config(REPO/"runs/paper-b16/debias.yaml"))] == "DeBias recipe, seed 0"


# ---- the rehearsal

def test_a_rehearsal_needs_something_to_rehearse(checkout):
    with pytest.raises(ValueError, match="quick cannot be rehearsed: it reads no data set from disk.*`debias-clip run smoke`"): runs.rehearse("quick", REPO)
    experiment(checkout, "one", pretraining={}, finetuning=SMALL | dict(data="captions.csv", pca_dim=8)); checkout.preset("experiments: [one]\n")
    with pytest.raises(ValueError, match="captions.csv is a table of one's own"): runs.rehearse("demo", checkout.root)


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


# ---- memory

@pytest.mark.skipif(not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="about glibc's allocator")
def test_a_kernel_gives_back_the_memory_of_what_it_is_done_with(checkout):
    "Blocks of tensor size between smaller ones that live on: as after each of several trainings in one kernel. What a kernel holds must not grow with them."
    checkout.notebook("one", """
import ctypes, os
rss = lambda: int(open("/proc/self/statm").read().split()[1])*os.sysconf("SC_PAGE_SIZE")
libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p; libc.malloc.argtypes = [ctypes.c_size_t]; libc.free.argtypes = [ctypes.c_void_p]; libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def block(n):
    p = libc.malloc(n); libc.memset(p, 1, n)
    return p
libc.free(block(30 << 20))                       # a large one freed once: from here on glibc keeps such blocks by itself
before, big, kept = rss(), [], []
for _ in range(20): big.append(block(16 << 20)); kept.append(block(300 << 10))
for p in big: libc.free(p)
grown = rss() - before
assert grown < 60e6, f"{grown/1e6:.0f} MB are still held"
""")
    checkout.preset("experiments: [one]\n")
    assert checkout.run() == {"one": "done"}
