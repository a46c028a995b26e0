"""What a trainer that is left alone for a week meets: kills, hangs, damaged checkpoints, a full disk, SIGTERM.

Ranks are processes of one server that has imported torch; models are tiny and trained for a few steps.
"""
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
import yaml
from files import pictures, write_csv
from training_runs import (
    EACH_STEP,
    SMALL,
    Killed,
    ends,
    free_port,
    join_group,
    same_bits,
    start,
    steps_seen,
    wait_for,
)

import debias_clip.train as trainer
from debias_clip import config as configuration
from debias_clip import records, resume
from debias_clip.config import RunOptions, TrainConfig, model_key
from debias_clip.models import load_checkpoint
from debias_clip.pairs import make_loader
from debias_clip.records import ImageError
from debias_clip.resume import last_checkpoint
from debias_clip.train import train

pytest_plugins = ["training_fixtures"]

SELDOM = RunOptions(save_every=1000)


def checkpoints_of(config, models): return models/model_key(config)/"checkpoints"
def weights_of(config, models): return models/model_key(config)/"model.safetensors"


@pytest.fixture(scope="module")
def three(starts):
    "For three ranks."
    changes = dict(batch_size=24, pca_group=8, pca_dim=4, epochs=3)
    return TrainConfig(**SMALL | changes, init=starts["trained-clip"])


@pytest.fixture(scope="module")
def undisturbed(three, processes, tmp_path_factory):
    models = tmp_path_factory.mktemp("undisturbed")
    assert ends(start(processes, 3, three, models)) == [0, 0, 0]
    return weights_of(three, models)


# Kills of one process

def writing(folder): return list(folder.glob("step-0000004.*.tmp/model.safetensors"))
def written(folder): return (folder/"step-0000004").exists()


@pytest.mark.parametrize("moment", [writing, written])
def test_a_killed_run_ends_with_the_same_bits(moment, arm, whole, processes, tmp_path, monkeypatch):
    checkpoints, slow = checkpoints_of(arm, tmp_path), slowly if moment is written else None
    (rank,) = ranks = start(processes, 1, arm, tmp_path, RunOptions(save_every=2), slow)
    wait_for(lambda: moment(checkpoints), ranks)
    rank.kill()
    assert ends(ranks) == [-signal.SIGKILL]
    last = int(last_checkpoint(checkpoints).name[5:])
    seen, done = steps_seen(monkeypatch), train(arm, tmp_path)
    assert seen == whole[1][last:]                                   # goes on with the batch after the checkpoint
    assert same_bits(done.weights, whole[0].weights) and not checkpoints.exists()
    assert [row["step"] for row in done.log()] == [9]

def slowly(rank, step): time.sleep(0.2)


def test_checkpoints_of_another_way_to_run_are_gone_on_from(arm, whole, tmp_path, monkeypatch):
    "Options, a moved start and a reworded message change no key, and the run goes on."
    with monkeypatch.context() as patch:
        steps_seen(patch, stop=5)
        with pytest.raises(Killed): train(arm, tmp_path, EACH_STEP)
    moved = shutil.copy(arm.init, tmp_path/"elsewhere.safetensors")
    monkeypatch.setattr(configuration, "fault", lambda *_: "other words")
    seen = steps_seen(monkeypatch)
    done = train(arm.replace(init=moved), tmp_path, RunOptions(workers=1, root="there", save_every=3))
    assert len(seen) == 9 - 5 and same_bits(done.weights, whole[0].weights)


def test_float16_is_scaled_and_resumes_to_the_same_bits(arm, tmp_path, monkeypatch):
    config = arm.replace(precision="fp16", epochs=1, lr=1e-4, data_options=dict(n=30), batch_size=10)
    whole = train(config, tmp_path/"whole")
    assert all(v.dtype == torch.float32 for v in load_checkpoint(whole.weights).state_dict().values())
    near = train(config.replace(precision="fp32"), tmp_path/"near")
    assert abs(whole.log()[-1]["loss"] - near.log()[-1]["loss"]) < 0.1
    steps_seen(monkeypatch, stop=2)
    with pytest.raises(Killed): train(config, tmp_path/"broken", EACH_STEP)
    monkeypatch.undo()
    last = last_checkpoint(checkpoints_of(config, tmp_path/"broken"))
    assert json.loads((last/"state.json").read_text())["scaler"]["scale"] > 1
    assert same_bits(train(config, tmp_path/"broken").weights, whole.weights)


# Damage

@pytest.fixture(scope="module")
def siglip(starts):
    changes = dict(backbone="trained-siglip", data_options=dict(n=32))
    return TrainConfig(**SMALL | changes, init=starts["trained-siglip"])


@pytest.fixture(scope="module")
def interrupted(siglip, tmp_path_factory):
    "Models folders: one with a run stopped in its fifth step, checkpoints 3 and 4 kept; one with the run left alone."
    broken, complete = (tmp_path_factory.mktemp(name) for name in ("broken", "complete"))
    with pytest.MonkeyPatch.context() as patch:
        steps_seen(patch, stop=4)
        with pytest.raises(Killed): train(siglip, broken, EACH_STEP)
    assert sorted(p.name for p in checkpoints_of(siglip, broken).iterdir()) == ["step-0000003", "step-0000004"]
    return broken, train(siglip, complete)


@pytest.fixture
def broken(siglip, interrupted, tmp_path):
    "A copy of the interrupted run's checkpoints, in the models folder `tmp_path`."
    shutil.copytree(interrupted[0]/model_key(siglip), tmp_path/model_key(siglip))
    return checkpoints_of(siglip, tmp_path)


def cut(file): file.write_bytes(file.read_bytes()[:file.stat().st_size//2])

def half_written(folder):
    left = shutil.copytree(folder/"step-0000004", folder/"step-0000005.0123.tmp")
    cut(left/"optimizer.safetensors")
    (left/"state.json").unlink()

def state(content): return lambda folder: (folder/"step-0000004"/"state.json").write_bytes(content)
def half(name): return lambda folder: cut(folder/"step-0000004"/name)

def without_files(folder):
    for file in (folder/"step-0000004").iterdir(): file.unlink()

DAMAGES = {
    "half-written folder": (half_written, 4, None),
    "half weights": (half("model.safetensors"), 3, "model.safetensors is not what was saved"),
    "half moments": (half("optimizer.safetensors"), 3, "optimizer.safetensors is not what was saved"),
    "half state": (half("state.json"), 3, "state.json cannot be read"),
    "empty state": (state(b""), 3, "state.json cannot be read"),
    "zeros for state": (state(bytes(100)), 3, "state.json cannot be read"),
    "null for state": (state(b"null"), 3, "state.json is not what was saved"),
    "nothing in state": (state(b"{}"), 3, "state.json is not what was saved"),
    "a list for state": (state(b"[1]"), 3, "state.json is not what was saved"),
    "no weights": (lambda f: (f/"step-0000004"/"model.safetensors").unlink(), 3, "model.safetensors is missing"),
    "empty folder": (without_files, 3, "state.json cannot be read")}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage, siglip, interrupted, broken, tmp_path, monkeypatch):
    spoil, last, message = DAMAGES[damage]
    spoil(broken)
    seen = steps_seen(monkeypatch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = train(siglip, tmp_path)
    said = [str(w.message) for w in said if "is damaged" in str(w.message)]
    assert len(said) == (message is not None) and all(str(broken/"step-0000004") in s and message in s for s in said)
    assert len(seen) == 6 - last and same_bits(done.weights, interrupted[1].weights)


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_a_whole_checkpoint_outlives_a_damaged_newer_one(siglip, broken, tmp_path, monkeypatch):
    "The newest is damaged, and the next run dies as well: the good one and what it saved are there still."
    cut(broken/"step-0000004"/"state.json")
    for stop, last in ((0, 3), (1, 4)):
        with monkeypatch.context() as patch:
            steps_seen(patch, stop)
            with pytest.raises(Killed): train(siglip, tmp_path, EACH_STEP)
        assert last_checkpoint(broken).name == f"step-{last:07d}"


@pytest.mark.filterwarnings("ignore:.*is damaged")
def test_new_checkpoints_outlive_two_damaged_ones(siglip, broken, tmp_path, monkeypatch):
    for step in (3, 4): cut(broken/f"step-{step:07d}"/"state.json")
    steps_seen(monkeypatch, stop=2)
    with pytest.raises(Killed): train(siglip, tmp_path, EACH_STEP)
    assert last_checkpoint(broken) == broken/"step-0000002"


@pytest.mark.parametrize("where", [(resume, "save_checkpoint"), (resume, "save_file")], ids=["weights", "moments"])
def test_a_full_disk_stops_the_run_and_keeps_what_was_saved(where, arm, whole, tmp_path, monkeypatch):
    calls, real = [], getattr(*where)
    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3: raise OSError(errno.ENOSPC, "No space left on device", str(args[1]))
        return real(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(*where, full)
        with pytest.raises(OSError, match="No space left"): train(arm, tmp_path, RunOptions(save_every=2))
    assert last_checkpoint(checkpoints_of(arm, tmp_path)).name == "step-0000004"
    assert same_bits(train(arm, tmp_path).weights, whole[0].weights)


def vanish(folder, patch):
    "A shared disk that is gone for a while."
    folder.rename(folder.with_name("away"))
    return lambda: folder.with_name("away").rename(folder)


def forbid(folder, patch):
    "A folder that may no longer be read; chmod does not keep the superuser out."
    real = records.Image.open
    def refuse(file, *args):
        if str(file).startswith(str(folder)): raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *args)
    patch.setattr(records.Image, "open", refuse)
    return lambda: None


@pytest.mark.parametrize("trouble, workers, told", [
    (vanish, 0, "there is no such file"), (vanish, 1, "there is no such file"),
    (forbid, 0, "may not be read by this user")])
def test_pictures_that_are_out_of_reach_for_a_while(trouble, told, workers, starts, tmp_path, monkeypatch):
    """In the middle of an epoch: the run stops with the file's name, the last checkpoint stays, and the same command
    goes on to the same bits."""
    own = pictures(tmp_path/"own", *[f"pictures/{i}.png" for i in range(48)])
    rows = [[f"pictures/{i}.png", f"Number {i}. It is {i % 5}. It is small."] for i in range(48)]
    write_csv(own/"captions.csv", ["image", "caption"], *rows)
    config = TrainConfig(**SMALL | dict(data=str(own), data_options={}), init=starts["trained-clip"])
    undisturbed = train(config, tmp_path/"undisturbed", SELDOM)
    with monkeypatch.context() as patch:
        put_back, take = [], trainer.Step.__call__
        def troubled(self, batch, step):
            if step == 2: put_back.append(trouble(own/"pictures", patch))
            return take(self, batch, step)
        patch.setattr(trainer.Step, "__call__", troubled)
        options = RunOptions(save_every=1, workers=workers)
        with pytest.raises(ImageError, match=f"{own}/pictures/.*{told}"): train(config, tmp_path/"models", options)
        put_back[0]()
    assert last_checkpoint(checkpoints_of(config, tmp_path/"models")).name >= "step-0000002"
    assert same_bits(train(config, tmp_path/"models", SELDOM).weights, undisturbed.weights)


# Loader processes

class Deadly:
    "A data set of which one batch kills the worker that loads it."
    in_memory = False

    def __init__(self, data, deadly): self.data, self.records, self.deadly = data, data.records, deadly
    def __len__(self): return len(self.data)

    def __getitems__(self, keys):
        in_worker = torch.utils.data.get_worker_info() is not None
        if in_worker and self.deadly == [i for _, i in keys]: os.kill(os.getpid(), signal.SIGKILL)
        return self.data.__getitems__(keys)


def test_a_loader_worker_that_dies_is_noticed(arm, whole, tmp_path, monkeypatch):
    last = whole[1][8]                                               # workers load ahead
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "make_loader", lambda data, *how: make_loader(Deadly(data, last), *how))
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            train(arm, tmp_path, RunOptions(workers=1, save_every=2))
    assert last_checkpoint(checkpoints_of(arm, tmp_path)).name in ("step-0000006", "step-0000008")
    assert same_bits(train(arm, tmp_path).weights, whole[0].weights)


# Deaths of one rank of several

def die(rank, step):
    if rank == 1 and step == 3: os.kill(os.getpid(), signal.SIGKILL)

def hang(rank, step):
    if rank == 1 and step == 3: os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_dies_takes_the_others_along_and_all_resume(three, undisturbed, processes, tmp_path):
    "To the same bits: with three ranks, sums must not depend on what a process did before."
    codes = ends(start(processes, 3, three, tmp_path, spoil=die))
    assert codes[1] == -signal.SIGKILL and all(c not in (0, None) for c in codes)
    assert last_checkpoint(checkpoints_of(three, tmp_path)).name in ("step-0000002", "step-0000003")
    assert ends(start(processes, 3, three, tmp_path)) == [0, 0, 0]
    assert same_bits(weights_of(three, tmp_path), undisturbed)


def test_a_rank_that_hangs_is_given_up(three, processes, tmp_path):
    ranks = start(processes, 3, three, tmp_path, spoil=hang, patience=5)
    wait_for((checkpoints_of(three, tmp_path)/"step-0000002").exists, ranks)
    begin = time.time()
    for p in (ranks[0], ranks[2]): p.join(60)
    assert all(p.exitcode not in (0, None) for p in (ranks[0], ranks[2])) and time.time() - begin < 60
    ends(ranks, 0)
    assert last_checkpoint(checkpoints_of(three, tmp_path)) is not None


def kills(n, config, reference, processes, models, seed, world):
    "Kills a run at n random moments, each time another rank, and compares what it ends with."
    rng, weights = random.Random(seed), weights_of(config, models)
    for _ in range(n):
        ranks = start(processes, world, config, models, patience=20)  # for one that was killed before they met
        wait_for(weights.parent.exists, ranks)
        time.sleep(rng.uniform(0, 3))
        ranks[rng.randrange(world)].kill()
        codes = ends(ranks)
        if all(c == 0 for c in codes): break                          # it had ended before
        assert 0 not in codes or weights.exists()
    if not weights.exists(): assert ends(start(processes, world, config, models)) == [0]*world
    assert same_bits(weights, reference)


def test_killed_at_random_moments(three, undisturbed, processes, tmp_path):
    kills(2, three, undisturbed, processes, tmp_path, 0, world=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_many_random_moments(seed, three, undisturbed, processes, tmp_path):
    kills(4, three, undisturbed, processes, tmp_path, 1 + seed, world=3)


WORKER = """
import os, signal, sys
from pathlib import Path
import training_runs
import debias_clip.train as trainer
take, died, steps = trainer.Step.__call__, Path(sys.argv[1])/"died", []
def deadly(self, *args):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 4 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, *args)
trainer.Step.__call__ = deadly
trainer.run_files([f"{sys.argv[1]}/arm.yaml"], f"{sys.argv[1]}/models")
"""


def test_torchrun_starts_all_ranks_again(arm, tmp_path):
    """One rank dies once; with --max-restarts both go on from the checkpoint.

    Without the variable torchrun gives the ranks the store of the attempt before, and a quick rank finds the address of
    one that is dead."""
    config = arm.replace(epochs=2)
    (tmp_path/"arm.yaml").write_text(yaml.safe_dump(config.as_dict() | {"save_every": 1}))
    (tmp_path/"worker.py").write_text(WORKER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    here = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run([*torchrun, tmp_path/"worker.py", tmp_path], capture_output=True, text=True, timeout=300,
                         env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": here})
    assert run.returncode == 0 and (tmp_path/"died").exists(), run.stderr
    assert "rank" in run.stderr.lower() and str(-signal.SIGKILL) in run.stderr    # it names who failed first, and how
    weights = weights_of(config, tmp_path/"models")
    assert run.stdout.split() == [str(weights)]                                   # one process speaks
    assert json.loads((weights.parent/"log.jsonl").read_text().splitlines()[-1])["step"] == 6


# Told to stop

def test_sigterm_saves_and_exits(arm, whole, processes, tmp_path):
    (rank,) = ranks = start(processes, 1, arm, tmp_path, SELDOM, slowly)
    wait_for((tmp_path/model_key(arm)/"samples.jsonl").exists, ranks)
    time.sleep(0.5)
    begin = time.time()
    rank.terminate()
    assert ends(ranks) == [143] and time.time() - begin < 15
    saved = last_checkpoint(checkpoints_of(arm, tmp_path))
    assert 0 < json.loads((saved/"state.json").read_text())["step"] < 9
    assert same_bits(train(arm, tmp_path).weights, whole[0].weights)


def test_sigterm_to_one_rank_stops_all_at_the_same_step(three, undisturbed, processes, tmp_path):
    ranks = start(processes, 3, three, tmp_path, SELDOM, slowly)
    wait_for((tmp_path/model_key(three)/"samples.jsonl").exists, ranks)
    time.sleep(0.5)
    ranks[2].terminate()
    assert ends(ranks) == [143]*3
    assert len(list(checkpoints_of(three, tmp_path).glob("step-*"))) == 1
    assert ends(start(processes, 3, three, tmp_path)) == [0, 0, 0]
    assert same_bits(weights_of(three, tmp_path), undisturbed)         # how often it saves changes no weight


# Another number of ranks

def blind(rank, port, config, models):
    "A rank that sees no checkpoint of its own, unless it is the first."
    join_group(rank, 2, port)
    if rank: resume.last_checkpoint = lambda folder: None
    train(config, models, EACH_STEP)


def test_all_ranks_go_on_from_the_first_ones_checkpoint(arm, processes, tmp_path, monkeypatch):
    "A network drive may show the others another folder for a while; each looking for itself, they would part."
    steps_seen(monkeypatch, stop=4)
    with pytest.raises(Killed): train(arm, tmp_path, EACH_STEP)
    monkeypatch.undo()
    port = free_port()
    ranks = [processes(target=blind, args=(r, port, arm, tmp_path), daemon=True) for r in range(2)]
    for p in ranks: p.start()
    assert ends(ranks) == [0, 0]
    alone = train(arm, tmp_path/"alone")
    assert math.isclose(train(arm, tmp_path).log()[-1]["loss"], alone.log()[-1]["loss"], rel_tol=1e-4)


def test_a_run_goes_on_with_another_number_of_ranks(arm, processes, tmp_path):
    ranks = start(processes, 2, arm, tmp_path, spoil=die)
    assert ends(ranks)[1] == -signal.SIGKILL
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = train(arm, tmp_path)
    (message,) = [str(w.message) for w in said if "goes on from step" in str(w.message)]
    assert "on 1 processes; until there it was 2" in message and "will not be bit-equal" in message
    assert math.isclose(done.log()[-1]["loss"], train(arm, tmp_path/"alone").log()[-1]["loss"], rel_tol=1e-4)
