"""Tasks side by side and on a cluster: what is trained once, what waits, and what a command that ends takes along."""
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import submitit
from checkouts import EXPERIMENT, REPO, START, Checkout, alive, experiment, quiet, until, weights

from debias_clip import cluster
from debias_clip.cluster import NotebookWork, TrainWork, run_side_by_side, submit_preset, tasks_of
from debias_clip.config import read_config
from debias_clip.plan import planned
from debias_clip.preset import job_state, read_preset

@pytest.fixture
def checkout(tmp_path): return Checkout(tmp_path)


# ---- tasks

SIDE_BY_SIDE = """
import sys
from debias_clip.cluster import Task, run_tasks
class Code(str):
    def __call__(self): exec(self, {})
def ended(name, failure): print((name, failure), flush=True)
tasks = [Task(name, Code(code), needs) for name, code, needs in eval(sys.argv[1])]
run_tasks(tasks, 2, lambda name: None, ended)
"""
SLEEP = "import os, pathlib, time; pathlib.Path('begun-{}').write_text(str(os.getpid())); time.sleep(100)"


@pytest.mark.parametrize("sent, to_all", [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)])
def test_a_command_that_ends_takes_its_processes_along(checkout, sent, to_all):
    "By Ctrl-C, which a terminal sends to all of its processes, or killed alone: nothing else starts, nobody stays."
    tasks = [(str(i), SLEEP.format(i), []) for i in range(5)]
    running = checkout.python(SIDE_BY_SIDE, tasks, start_new_session=True)
    def begun(): return {f.name: int(f.read_text()) for f in checkout.root.glob("begun-*") if f.read_text()}
    try:
        until(lambda: len(begun()) == 2)
        if to_all: os.killpg(running.pid, sent)
        else: running.send_signal(sent)
        running.communicate(timeout=60)
        until(lambda: not any(map(alive, begun().values())))
        assert sorted(begun()) == ["begun-0", "begun-1"]
    finally:
        with suppress(ProcessLookupError): os.killpg(running.pid, signal.SIGKILL)


def test_a_process_that_dies_takes_no_other_along(checkout):
    "Nor does an error that no other process could read. What needs a failed task is not tried."
    odd = """
class Odd(Exception):
    def __init__(self, what, where): super().__init__(f'{what} at {where}')
raise Odd('NaN', 'step 3')"""
    tasks = [("killed", "import os; os.kill(os.getpid(), 9)", []), ("odd", odd, []), ("good", "1 + 1", []),
             ("late", "1/0", ["good", "odd"]), ("later", "1/0", ["late"]), ("last", "open('x', 'w')", ["good"])]
    running = checkout.python(SIDE_BY_SIDE, tasks)
    out, err = running.communicate(timeout=200)
    assert running.returncode == 0, err
    ended = dict(map(eval, out.splitlines()))
    assert "killed, or ended without a result: was there memory enough" in ended.pop("killed")
    assert ended == {"odd": "Odd: NaN at step 3", "good": None, "late": "it needs odd, which failed",
                     "later": "it needs late, which failed", "last": None}
    assert (checkout.root/"x").exists()


@pytest.mark.parametrize("given, names", [(None, ["0", "1", "2"]), ("4,GPU-x,7", ["4", "GPU-x", "7"]), ("none", [])])
def test_each_of_several_gpus_is_used(monkeypatch, given, names):
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert cluster.visible_gpus() == names


def test_a_training_waits_for_its_start_and_a_notebook_for_its_models(checkout):
    "A notebook comes right behind its models. One that two need is one task; one that is trained is none."
    experiment(checkout, "one")
    experiment(checkout, "two", pretraining=START | dict(lr=5e-3))
    checkout.preset("experiments: [one, two]\n")
    jobs = checkout.jobs()
    models = planned(jobs)
    there = checkout.root/"runs/demo/models"/models[0].key
    there.mkdir(parents=True)
    (there/"model.safetensors").touch()
    a, start, b = (f"{model.label} {model.key}" for model in models[1:])
    tasks = tasks_of(jobs, planned(jobs), 3)
    assert [(t.name, t.needs) for t in tasks] == [
        (a, []), ("one", [a]), (start, []), (b, [start]), ("two", [start, b])]
    assert {t.work.options.workers for t in tasks if isinstance(t.work, TrainWork)} == {3}


# ---- side by side

def test_models_and_notebooks_run_side_by_side(checkout):
    "What fails is named, stops no other, and nothing is built on it."
    experiment(checkout, "one")
    experiment(checkout, "two", finetuning=EXPERIMENT["finetuning"] | dict(data="mine.csv", data_options={}))
    (checkout.root/"mine.csv").write_text("image,caption\n" + "".join(f"no{i}.png,A. {i}.\n" for i in range(20)))
    for i in range(20): (checkout.root/f"no{i}.png").write_text("no picture")
    checkout.notebook("three", "1/0")
    checkout.preset("experiments: [one, two, three]\n")
    models, said = {(m.experiment, m.label): m.key for m in planned(checkout.jobs())}, []
    results = run_side_by_side("demo", checkout.root, workers=0, say=said.append)
    bad = models["two", "DeBias, seed 0"]
    assert results["one"] == "done" and results["two"] == f"failed: it needs DeBias, seed 0 {bad}, which failed"
    assert results["three"].startswith("failed: RuntimeError: three failed in cell 2 of 3, `1/0`: ZeroDivisionError")
    assert any(re.search(rf"{bad}  failed: ImageError.*no\d+.png", line) for line in said)
    assert weights(checkout).keys() == set(models.values()) - {bad}


def test_ctrl_c_leaves_a_training_at_a_checkpoint(checkout):
    "It saves, and the same command goes on from there."
    long = EXPERIMENT["finetuning"] | dict(epochs=500)
    experiment(checkout, "one", arms={"A": {"recipe": "debias"}}, pretraining={}, finetuning=long)
    checkout.preset("experiments: [one]\n")
    model, = planned(checkout.jobs())
    folder = checkout.root/"runs/demo/models"/model.key
    running = checkout.command("run", "demo", "--processes", "2", start_new_session=True)
    try:
        until(lambda: (folder/"log.jsonl").exists(), 120)
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError): os.killpg(running.pid, signal.SIGKILL)
    assert "stopped; the same command goes on from here" in out
    begun, = planned(checkout.jobs())
    assert begun.state == "begun" and begun.images < model.images


# ---- a cluster

def test_jobs_of_a_cluster_train_each_model_once_and_notebooks_wait(checkout):
    "On submitit's local executor: two processes a training job share its batches; the notebook finds the models."
    experiment(checkout, "one", pretraining={})
    checkout.preset("experiments: [one]\n")
    said, (model,) = [], planned(checkout.jobs())
    sent = submit_preset("demo", checkout.root, gpus=2, workers=0, hours=.1, cluster="local", say=said.append)
    for job in sent.values(): job.results()
    assert list(sent) == [f"DeBias, seed 0 {model.key}", "one"]
    train, notebook = sent.values()
    assert train.results() == [model.key, model.key]
    assert said[1] == f"job {notebook.job_id}  one  after {train.job_id}"
    assert job_state(checkout.job("one")) == "done" and weights(checkout).keys() == {model.key}
    assert submit_preset("demo", checkout.root, cluster="local", say=quiet) == {}


class Noting:
    "In place of submitit's executor: notes what sbatch would be told."
    given = []

    def __init__(self, folder, cluster, slurm_max_num_timeout): self.parameters = {}
    def update_parameters(self, **parameters): self.parameters = parameters

    def submit(self, work):
        self.given.append(self.parameters | {"work": work})
        return type("Job", (), dict(job_id=str(100 + len(self.given))))()


def test_jobs_that_wait_are_told_to_slurm(checkout, monkeypatch):
    experiment(checkout, "one", arms=EXPERIMENT["arms"] | {"Long-CLIP": {"recipe": "long_clip"}})
    checkout.preset("experiments: [one]\n")
    monkeypatch.setattr(submitit, "AutoExecutor", Noting)
    monkeypatch.setattr(Noting, "given", [])
    with pytest.raises(ValueError, match="no sbatch here"): submit_preset("demo", checkout.root, gpus=2)
    monkeypatch.setattr(cluster.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(ValueError, match="start, seed 0: batch_size=16 cannot be shared by 3 processes"):
        submit_preset("demo", checkout.root, gpus=3)
    assert not Noting.given
    submit_preset("demo", checkout.root, gpus=2, nodes=2, workers=3, hours=12, partition="a100", say=quiet)
    waits = [given["slurm_additional_parameters"].get("dependency") for given in Noting.given]
    assert waits == [None, "afterok:101", "afterok:101", "afterok:101:102:103"]
    train, notebook = Noting.given[1], Noting.given[-1]
    size = dict(nodes=2, tasks_per_node=2, gpus_per_node=2, cpus_per_task=4, timeout_min=720, slurm_partition="a100")
    assert size.items() <= train.items() and re.fullmatch(r"[\w.-]+", train["name"])
    assert dict(nodes=1, tasks_per_node=1, gpus_per_node=1).items() <= notebook.items()
    assert train["work"].options.workers == notebook["work"].workers == 3


def test_a_job_is_queued_again_as_often_as_its_time_is_up(tmp_path, monkeypatch):
    "submitit does so three times of itself, and with nothing that has no `checkpoint`."
    monkeypatch.setattr("shutil.which", lambda name, *args, **kwargs: f"/bin/{name}")
    assert cluster._executor(tmp_path, "slurm")._executor.max_num_timeout >= 1000
    for work in (TrainWork(None, None, "models", tmp_path), NotebookWork(None, 0)):
        again = work.checkpoint()
        assert isinstance(again, submitit.helpers.DelayedSubmission) and again.function is work


# ---- a training by hand

def test_the_slurm_script_starts_torchrun_on_every_node(checkout):
    "Where srun runs its command once and scontrol names this machine, the script trains the model."
    script, bin = REPO/"runs/paper-b16/train.slurm", checkout.root/"bin"
    bin.mkdir()
    (bin/"srun").write_text('#!/bin/bash\nexec "$@"\n')
    (bin/"scontrol").write_text("#!/bin/bash\necho 127.0.0.1\n")
    for file in bin.iterdir(): file.chmod(0o755)
    (checkout.root/"small.yaml").write_text(json.dumps(EXPERIMENT["finetuning"]))
    slurm = dict(SUBMIT_DIR=str(checkout.root), JOB_NODELIST="n1", JOB_ID="7", NNODES="1", GPUS_ON_NODE="1")
    path = f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()} | dict(
        SLURM_CPUS_PER_TASK="2", PATH=path, PYTHONPATH=str(REPO), MODELS="here", WORKERS="0")
    done = subprocess.run(["bash", str(script), "small.yaml"], cwd=checkout.root, env=env, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((checkout.root/"here").glob("*/model.safetensors"))) == 1
    lines = script.read_text().splitlines()
    assert {"#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=1", "#SBATCH --requeue"} <= set(lines)
    assert any(line.startswith("#SBATCH --signal=") for line in lines)


def test_the_slurm_scripts_configuration_is_the_presets():
    "So the preset's notebooks find its model."
    config, options = read_config(REPO/"runs/paper-b16/debias.yaml")
    job = next(job for job in read_preset("paper-b16", REPO).jobs if job.name == "main_table")
    model, = [model for model in planned([job]) if model.label == "DeBias recipe, seed 0"]
    assert model.config == config and model.options == options
