"""A checkout in a temporary folder, with notebooks made of code cells: what the tests of presets and batches share."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from debias_clip.preset import own_files, read_preset
from debias_clip.runner import run_preset

REPO = Path(__file__).parents[1]
PARAMETERS = 'out = "runs/demo"\npreset = "demo"\na = 2\nlr = 0.1\nseeds = [0]\nname = "x"'
SAVE = """from debias_clip.results import write_metrics
write_metrics(out, 'NAME', {'table': [{'model': 'demo', 'a': a, 'lr': lr}]})"""
WAIT = """import os, pathlib, time
pathlib.Path('begun').write_text(str(os.getpid()))
while not pathlib.Path('go').exists(): time.sleep(.1)"""


def quiet(text):
    "In place of printing."


class Checkout:
    "Notebooks in nbs/experiments, and a preset `demo`."
    def __init__(self, root):
        self.root = root
        for folder in ("nbs/experiments", "runs/demo"): (root/folder).mkdir(parents=True)
        (root/"settings.ini").write_text("[DEFAULT]\nlib_name = debias_clip\n")

    def notebook(self, name, *cells, parameters=PARAMETERS, tags=("parameters",), save=True):
        "A notebook with a cell of parameters for each tag, the given cells, and one that saves a table."
        sources = [(parameters, {"tags": [tag]}) for tag in tags] + [(cell, {}) for cell in cells]
        if save: sources.append((SAVE.replace("NAME", name), {}))
        made = [dict(cell_type="code", id=f"c{i}", source=source, outputs=[], execution_count=None, metadata=metadata)
                for i, (source, metadata) in enumerate(sources)]
        kernel = dict(name="python3", display_name="python3", language="python")
        notebook = dict(cells=made, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
        (self.root/f"nbs/experiments/{name}.ipynb").write_text(json.dumps(notebook))

    def preset(self, text): (self.root/"runs/demo/params.yaml").write_text(text)

    def run(self, **options): return run_preset("demo", self.root, **{"say": quiet} | options)

    def jobs(self): return read_preset("demo", self.root).jobs

    def job(self, name): return next(job for job in self.jobs() if job.name == name)

    def record(self, name): return json.loads((self.root/f"runs/demo/{name}.json").read_text())

    def left(self):
        "What lies in the run folder."
        return sorted(f.name for f in (self.root/"runs/demo").iterdir() if f.name != "params.yaml")

    def python(self, code, *args, **options):
        "Python code in a process of its own, in the checkout."
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)], cwd=self.root, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(REPO)}, **options)

    def command(self, *args, **options):
        "The command debias-clip, as typed in the checkout."
        return self.python("from debias_clip.cli import main; main()", *args, **options)


def pretend_done(job):
    "Leaves a record as a run of this job would."
    parts = dict(cells=job.cells, code=job.code, parameters=job.parameters, models=job.models, reads=own_files(job))
    job.file("json").write_text(json.dumps(parts))
    job.file("ipynb").touch()


def until(what, seconds=60):
    "Waits until something is so."
    for _ in range(10*seconds):
        if what(): return
        time.sleep(0.1)
    assert what()


def alive(pid):
    "Whether a process runs, and is no zombie."
    try:
        if not Path("/proc/self").exists(): return os.kill(pid, 0) is None
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError: return False


# An experiment as those in nbs/experiments are, on scenes and models of seconds.
SMALL = dict(
    data="scenes", backbone="scenes-clip", epochs=1, batch_size=16, warmup=1, keep=8, context_length=88, lr=1e-3)
START = {name: value for name, value in SMALL.items() if name != "backbone"} | dict(
    data_options={"split": "web", "text": "web", "n": 20}, recipe=None, short_weight=0.0, context_length=28)
EXPERIMENT = dict(
    arms={"start": None, "DeBias": {"recipe": "debias"}}, seeds=[0], workers=0, pretraining=START,
    finetuning=SMALL | dict(pca_dim=4, data_options={"split": "train", "n": 20}),
    tests={"t": {"data": "scenes", "options": {"split": "test", "n": 8}}})
MEASURE = """from debias_clip.arms import measure_arms
def count(model, transform, tok, records, workers): return [dict(n=len(records))]
parameters = dict(arms=arms, seeds=seeds, finetuning=finetuning, pretraining=pretraining)
if "backbones" in globals(): parameters["backbones"] = backbones
rows, keys = measure_arms(count, parameters, tests, out, workers)"""


def experiment(checkout, name, **parameters):
    "An experiment notebook whose arms are trained and counted."
    lines = PARAMETERS.splitlines()[:4] + [f"{k} = {v!r}" for k, v in (EXPERIMENT | parameters).items()]
    checkout.notebook(name, MEASURE, parameters="\n".join(lines))


def weights(checkout):
    "The trained models of the preset, by key, and when each was written."
    return {f.parent.name: f.stat().st_mtime_ns for f in checkout.root.glob("runs/demo/models/*/model.safetensors")}
