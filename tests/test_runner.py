"""Batches of notebooks: cached, resumed after a kill, and never silently wrong."""
import errno
import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkouts import EXPERIMENT, PARAMETERS, REPO, SMALL, WAIT, Checkout, alive, experiment, quiet, until, weights

from debias_clip import models, runner, shipped
from debias_clip.cluster import run_side_by_side
from debias_clip.core import cores
from debias_clip.plan import costs_text, disk_bytes, not_ready, plan_text, planned, remedies, to_train
from debias_clip.preset import job_state, read_preset
from debias_clip.runner import hide_paths, run_job, run_preset, summary
from debias_clip.towers import build

@pytest.fixture
def checkout(tmp_path): return Checkout(tmp_path)


# ---- what a notebook is told, and what is kept of it

def test_the_record_holds_what_the_numbers_rest_on(checkout):
    checkout.notebook("one")
    checkout.preset("experiments: [one]\none: {a: 5}\n")
    assert checkout.run() == {"one": "done"}
    record = checkout.record("one")
    assert record["parameters"] == dict(out="runs/demo", preset="demo", a=5, lr=0.1, seeds=[0], name="x")
    assert record["key"] == checkout.job("one").key and len(record["key"]) == 12
    assert record["metrics"] == {"table": [{"model": "demo", "a": 5, "lr": 0.1}]}
    assert {"python", "torch", "open_clip_torch", "debias_clip"} <= record["versions"].keys()
    assert record["git"] is None and record["seconds"] > 0 and "cores" in record["device"]


def test_figures_that_are_not_drawn_any_more_go(checkout):
    "With the notebook that drew them; those of others stay, and so do all while a run fails."
    def draw(name): return f"open(f'{{out}}/{name}.png', 'w').write('{name}')"
    checkout.notebook("one", draw("one"), draw("one-more"))
    checkout.notebook("two", draw("two"))
    checkout.preset("experiments: [one, two]\n")
    checkout.run()
    there = lambda: sorted(file.name for file in (checkout.root/"runs/demo").glob("*.png"))   # noqa: E731
    checkout.notebook("one", draw("one"), "1/0")
    assert checkout.run()["one"].startswith("failed") and there() == ["one-more.png", "one.png", "two.png"]
    checkout.notebook("one", draw("one"))
    assert checkout.run() == {"one": "done", "two": "cached"} and there() == ["one.png", "two.png"]
    assert list(checkout.record("one")["files"]) == ["one.png"] and job_state(checkout.job("one")) == "done"


def test_settings_reach_the_notebook_with_their_types_and_order(checkout):
    checkout.notebook(
        "one", "assert lr == 1e-6 and type(lr) is float, lr", "assert seeds == [0, 1]",
        "assert a == 1000 and type(a) is int", "assert list(arms) == ['z', 'a', 'm'], arms",
        parameters=PARAMETERS + '\narms = {"start": 1}')
    settings = "parameters: {lr: 1e-6, a: 1e3}\none: {seeds: [0, 1], arms: {z: 1, a: 2, m: 3}}\n"
    checkout.preset("experiments: [one]\n" + settings)
    assert checkout.run() == {"one": "done"}


def test_workers_reach_the_notebook_and_change_no_key(checkout):
    "By default all cores but one load pictures; a notebook that loads none has no such parameter."
    checkout.notebook("one", "print('workers:', workers)", parameters=PARAMETERS + "\nworkers = 0")
    checkout.notebook("two", "assert 'workers' not in globals()")
    checkout.preset("experiments: [one, two]\n")
    assert checkout.run(workers=3) == {"one": "done", "two": "done"}
    printed = (checkout.root/"runs/demo/one.ipynb").read_text
    assert "workers: 3" in printed() and "workers" not in checkout.record("one")["parameters"]
    assert checkout.run(workers=0) == {"one": "cached", "two": "cached"}
    assert checkout.run(force=True, only=["one"]) == {"one": "done"}
    assert f"workers: {cores() - 1}" in printed()


def test_no_path_of_this_machine_is_kept(checkout):
    checkout.notebook(
        "one", "import sys, warnings, pathlib\nwarnings.warn('here')\n"
        "print(pathlib.Path.cwd()/'x', sys.executable, pathlib.Path.home())", "print('1%\\r2%\\r3%\\nend')")
    checkout.preset("experiments: [one]\n")
    assert checkout.run() == {"one": "done"}
    text = (checkout.root/"runs/demo/one.ipynb").read_text()
    for path in (str(checkout.root), sys.prefix, str(Path.home()), "ipykernel_"): assert path not in text, path
    notebook = json.loads(text)
    assert "".join(notebook["cells"][3]["outputs"][0]["text"]) == "3%\nend\n"
    paths = notebook["metadata"]["papermill"]
    assert (paths["input_path"], paths["output_path"]) == ("nbs/experiments/one.ipynb", "runs/demo/one.ipynb")


def test_only_whole_folders_are_hidden():
    assert hide_paths("/data/me-too/x and /data/me", "/data/me") == "/data/me-too/x and ."


# ---- done, stale, cached

def test_cached_until_something_that_counts_changes(checkout, monkeypatch):
    figure = "open(f'{out}/one.png', 'w').write(str(b))"
    checkout.notebook("one", "b = a + 1", figure)
    checkout.notebook("two")
    checkout.preset("experiments: [one, two]\n")
    assert checkout.run() == {"one": "done", "two": "done"}
    checkout.notebook("one", "b = a + 1  # one more", figure)   # a comment makes no number
    checkout.preset("about: the same\nexperiments: [two, one]\n")
    assert checkout.run() == {"one": "cached", "two": "cached"}
    checkout.notebook("one", "b = a + 2", figure)
    checkout.preset("experiments: [one, two]\ntwo: {a: 3}\n")
    stale = {"one": "stale: the notebook's code changed", "two": "stale: settings changed: a"}
    assert {job.name: job_state(job) for job in checkout.jobs()} == stale
    assert checkout.run(only=["one"]) == {"one": "done"}
    assert checkout.run() == {"one": "cached", "two": "done"}
    assert checkout.run(force=True, only=["two"]) == {"two": "done"}
    (checkout.root/"runs/demo/one.png").write_text("another")
    assert job_state(checkout.job("one")) == "stale: missing or not as it was left: one.png"
    monkeypatch.setattr("debias_clip.preset.code_hash", lambda modules: "0"*64)
    assert job_state(checkout.job("two")) == "stale: the library's code changed"


def test_a_record_cut_in_half_is_not_done(checkout):
    checkout.notebook("one")
    checkout.preset("experiments: [one]\n")
    checkout.run()
    file = checkout.root/"runs/demo/one.json"
    file.write_text(file.read_text()[:200])
    assert job_state(checkout.job("one")) == "to do"


def test_an_old_table_is_shown_as_old(checkout):
    checkout.notebook("main_table")
    checkout.preset("experiments: [main_table]\n")
    checkout.run()
    assert summary(read_preset("demo", checkout.root)).startswith("main_table:\n")
    file = checkout.root/"runs/demo/main_table.json"
    record = json.loads(file.read_text())
    record["metrics"]["finding"] = "**The claim holds here.**"
    file.write_text(json.dumps(record))
    assert "\n**The claim holds here.**\n" in summary(read_preset("demo", checkout.root))     # below the table
    checkout.preset("experiments: [main_table]\nmain_table: {a: 5}\n")
    assert "main_table (an earlier result, stale: settings changed: a):" in summary(read_preset("demo", checkout.root))


# ---- failures

def test_a_failing_cell_is_named_and_the_others_go_on(checkout):
    checkout.notebook("one")
    checkout.notebook("two")
    checkout.preset("experiments: [one, two]\n")
    checkout.run()
    before = checkout.record("one")
    checkout.notebook("one", "# why\nx = {}['recall']", "never = 1")
    checkout.preset("experiments: [one, two]\ntwo: {a: 3}\n")
    results = checkout.run()
    assert results["two"] == "done"
    assert "one failed in cell 2 of 4, `x = {}['recall']`: KeyError: 'recall'" in results["one"]
    assert checkout.record("one") == before   # nothing already saved is lost
    assert "KeyError" in (checkout.root/"runs/demo/one.failed.ipynb").read_text()
    checkout.notebook("one")
    assert checkout.run() == {"one": "cached", "two": "cached"} and "one.failed.ipynb" in checkout.left()
    assert checkout.run(force=True, only=["one"]) == {"one": "done"} and "one.failed.ipynb" not in checkout.left()


def test_a_kernel_that_dies_and_a_notebook_without_numbers(checkout):
    checkout.notebook("one", "import os\nos._exit(9)")
    checkout.notebook("two", save=False)
    checkout.preset("experiments: [one, two]\n")
    results = checkout.run()
    assert "one failed in cell 2 of 3, `import os`: DeadKernelError" in results["one"]
    assert "ended without write_metrics(out, 'two'" in results["two"]
    assert checkout.left() == ["one.failed.ipynb", "two.failed.ipynb"]


def test_goes_on_after_a_kill(checkout):
    checkout.notebook("one")
    checkout.notebook("two", WAIT)
    checkout.preset("experiments: [one, two]\n")
    begun = checkout.root/"begun"
    running = checkout.command("run", "demo")
    try: until(lambda: begun.exists() and begun.read_text())
    finally:
        running.send_signal(signal.SIGKILL)
        running.communicate()
    assert "two.partial.ipynb" in checkout.left() and job_state(checkout.job("two")) == "to do"
    until(lambda: not alive(int(begun.read_text())))   # its kernel must not go on alone
    (checkout.root/"go").touch()
    assert checkout.run() == {"one": "cached", "two": "done"}
    assert checkout.left() == ["one.ipynb", "one.json", "two.ipynb", "two.json"]


def test_a_notebook_is_run_once_at_a_time(checkout):
    "The second command says so, and leaves what the first has begun."
    checkout.notebook("one", WAIT)
    checkout.preset("experiments: [one]\n")
    first = checkout.command("run", "demo")
    try:
        until(lambda: (checkout.root/"begun").exists())
        refused = "failed: one is being run already, by another command: wait for it, or stop it"
        assert checkout.run() == {"one": refused}
        (checkout.root/"go").touch()
        assert first.wait(60) == 0
    finally:
        first.kill()
        first.communicate()
    assert checkout.left() == ["one.ipynb", "one.json"] and job_state(checkout.job("one")) == "done"


def test_unwritable_run_folder(checkout, monkeypatch):
    checkout.notebook("one")
    checkout.preset("experiments: [one]\n")
    def refuse(**where): raise OSError(errno.EROFS, "Read-only file system", str(where["dir"]))
    monkeypatch.setattr(runner.tempfile, "TemporaryFile", refuse)   # chmod would not stop root
    with pytest.raises(ValueError, match="runs/demo cannot be written to .Read-only file system.: make it writable"):
        checkout.run()
    assert checkout.left() == []
    assert job_state(checkout.job("one")) == "to do"


def test_many_commands_may_look_whether_a_folder_can_be_written(checkout):
    checkout.notebook("one")
    checkout.preset("experiments: [one]\n")
    preset = read_preset("demo", checkout.root)
    def look(_): runner.check_ready(preset, preset.jobs)
    with ThreadPoolExecutor(8) as pool: list(pool.map(look, range(400)))
    assert checkout.left() == []


# ---- what would stop a notebook after hours

TINY = "backbone: scenes-clip, batch_size: 32, pca_dim: 8, context_length: 88, keep: 8"

@pytest.mark.parametrize("settings, told", [
    ("arms: {A: {recipe: debias}, B: {recpie: debias}}", "recpie"),
    ("arms: {A: {recipe: debais}}", "debais"),
    ("pretraining: {batch_size: 32}, finetuning: {batch_size: 32}", "backbone"),
    (f"finetuning: {{data: scenes, data_options: {{split: trian}}, {TINY}}}", "trian"),
    (f"finetuning: {{data: scenes, data_options: {{spilt: train}}, {TINY}}}", "spilt"),
    (f"finetuning: {{data: mine.csv, {TINY}}}", "data mine.csv: there is no such file"),
    (f"finetuning: {{data: sharegpt4v, root: disk, {TINY}}}", "data sharegpt4v: there is no folder disk"),
    ("finetuning: {data: scenes, data_options: {n: 20}, %s}" % TINY, "A, seed 0: batch_size=32 is more than the 20"),
    ("pretraining: {}, finetuning: {data: scenes, init: web-99, %s}" % TINY,
     "pretrained='web-99' is neither a file nor published for scenes-clip. Published: web-0"),
    ("tests: {t: {data: docic, root: x}}", "there is no data set 'docic'; did you mean docci or dci"),
    ("tests: {t: {data: docci}}", "data docci: where does it lie"),
    ("tests: {t: {data: docci, rot: x}}", "test t: `data` is needed, and `root` and `options`"),
    ("tests: {t: {root: x}}", "test t: `data` is needed"),
])
def test_it_stops_the_batch_before(checkout, settings, told):
    "One at a time and side by side."
    experiment(checkout, "one", arms={"A": {"recipe": "debias"}})
    checkout.notebook("two")
    checkout.preset(f"experiments: [two, one]\none: {{{settings}}}\n")
    for start in (run_preset, run_side_by_side):
        with pytest.raises(ValueError, match=f"- .*{told}.*"): start("demo", checkout.root, say=quiet)
    assert checkout.left() == []


def test_everything_that_is_not_ready_is_told_at_once(checkout):
    "And the plan says it."
    experiment(checkout, "one", tests={"x": {"data": "docci", "root": "x"}, "y": {"data": "dci", "root": "y"}})
    fields = SMALL | dict(data="mine.csv", pca_dim=4)
    experiment(checkout, "two", finetuning=fields, tests={"x": {"data": "docci", "root": "x"}})
    checkout.preset("experiments: [one, two]\n")
    preset = read_preset("demo", checkout.root)
    told = ["data docci: there is no folder x (one, two)", "data dci: there is no folder y (one)",
            "data mine.csv: there is no such file or folder (two)"]
    assert not_ready(preset.jobs) == told
    plan = plan_text(preset, preset.jobs)
    with pytest.raises(ValueError) as e: checkout.run()
    for line in told: assert line in str(e.value) and f"not ready: {line}" in plan


def test_a_damaged_start_stops_the_batch_before(tmp_path, monkeypatch):
    "One that comes with the package and that a preset of this repository starts from."
    jobs = read_preset("quick", REPO).jobs[:1]
    assert not_ready(jobs) == []
    shelf = shutil.copytree(shipped.FOLDER, tmp_path/"weights")
    monkeypatch.setattr(shipped, "FOLDER", shelf)
    (shelf/"scenes-clip-web-1.safetensors").write_bytes(b"cut")
    (shelf/"scenes-clip-web-2.safetensors").unlink()
    damaged, missing = not_ready(jobs)
    assert "web-1.safetensors is damaged" in damaged and "web-2.safetensors is missing" in missing
    assert all("debias-clip run pretraining (main_table)" in said for said in (damaged, missing))


def test_a_start_that_jobs_share_is_read_once(monkeypatch):
    read, load = [], models.load_shipped
    monkeypatch.setattr(models, "load_shipped", lambda row: read.append(row.key) or load(row))
    assert not_ready(read_preset("quick", REPO).jobs) == []
    assert len(read) == len(set(read)) == 4


# ---- the plan

def test_what_the_plan_names_is_what_the_run_trains(checkout):
    other = {"finetuning": {"lr": 2e-3}, "pretraining": {"seed": 5, "epochs": 2}}
    experiment(checkout, "one")
    experiment(checkout, "two", backbones={"scenes-clip": {}, "scenes-siglip": other})
    checkout.preset("experiments: [one, two]\n")
    jobs = checkout.jobs()
    models = planned(jobs)
    assert [(m.experiment, m.label, m.state, m.images) for m in models] == [
        ("one", "start, seed 0", "to train", 16),
        ("one", "DeBias, seed 0", "to train", 16),
        ("two", "scenes-clip, start, seed 0", "as in one", 0),
        ("two", "scenes-clip, DeBias, seed 0", "as in one", 0),
        ("two", "scenes-siglip, start, seed 0", "to train", 32),
        ("two", "scenes-siglip, DeBias, seed 0", "to train", 16)]
    preset = read_preset("demo", checkout.root)
    assert "demo: 2 of 2 notebooks to run, 4 models to train on 80 images" in plan_text(preset, jobs)
    assert checkout.run(only=["two"]) == {"two": "done"}
    assert weights(checkout).keys() == {m.key for m in models} and len({m.key for m in models}) == 4
    assert {(m.state, m.images) for m in planned(jobs)} == {("trained", 0)}   # those of one, too
    assert checkout.record("two")["models"] == {m.label: m.key for m in models if m.experiment == "two"}
    text = plan_text(preset, jobs)
    assert "two  " in text and "cached" in text and text.endswith("demo: 1 of 2 notebooks to run, nothing to train")
    assert "done, and once more" in plan_text(preset, jobs, force=True)


def test_a_begun_training_counts_from_its_last_checkpoint(checkout):
    experiment(checkout, "one", arms={"A": {"recipe": "debias"}}, pretraining={})
    longer = json.dumps(EXPERIMENT["finetuning"] | dict(epochs=3))
    checkout.preset(f"experiments: [one]\none: {{finetuning: {longer}}}\n")
    model, = planned(checkout.jobs())
    folder = checkout.root/"runs/demo/models"/model.key/"checkpoints"
    for name in ("step-0000002", "step-0000001", "step-x.tmp"): (folder/name).mkdir(parents=True)
    begun, = planned(checkout.jobs())
    assert (model.state, model.images, begun.state, begun.images) == ("to train", 48, "begun", 16)


def test_every_preset_has_a_plan():
    """How many models each needs, trained here or not: the ablation shares two with the main table, and the backbones
    another two."""
    counts = {}
    for name in ("smoke", "quick", "toy", "paper-b16", "paper-l14"):
        models = planned(read_preset(name, REPO).jobs)
        counts[name] = len({model.key or repr(model.config) for model in models})
        assert all(model.images is not None for model in models), name
    assert counts == {"smoke": 13, "quick": 14, "toy": 86, "paper-b16": 24, "paper-l14": 20}, counts


# ---- memory

@pytest.mark.skipif(not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None,
                    reason="about glibc's allocator")
def test_a_kernel_gives_back_the_memory_of_what_it_is_done_with(checkout):
    """Blocks of tensor size between smaller ones that live on, as after each of several trainings in one kernel.

    A large block that is freed once makes glibc keep such blocks by itself, unless it is told a threshold."""
    checkout.notebook("one", """
import ctypes, os
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def resident(): return int(open("/proc/self/statm").read().split()[1])*os.sysconf("SC_PAGE_SIZE")
def block(n):
    p = libc.malloc(n)
    libc.memset(p, 1, n)
    return p
libc.free(block(30 << 20))
before, big, small = resident(), [], []
for _ in range(20):
    big.append(block(16 << 20))
    small.append(block(300 << 10))
for p in big: libc.free(p)
grown = resident() - before
assert grown < 60e6, f"{grown/1e6:.0f} MB are still held"
""")
    checkout.preset("experiments: [one]\n")
    assert run_job(checkout.job("one")) is None


def test_the_plan_tells_what_a_run_costs():
    "Counted again from the settings: images, steps, and float32 weights with two moments in three checkpoints."
    new = to_train(planned(read_preset("paper-b16", REPO).jobs))
    size = 4*sum(p.numel() for p in build(new[0].config.backbone).parameters())
    assert disk_bytes(new[:1]) == (size, 3*(size + 2*size))
    one = 3*((1_246_901 - 1_000)//256)   # epochs of whole batches
    told = costs_text(new)
    assert f"{len(new)} models to train on {len(new)*one*256:,} images in {len(new)*one:,} steps; " in told
    assert costs_text([]) == "nothing to train"


def test_the_plan_says_where_missing_data_come_from(checkout):
    row = {"data": "docci", "root": "data/docci"}
    experiment(checkout, "one", tests={"a": row, "b": {"data": "iiw", "root": "data/iiw"}, "c": {"data": "scenes"}})
    (checkout.root/"data"/"iiw").mkdir(parents=True)
    checkout.preset("experiments: [one]\n")
    assert remedies(checkout.jobs()) == ["debias-clip data get docci --root data/docci"]
    assert plan_text(read_preset("demo", checkout.root), checkout.jobs()).endswith(
        "to get it: debias-clip data get docci --root data/docci")


WRONG_TESTS = ["docci", ["docci"], {"data": ["docci"], "root": "x"}, {"data": None, "root": "x"}]

@pytest.mark.parametrize("test", WRONG_TESTS, ids=str)
def test_a_plan_of_what_cannot_be_a_test_set_says_so(checkout, test):
    experiment(checkout, "one", tests={"a": test})
    checkout.preset("experiments: [one]\n")
    told = plan_text(read_preset("demo", checkout.root), checkout.jobs())
    assert "\nnot ready: " in told and "to get it" not in told
