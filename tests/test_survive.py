"""What a trainer that is left alone for a week meets: warnings, deaths and hangs of ranks, a full disk, another number of ranks. And what it shows meanwhile.

Ranks are processes of one server that has imported torch; models are small and trained for a few steps.
"""
import errno
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from test_train import SMALL, Killed, arm, processes, same_bits, same_course, starts, steps_seen, torchrun, whole  # noqa: F401  (fixtures)

import debias_clip.train as trainer
from debias_clip.data import make_loader
from debias_clip.models import load_checkpoint
from debias_clip.train import Stopped, TrainConfig, Watch, config_dict, last_checkpoint, main, model_key, train


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def work(rank, world, port, config, models, patience, spoil):
    "One rank; `spoil(step)` is called before each of its steps."
    if world > 1: torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    trainer._PATIENCE, step, done = timedelta(seconds=patience), trainer._step, []
    def spoilt(*args):
        if spoil: spoil(rank, len(done))
        done.append(1)
        return step(*args)
    trainer._step = spoilt
    try: train(config, models)
    except Stopped: sys.exit(143)


def start(processes, world, config, models, spoil=None, patience=60):
    port = free_port()
    ranks = [processes(target=work, args=(r, world, port, config, models, patience, spoil), daemon=True) for r in range(world)]
    for p in ranks: p.start()
    return ranks


def ends(ranks, seconds=120):
    "Exit codes, once all have ended; a rank that has not by then is killed and counts as None."
    until = time.time() + seconds
    for p in ranks: p.join(max(0, until - time.time()))
    codes = [p.exitcode for p in ranks]
    for p in ranks: p.kill(); p.join()
    return codes


def wait_for(condition, processes, seconds=120):
    until = time.time() + seconds
    while not condition():
        assert time.time() < until and all(p.is_alive() for p in processes)
        time.sleep(.002)


@pytest.fixture(scope='module')
def three(starts):  # noqa: F811
    "For three ranks with the PCA of each one's own batch."
    return TrainConfig(**SMALL | dict(batch_size=24, pca_dim=4, data_options=dict(n=48), epochs=3), init=starts['scenes-clip'], save_every=1)


@pytest.fixture(scope='module')
def undisturbed(three, processes, tmp_path_factory):  # noqa: F811
    models = tmp_path_factory.mktemp('undisturbed')
    assert ends(start(processes, 3, three, models)) == [0, 0, 0]
    return models/model_key(three)/'model.safetensors'


# Deaths

def die(rank, step):
    if rank == 1 and step == 3: os.kill(os.getpid(), signal.SIGKILL)

def hang(rank, step):
    if rank == 1 and step == 3: os.kill(os.getpid(), signal.SIGSTOP)


def test_a_rank_that_dies_takes_the_others_along_and_all_resume_to_the_same_bits(three, undisturbed, processes, tmp_path):  # noqa: F811
    "Three ranks: sums must not depend on what a process did before."
    codes = ends(start(processes, 3, three, tmp_path, die))
    assert codes[1] == -signal.SIGKILL and all(c not in (0, None) for c in codes)
    assert last_checkpoint(tmp_path/model_key(three)/'checkpoints').name in ('step-0000002', 'step-0000003')
    assert ends(start(processes, 3, three, tmp_path)) == [0, 0, 0]
    assert same_bits(tmp_path/model_key(three)/'model.safetensors', undisturbed)


def test_a_rank_that_hangs_is_given_up(three, processes, tmp_path):  # noqa: F811
    ranks = start(processes, 3, three, tmp_path, hang, patience=5)
    wait_for(lambda: (tmp_path/model_key(three)/'checkpoints'/'step-0000002').exists(), ranks)
    begin = time.time()
    for p in (ranks[0], ranks[2]): p.join(60)
    assert ranks[0].exitcode not in (0, None) and ranks[2].exitcode not in (0, None) and time.time() - begin < 60
    ends(ranks, 0)
    assert last_checkpoint(tmp_path/model_key(three)/'checkpoints') is not None


def kills(n, config, reference, processes, models, seed, world=1):  # noqa: F811
    "Kills a run at n random moments, each time another rank, and compares what it ends with."
    rng, checkpoints = random.Random(seed), models/model_key(config)/'checkpoints'
    for _ in range(n):
        ranks = start(processes, world, config, models, patience=20)  # what the others wait for one that was killed before they met
        wait_for(lambda: checkpoints.parent.exists(), ranks)
        time.sleep(rng.uniform(0, 3))
        ranks[rng.randrange(world)].kill()
        codes = ends(ranks)
        if all(c == 0 for c in codes): break                         # it had ended before
        assert 0 not in codes or (checkpoints.parent/'model.safetensors').exists()
    if not (checkpoints.parent/'model.safetensors').exists(): assert ends(start(processes, world, config, models)) == [0]*world
    assert same_bits(checkpoints.parent/'model.safetensors', reference)


def test_killed_at_random_moments(three, undisturbed, processes, tmp_path):  # noqa: F811
    kills(4, three, undisturbed, processes, tmp_path, 0, world=3)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(5))
def test_killed_at_many_random_moments(seed, three, undisturbed, processes, tmp_path):  # noqa: F811
    kills(4, three, undisturbed, processes, tmp_path, 1 + seed, world=3)


def test_torchrun_starts_all_ranks_again(arm, tmp_path):  # noqa: F811
    """One rank dies once; with --max-restarts both go on from the checkpoint.

    Without the variable torchrun gives the ranks the store of the attempt before, and a rank that is quicker than the others finds the address of one that is dead."""
    config = replace(arm, data_options=dict(n=64), pca_dim=4, save_every=1)
    (tmp_path/'arm.yaml').write_text(yaml.safe_dump(config_dict(config)))
    (tmp_path/'worker.py').write_text(f"""
import os, signal, sys
from pathlib import Path
import debias_clip.train as trainer
step, n = trainer._step, []
def dies(*args):
    n.append(1)
    if os.environ['RANK'] == '1' and len(n) == 4 and not Path({str(tmp_path)!r}, 'died').exists():
        Path({str(tmp_path)!r}, 'died').touch(); os.kill(os.getpid(), signal.SIGKILL)
    return step(*args)
trainer._step = dies
trainer.main(sys.argv[1:])
""")
    run = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', '--max-restarts', '1', tmp_path/'worker.py', tmp_path/'arm.yaml', '--models', tmp_path/'models'],
                         capture_output=True, text=True, timeout=300, env=os.environ | {'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'})
    assert run.returncode == 0 and (tmp_path/'died').exists(), run.stderr
    assert 'rank' in run.stderr.lower() and str(-signal.SIGKILL) in run.stderr           # torchrun names who failed first, and how
    folder = tmp_path/'models'/model_key(config)
    assert run.stdout.split()[-1] == str(folder/'model.safetensors') and json.loads((folder/'log.jsonl').read_text().splitlines()[-1])['step'] == 12


# Warnings

def test_sigterm_saves_and_exits(arm, whole, processes, tmp_path):  # noqa: F811
    config = replace(arm, save_every=1000)
    (rank,) = ranks = start(processes, 1, config, tmp_path, slowly)
    wait_for(lambda: (tmp_path/model_key(config)/'samples.jsonl').exists(), ranks)
    time.sleep(1)
    begin = time.time()
    rank.terminate()
    assert ends(ranks) == [143] and time.time() - begin < 15
    saved = last_checkpoint(tmp_path/model_key(config)/'checkpoints')
    assert 0 < json.loads((saved/'state.json').read_text())['step'] < 9
    assert same_bits(train(config, tmp_path).weights, train(config, tmp_path/'other').weights)

def slowly(rank, step): time.sleep(.3)


def test_sigterm_to_one_rank_stops_all_at_the_same_step(three, undisturbed, processes, tmp_path):  # noqa: F811
    config = replace(three, save_every=1000)
    ranks = start(processes, 3, config, tmp_path, slowly)
    wait_for(lambda: (tmp_path/model_key(config)/'samples.jsonl').exists(), ranks)
    time.sleep(1)
    ranks[2].terminate()
    assert ends(ranks) == [143]*3
    assert len(list((tmp_path/model_key(config)/'checkpoints').glob('step-*'))) == 1
    assert ends(start(processes, 3, config, tmp_path)) == [0, 0, 0]
    assert same_bits(tmp_path/model_key(config)/'model.safetensors', undisturbed)          # how often it saves changes no weight


def test_the_command_says_where_it_stopped(arm, tmp_path, monkeypatch, capsys):  # noqa: F811
    (tmp_path/'arm.yaml').write_text(yaml.safe_dump(config_dict(arm)))
    step = trainer._step
    monkeypatch.setattr(trainer, '_step', lambda *args: os.kill(os.getpid(), signal.SIGTERM) or step(*args))
    with pytest.raises(SystemExit) as e: main([str(tmp_path/'arm.yaml'), '--models', str(tmp_path)])
    assert e.value.code == 143 and 'ended after step 1 of 9; the same call or command goes on from there' in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL          # as it was


# Disk and loader

@pytest.mark.parametrize('where', ['save_checkpoint', 'save_file'])
def test_a_full_disk_stops_the_run_and_keeps_what_was_saved(where, arm, whole, tmp_path, monkeypatch):  # noqa: F811
    calls, real = [], getattr(trainer, where)
    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3: raise OSError(errno.ENOSPC, 'No space left on device', str(args[1]))
        return real(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, where, full)
        with pytest.raises(OSError, match='No space left'): train(arm, tmp_path)
    assert last_checkpoint(tmp_path/model_key(arm)/'checkpoints').name == 'step-0000004'
    assert same_bits(train(arm, tmp_path).weights, whole[0].weights)


class Deadly:
    "A data set of which one batch kills the worker that loads it."
    def __init__(self, data): self.__dict__ = data.__dict__; self.data = data
    def __len__(self): return len(self.data)
    def __getitems__(self, keys):
        if torch.utils.data.get_worker_info() and self.deadly == [i for _, i in keys]: os.kill(os.getpid(), signal.SIGKILL)
        return self.data.__getitems__(keys)


def test_a_loader_worker_that_dies_is_noticed(arm, whole, tmp_path, monkeypatch):  # noqa: F811
    def loader(data, batches, workers):
        data.deadly = whole[1][8]                                    # the last: workers load ahead
        return make_loader(Deadly(data), batches, workers)
    monkeypatch.setattr(trainer, 'make_loader', loader)
    with pytest.raises(RuntimeError, match='DataLoader worker'): train(arm, tmp_path, workers=1)
    assert last_checkpoint(tmp_path/model_key(arm)/'checkpoints').name in ('step-0000006', 'step-0000008')
    monkeypatch.undo()
    assert same_bits(train(arm, tmp_path, workers=1).weights, whole[0].weights)


# Another number of ranks

def test_a_run_goes_on_with_another_number_of_ranks(arm, processes, tmp_path, monkeypatch):  # noqa: F811
    config = replace(arm, pca_scope='global', save_every=1)
    ranks = start(processes, 2, config, tmp_path, die)
    assert ends(ranks)[1] == -signal.SIGKILL
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        done = train(config, tmp_path)
    (message,) = [str(w.message) for w in said if 'goes on from step' in str(w.message)]
    assert 'on 1 processes; until there it was 2' in message and 'will not be bit-equal' in message and 'the PCA' not in message
    alone = train(config, tmp_path/'alone')
    assert math.isclose(done.log()[-1]['loss'], alone.log()[-1]['loss'], rel_tol=1e-3)


# Numbers

def test_ranks_add_up_in_their_order(processes, tmp_path):  # noqa: F811
    "The hook gives each element the mean in the order of ranks, wherever it lies and whatever the bucket's length."
    port = free_port()
    ranks = [processes(target=mean_in_order, args=(r, port, tmp_path), daemon=True) for r in range(3)]
    for p in ranks: p.start()
    assert ends(ranks) == [0, 0, 0]

def mean_in_order(rank, port, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE='3', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    dist.init_process_group('gloo')
    for n in (1, 2, 3, 4, 1000, 1001):
        parts = [torch.randn(n, generator=torch.Generator().manual_seed(r))*10.**r for r in range(3)]
        got = trainer._mean_in_rank_order(None, types.SimpleNamespace(buffer=lambda: parts[rank])).wait()
        assert torch.equal(got, (parts[0] + parts[1] + parts[2])/3)
    dist.destroy_process_group()


def test_float16_is_scaled_and_resumes_to_the_same_bits(arm, tmp_path, monkeypatch):  # noqa: F811
    config = replace(arm, precision='fp16', epochs=1, data_options=dict(n=30), batch_size=10, save_every=1)   # slow on a processor
    whole = train(config, tmp_path/'whole')
    assert all(v.dtype == torch.float32 for v in load_checkpoint(whole.weights).state_dict().values())
    near = train(replace(config, precision='fp32'), tmp_path/'near')
    assert abs(whole.log()[-1]['loss'] - near.log()[-1]['loss']) < .1
    steps_seen(monkeypatch, stop=2)
    with pytest.raises(Killed): train(config, tmp_path/'broken')
    state = json.loads((last_checkpoint(tmp_path/'broken'/model_key(config)/'checkpoints')/'state.json').read_text())
    assert state['scaler']['scale'] > 1
    monkeypatch.undo()
    assert same_bits(train(config, tmp_path/'broken').weights, whole.weights)


# What is seen

@pytest.fixture(scope='module')
def watched(arm, tmp_path_factory):  # noqa: F811
    heard = []
    return train(arm, tmp_path_factory.mktemp('watched'), watch=Watch(4, 'scenes', options=dict(split='val', n=60)), listen=[heard.append]), heard


def test_looking_changes_nothing(watched, whole):  # noqa: F811
    assert same_bits(watched[0].weights, whole[0].weights)


def test_what_is_watched(watched):
    done, heard = watched
    rows = [row for row in done.log() if 'whole t2i R@1' in row]
    assert [r['step'] for r in rows] == [4, 8, 9] and {f'{t} {w} R@1' for t in ('whole', 'move', 'remove', 'short') for w in ('t2i', 'i2t')} <= set(rows[0])
    assert all(0 <= v <= 100 for r in rows for k, v in r.items() if k.endswith('R@1')) and [r['step'] for r in heard] == [4, 8, 9, 9]
    best = json.loads((done.folder/'best.json').read_text())
    assert best['value'] == max(r['whole t2i R@1'] for r in rows) and best['step'] == next(r['step'] for r in rows if r['whole t2i R@1'] == best['value'])
    model, records = load_checkpoint(done.folder/'best.safetensors').eval(), Watch(1, 'scenes', options=dict(split='val', n=60)).records()
    _, transform, tok = done.load()
    assert trainer.watched_recall(model, transform, tok, records)['whole t2i R@1'] == best['value']


def test_captions_of_one_sentence_can_be_watched(arm, tmp_path):  # noqa: F811
    rows = train(replace(arm, epochs=1), tmp_path, watch=Watch(10, 'scenes', options=dict(split='train', text='short', n=30))).log()
    assert {k for k in rows[-1] if k.endswith('R@1')} == {'whole t2i R@1', 'whole i2t R@1'}


def test_samples_are_what_is_trained_on(whole, arm):  # noqa: F811
    done, seen = whole
    rows = [json.loads(line) for line in (done.folder/'samples.jsonl').read_text().splitlines()]
    assert [r['sample'] for r in rows] == [f'sample {i}' for i in seen[0][:8]]
    _, _, tok = done.load()
    records, store = trainer.training_records(arm), trainer.text_store(trainer.training_records(arm).captions, tok)
    batch = trainer.PairDataset(records, store, trainer.RECIPES[arm.recipe], trainer.Normalize([.5]*3, [.5]*3), arm.seed).texts([(0, i) for i in seen[0][:8]])
    assert torch.equal(tok([r['short'] for r in rows], n_pre=[r['n_pre'] for r in rows]), batch['short']) and torch.equal(tok([r['long'] for r in rows]), batch['long'])


def test_weights_and_biases_where_it_is_asked_for(arm, tmp_path, monkeypatch, capsys):  # noqa: F811
    (tmp_path/'arm.yaml').write_text(yaml.safe_dump(config_dict(replace(arm, epochs=1))))
    command = [str(tmp_path/'arm.yaml'), '--models', str(tmp_path), '--wandb', 'shortsighted', '--watch', 'scenes', '--watch-every', '2']
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises(SystemExit) as e: main(command)
    assert e.value.code == 2 and 'pip install wandb' in capsys.readouterr().err
    logged, asked = [], {}
    fake = types.SimpleNamespace(init=lambda **how: asked.update(how) or types.SimpleNamespace(log=lambda row, step: logged.append((step, row))))
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    main(command)
    assert asked['project'] == 'shortsighted' and asked['id'] == model_key(replace(arm, epochs=1)) and asked['resume'] == 'allow'
    assert [s for s, _ in logged] == [2, 3, 3] and 'loss' in logged[1][1] and 'whole t2i R@1' in logged[0][1]


def test_the_live_plot_draws_each_row(watched):
    hear = trainer.live_plot()
    for row in watched[1]: hear(row)
