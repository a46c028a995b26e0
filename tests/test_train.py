"""The trainer: kills, damaged checkpoints, several processes, keys, and what stops a run before it starts.

Models are small and trained for a few steps, so these are tests of plumbing. Processes to kill come from a server that has imported torch once.
"""
import dataclasses
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock
from PIL import Image
from safetensors.torch import load_file, save_file

import debias_clip.train as trainer
from debias_clip.captions import RECIPES
from debias_clip.data import GlobalBatches, PairDataset, TextStore
from debias_clip.losses import NonFiniteFeatures
from debias_clip.models import CLIP, create_model, save_checkpoint
from debias_clip.tokens import get_tokenizer
from debias_clip.train import TrainConfig, config_dict, last_checkpoint, lr_at, main, model_key, read_config, starting_model, train, training_records

SMALL = dict(data='scenes', data_options=dict(n=48), backbone='scenes-clip', context_length=88, keep=8, pca_dim=8, epochs=3, batch_size=16, lr=1e-3, warmup=2, precision='fp32')


@pytest.fixture(scope='module')
def starts(tmp_path_factory):
    "Random weights at pre-training's length, as files, which is quicker than a pre-training."
    folder, files = tmp_path_factory.mktemp('starts'), {}
    for backbone in ('scenes-clip', 'scenes-siglip'):
        torch.manual_seed(0)
        files[backbone] = str(save_checkpoint(create_model(backbone, context_length=28, keep=8), folder/f'{backbone}.safetensors'))
    return files


@pytest.fixture(scope='module')
def arm(starts): return TrainConfig(**SMALL, init=starts['scenes-clip'], save_every=2)


@pytest.fixture(scope='module')
def siglip(starts):
    return TrainConfig(**SMALL | dict(backbone='scenes-siglip', data_options=dict(n=32)), init=starts['scenes-siglip'], save_every=1)


class Killed(Exception): pass


def steps_seen(monkeypatch, stop=None, spoil=None):
    "Records the sample numbers of each step; raises Killed in place of the step numbered `stop`."
    seen, step = [], trainer._step
    def recorded(*args):
        if len(seen) == stop: raise Killed
        seen.append(args[4]['index'].tolist())
        return step(*args)
    monkeypatch.setattr(trainer, '_step', recorded)
    return seen


def refuse(*_, **__): raise AssertionError('this should not have been called')


def same_bits(a, b):
    a, b = load_file(a), load_file(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope='module')
def whole(arm, tmp_path_factory):
    "A run left alone, and the samples of its steps."
    with pytest.MonkeyPatch.context() as patch:
        seen = steps_seen(patch)
        return train(arm, tmp_path_factory.mktemp('whole')), seen


# What a run does

def test_every_epoch_has_its_own_order(arm, whole):
    seen, n, batch = whole[1], 48, 16
    assert len(seen) == 9
    epochs = [sum(seen[3*e:3*e + 3], []) for e in range(3)]
    assert all(sorted(e) == list(range(n)) for e in epochs) and len({tuple(e) for e in epochs}) == 3
    batches = GlobalBatches(n, batch, seed=arm.seed)
    for e, epoch in enumerate(epochs):
        batches.set_epoch(e)
        assert [i for b in batches for _, i in b] == epoch


def test_log_and_folder(arm, whole):
    done = whole[0]
    (row,) = done.log()                                             # every 10 steps and at the end
    assert row['step'] == 9 and row['chance'] == math.log(16) and row['lr'] == lr_at(8, arm, 9)
    assert set(row) == {'step', 'loss', 'long', 'short', 'chance', 'logit_scale', 'lr', 'images_per_s', 'images_per_s_rank', 'memory_gib'}
    assert abs(row['loss'] - .1*row['short'] - .9*row['long']) < 1e-5
    assert {p.name for p in done.folder.iterdir()} == {'config.json', 'log.jsonl', 'model.safetensors', 'samples.jsonl', 'tensorboard'}    # checkpoints are gone
    assert TrainConfig.from_dict(json.loads((done.folder/'config.json').read_text())) == arm and done.key == model_key(arm) == done.folder.name
    model, transform, tok = done.load()
    assert not model.training and model.context_length == tok.context_length == 88 and model.keep == 8


def test_warm_up_and_cosine():
    config = TrainConfig(lr=2., warmup=4)
    lrs = [lr_at(s, config, 104) for s in range(105)]
    assert lrs[:4] == [.5, 1., 1.5, 2.] and lrs[4] == 2 and math.isclose(lrs[54], 1) and abs(lrs[104]) < 1e-12
    assert all(a >= b for a, b in zip(lrs[3:], lrs[4:])) and lr_at(0, replace(config, warmup=0), 1) == 2
    assert lr_at(0, replace(config, warmup=9), 5) > 0               # a run that ends in its warm-up


def test_second_time_does_no_work(arm, whole, monkeypatch):
    for name in ('_fit', 'training_records', 'build_model'): monkeypatch.setattr(trainer, name, refuse)
    before = {p: p.stat().st_mtime_ns for p in whole[0].folder.rglob('*')}
    assert train(arm, whole[0].folder.parent) == whole[0]
    assert {p: p.stat().st_mtime_ns for p in whole[0].folder.rglob('*')} == before


def test_workers_change_nothing(arm, whole, tmp_path):
    assert same_bits(train(arm, tmp_path, workers=1).weights, whole[0].weights)


@pytest.mark.parametrize('backbone', ['scenes-clip', 'scenes-siglip'])
def test_kept_rows_stay_bit_equal(backbone, starts, tmp_path):
    config = TrainConfig(**SMALL | dict(backbone=backbone, epochs=1, weight_decay=.5), init=starts[backbone])
    tables = [getattr(m, 'text', m).positional_embedding for m in (starting_model(config, tmp_path)[0], train(config, tmp_path).load()[0])]
    moved = (tables[0] != tables[1]).any(1)
    assert len(moved) == 88 and not moved[:8].any() and moved[8:].all()


def test_pre_training_moves_all_rows_and_comes_first(tmp_path, monkeypatch):
    web = dict(data='scenes', data_options=dict(split='web', text='short', n=16), backbone='scenes-clip', context_length=28, keep=8, recipe=None, short_weight=0., epochs=1, batch_size=16, lr=1e-3, warmup=0)
    config = TrainConfig(**SMALL | dict(epochs=1), init=web)
    assert isinstance(config.init, TrainConfig)
    seen = steps_seen(monkeypatch)
    done = train(config, tmp_path)
    assert len(seen) == 1 + 3 and {p.name for p in tmp_path.iterdir()} == {done.key, model_key(config.init)}
    pretrained = train(config.init, tmp_path).load()[0]
    torch.manual_seed(config.init.seed)
    moved = (create_model('scenes-clip', context_length=28, keep=8).positional_embedding != pretrained.positional_embedding).any(1)
    assert moved[:8].all()
    start = starting_model(config, tmp_path)[0].positional_embedding
    assert torch.equal(start[:8], pretrained.positional_embedding[:8]) and torch.equal(start[:8], done.load()[0].positional_embedding[:8])
    train(replace(config, recipe='long_clip', epochs=1), tmp_path)
    assert len(seen) == 4 + 3                                       # the arms share the pre-training


def test_bfloat16_is_near(arm, starts, tmp_path):
    short = replace(arm, epochs=1, save_every=None)
    losses = [train(replace(short, precision=p), tmp_path).log()[-1]['loss'] for p in ('fp32', 'bf16')]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < .1


# Kills

@pytest.fixture(scope='module')
def processes():
    "Makes processes that have torch imported already."
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['debias_clip.train', 'torch.utils.tensorboard'])
    return context.Process


def in_the_middle_of_writing(folder): return (folder/'step-0000004.tmp'/'model.safetensors').exists()
def after_a_checkpoint(folder): return (folder/'last.json').exists() and 'step-0000004' in (folder/'last.json').read_text()


@pytest.mark.parametrize('moment', [in_the_middle_of_writing, after_a_checkpoint])
def test_killed_run_ends_with_the_same_bits(moment, arm, whole, processes, tmp_path, monkeypatch):
    process, checkpoints = processes(target=train, args=(arm, tmp_path), daemon=True), tmp_path/model_key(arm)/'checkpoints'
    process.start()
    while not moment(checkpoints):
        assert process.is_alive()
        time.sleep(.001)
    if moment is after_a_checkpoint: time.sleep(random.uniform(0, .1))
    process.kill(); process.join()
    assert process.exitcode == -signal.SIGKILL
    left = sorted(p.name for p in checkpoints.glob('step-*') if p.suffix != '.tmp')
    seen, done = steps_seen(monkeypatch), train(arm, tmp_path)
    assert seen == whole[1][int(left[-1][5:]):]                      # goes on with the batch after the last checkpoint
    assert same_bits(done.weights, whole[0].weights)
    assert [r['step'] for r in done.log()] == [9] and not checkpoints.exists()


@pytest.fixture(scope='module')
def interrupted(siglip, tmp_path_factory):
    "Models folders: one with a run stopped in its fifth step, checkpoints 3 and 4 kept; one with the run left alone."
    broken, complete = (tmp_path_factory.mktemp(n) for n in ('broken', 'complete'))
    with pytest.MonkeyPatch.context() as patch:
        steps_seen(patch, stop=4)
        with pytest.raises(Killed): train(siglip, broken)
    assert sorted(p.name for p in (broken/model_key(siglip)/'checkpoints').iterdir()) == ['last.json', 'step-0000003', 'step-0000004']
    return broken, train(siglip, complete)


def cut(file): file.write_bytes(file.read_bytes()[:file.stat().st_size//2])

def half_written(c):
    shutil.copytree(c/'step-0000004', c/'step-0000005.tmp')
    cut(c/'step-0000005.tmp'/'optimizer.safetensors'); (c/'step-0000005.tmp'/'state.json').unlink()

DAMAGES = {'half-written folder': (half_written, 4, None), 'no pointer': (lambda c: (c/'last.json').unlink(), 4, None), 'torn pointer': (lambda c: cut(c/'last.json'), 4, None),
           'half weights': (lambda c: cut(c/'step-0000004'/'model.safetensors'), 3, 'model.safetensors is not what was saved'),
           'half moments': (lambda c: cut(c/'step-0000004'/'optimizer.safetensors'), 3, 'optimizer.safetensors is not what was saved'),
           'half state': (lambda c: cut(c/'step-0000004'/'state.json'), 3, 'state.json cannot be read'),
           'empty state': (lambda c: (c/'step-0000004'/'state.json').write_bytes(b''), 3, 'state.json cannot be read'),
           'zeros for state': (lambda c: (c/'step-0000004'/'state.json').write_bytes(bytes(100)), 3, 'state.json cannot be read'),
           'null for state': (lambda c: (c/'step-0000004'/'state.json').write_text('null'), 3, 'state.json is not what was saved'),
           'nothing in state': (lambda c: (c/'step-0000004'/'state.json').write_text('{}'), 3, 'state.json is not what was saved'),
           'a list for state': (lambda c: (c/'step-0000004'/'state.json').write_text('[1]'), 3, 'state.json is not what was saved'),
           'no weights': (lambda c: (c/'step-0000004'/'model.safetensors').unlink(), 3, 'model.safetensors is missing'),
           'empty folder': (lambda c: [f.unlink() for f in (c/'step-0000004').iterdir()], 3, 'state.json cannot be read')}


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_checkpoint_is_passed_over(damage, siglip, interrupted, tmp_path, monkeypatch):
    spoil, start, message = DAMAGES[damage]
    shutil.copytree(interrupted[0]/model_key(siglip), tmp_path/model_key(siglip))
    spoil(checkpoints := tmp_path/model_key(siglip)/'checkpoints')
    seen = steps_seen(monkeypatch)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        done = train(siglip, tmp_path)
    said = [str(w.message) for w in said if 'is damaged' in str(w.message)]
    assert (len(said) == 1 and str(checkpoints/'step-0000004') in said[0] and message in said[0]) if message else said == []
    assert len(seen) == 6 - start and same_bits(done.weights, interrupted[1].weights)


def test_a_whole_checkpoint_outlives_a_damaged_newer_one(siglip, interrupted, tmp_path, monkeypatch):
    "The newest is damaged, and the next run dies as well: the good one and what it saved are there still."
    shutil.copytree(interrupted[0]/model_key(siglip), tmp_path/model_key(siglip))
    cut((checkpoints := tmp_path/model_key(siglip)/'checkpoints')/'step-0000004'/'state.json')
    for stop, last in ((0, 3), (1, 4)):
        steps_seen(monkeypatch, stop)
        with warnings.catch_warnings(), pytest.raises(Killed):
            warnings.simplefilter('ignore')
            train(siglip, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            assert last_checkpoint(checkpoints).name == f'step-{last:07d}'
        monkeypatch.undo()


def test_new_checkpoints_outlive_two_damaged_ones(siglip, interrupted, tmp_path, monkeypatch):
    shutil.copytree(interrupted[0]/model_key(siglip), tmp_path/model_key(siglip))
    checkpoints = tmp_path/model_key(siglip)/'checkpoints'
    for step in (3, 4): cut(checkpoints/f'step-{step:07d}'/'state.json')
    steps_seen(monkeypatch, stop=2)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with pytest.raises(Killed): train(siglip, tmp_path)
        assert last_checkpoint(checkpoints) == checkpoints/'step-0000002'


# Several processes

def torchrun(n, *arguments):
    "(exit status, stdout, stderr) of n processes, none of which outlives it."
    run = subprocess.Popen([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(n), '-m', 'debias_clip.train', *map(str, arguments)],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try: out, err = run.communicate(timeout=900)
    finally:
        with suppress(ProcessLookupError): os.killpg(run.pid, signal.SIGKILL)
    return run.returncode, out, err


def same_course(trained, printed):
    "The log of a model, after a look that the run which printed the path of its weights took the same course (losses are means over ranks)."
    log, other = trained.log(), replace(trained, folder=Path(printed.strip()).parent).log()
    assert [r['step'] for r in log] == [r['step'] for r in other]
    for a, b in zip(log, other): assert all(math.isclose(a[k], b[k], rel_tol=1e-4) for k in ('logit_scale', 'loss', 'long', 'short')), (a, b)
    return log


def test_two_processes_learn_what_one_does(arm, tmp_path):
    config = replace(arm, pca_scope='global', data_options=dict(n=64), epochs=5, lr=1e-4, save_every=None)
    (tmp_path/'arm.yaml').write_text(yaml.safe_dump(config_dict(config)))
    status, out, err = torchrun(2, tmp_path/'arm.yaml', '--models', tmp_path/'two')
    assert status == 0, err
    log = same_course(train(config, tmp_path/'one'), out)    # one process speaks
    assert [r['step'] for r in log] == [10, 20] and log[1]['loss'] < log[0]['loss']


def rank(rank, port, config, folder):
    "One of two processes; writes the weights it ends with."
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    loop = trainer._loop
    def kept(config, home, model, *rest):
        loop(config, home, model, *rest)
        save_file({k: v.clone() for k, v in model.state_dict().items()}, folder/f'{home.name}-{rank}.safetensors')
    trainer._loop = kept
    train(config, folder/'models')


def test_ranks_stay_equal(arm, processes, tmp_path):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    web = replace(arm, init=None, data_options=dict(n=16), context_length=28, recipe=None, short_weight=0., epochs=1)
    config = replace(arm, init=web, batch_size=20, data_options=dict(n=40), epochs=2, save_every=1)       # local PCA: 8 components of 10 samples
    ranks = [processes(target=rank, args=(r, port, config, tmp_path), daemon=True) for r in range(2)]
    for p in ranks: p.start()
    for p in ranks: p.join(900)
    assert [p.exitcode for p in ranks] == [0, 0]
    for key in (model_key(web), model_key(config)):
        saved = tmp_path/'models'/key/'model.safetensors'
        assert all(same_bits(tmp_path/f'{key}-{r}.safetensors', saved) for r in range(2))


@pytest.mark.parametrize('world, change, message', [(2, {}, '16/2 = 8 samples a rank cannot give pca_dim=8'), (3, dict(pca_dim=2), 'cannot be shared by 3 processes evenly')])
def test_a_batch_that_ranks_cannot_share(world, change, message, arm, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, '_rank_and_world', lambda: (0, world))
    for name in ('build_model', '_loop'): monkeypatch.setattr(trainer, name, refuse)
    with pytest.raises(ValueError, match=message): train(replace(arm, **change), tmp_path)
    assert not list(tmp_path.iterdir())


# Bad input

def test_nan_names_step_and_samples(starts, tmp_path):
    "Weights with a NaN for one word spoil the captions that hold it, and no others."
    tok, word = get_tokenizer('scenes-clip', 88), 'book'
    (token,), file = tok.encode(word), tmp_path/'spoilt.safetensors'
    model = create_model('scenes-clip', starts['scenes-clip'], 28, 8)
    with torch.no_grad(): model.token_embedding.weight[token, 0] = float('nan')
    config = TrainConfig(**SMALL | dict(batch_size=9, epochs=1), init=str(save_checkpoint(model, file)), save_every=1)
    spoilt = [word in ' '.join(c).split() or f'{word}.' in ' '.join(c).split() for c in training_records(config).captions]
    runs = {seed: [[i for _, i in b] for b in GlobalBatches(48, 9, seed=seed)] for seed in range(50)}
    bad = {seed: next((k for k, b in enumerate(run) if any(spoilt[i] for i in b)), None) for seed, run in runs.items()}
    seed = next(s for s in bad if bad[s] == 1)                      # the second batch is the first with the word in it
    rows = [k for k, i in enumerate(runs[seed][1]) if spoilt[i]]
    with pytest.raises(NonFiniteFeatures) as e: train(replace(config, seed=seed), tmp_path/'models')
    assert e.value.rows == {0: rows} and str(e.value).startswith('step 1: ')
    assert f"On rank 0 these are {', '.join(f'sample {runs[seed][1][k]}' for k in rows)}. " in str(e.value)
    checkpoint = last_checkpoint(tmp_path/'models'/model_key(replace(config, seed=seed))/'checkpoints')
    assert checkpoint.name == 'step-0000001' and str(checkpoint.parent) in str(e.value)


@pytest.mark.parametrize('models', ['file', '/proc/models'])
def test_a_folder_that_cannot_be_written(models, arm, tmp_path, monkeypatch):
    (tmp_path/'file').write_text('not a folder')
    for name in ('training_records', 'build_model', '_loop'): monkeypatch.setattr(trainer, name, refuse)
    with pytest.raises(ValueError, match=f"models folder {tmp_path/'file' if models == 'file' else '/proc/models'} cannot be written to"): train(arm, tmp_path/models)


def test_one_model_is_not_trained_twice_at_once(arm, whole, tmp_path, monkeypatch):
    "The second run stops and names the folder; what the first does is not disturbed; its lock dies with it."
    folder = tmp_path/model_key(arm)
    folder.mkdir()
    with FileLock(folder/'lock'):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, '_fit', refuse)
            with pytest.raises(ValueError, match=f'Another run is training {folder.name} in {folder}'): train(arm, tmp_path)
    assert same_bits(train(arm, tmp_path).weights, whole[0].weights) and not (folder/'lock').exists()
    (folder/'lock').touch()                                          # left by a kill


def test_a_torn_log_is_read_and_gone_on_with(whole, arm, tmp_path):
    folder = tmp_path/model_key(arm)
    folder.mkdir()
    (folder/'log.jsonl').write_text('{"step": 3, "loss": 1.0}\n{"step": 6, "lo')
    assert replace(whole[0], folder=folder).log() == [{'step': 3, 'loss': 1.0}]
    assert [row['step'] for row in train(arm, tmp_path).log()] == [3, 9]


@pytest.mark.parametrize('fields, message', [
    (dict(learning_rate=1e-6), "no field 'learning_rate'; its fields are data, root"), (dict(init=dict(lerning=1)), "no field 'lerning'"),
    (dict(lr='1e-6'), "lr='1e-6' is text: YAML reads 1e-6 so; write 1.0e-6"), (dict(weight_decay='1e-2'), 'weight_decay'),
    (dict(batch_size=32), 'pca_dim=32 needs a batch_size of 33 or more'), (dict(batch_size=2, pca_dim=2), 'needs a batch_size of 3'),
    (dict(recipe=None), 'short_weight must be 0, not 0.1'), (dict(recipe='debiased'), "no recipe 'debiased'; there are long_clip, no_summary, sampled, debias"),
    (dict(precision='fp64'), "not 'fp64'"), (dict(epochs=0), 'epochs must be a whole number, 1 or more, not 0'), (dict(epochs=1.5), 'not 1.5'), (dict(epochs=True), 'not True'),
    (dict(seed=-1), 'seed'), (dict(save_every='5'), "save_every must be a whole number, 1 or more, or none (null), not '5'"), (dict(save_every=-3), 'not -3'), (dict(micro_batch=0), 'micro_batch'),
    (dict(betas=[.9]), 'betas must be two numbers'), (dict(betas=.9), 'betas must be two numbers'), (dict(betas=[.9, 1.]), 'below 1'), (dict(lr=None), 'lr must be a number, 0 or more, not None'), (dict(lr=True), 'not True'),
    (dict(freeze_image=1), 'freeze_image must be true or false'), (dict(logit_scale='4.6'), 'logit_scale'), (dict(keep=77), 'keep=77'), (dict(context_length=64), 'shorter than the 77 positions'), (dict(pca_dim=513, batch_size=1024), 'no 513 components'),
    (dict(short_weight=1.5), 'short_weight is the share of the short loss'), (dict(label_smoothing=1), 'label_smoothing'), (dict(pca_scope='globl'), 'pca_scope'), (dict(backbone='ViT-B-17'), 'ViT-B-16'),
    (dict(init=dict(backbone='ViT-B-32')), 'cannot start from a model trained as ViT-B-32'), (dict(warmup='2'), "not '2'"), (dict(lr=float('nan')), 'lr must be a number'), (dict(lr=-1.), 'not -1.0'), (dict(eps=math.inf), 'eps')])
def test_a_configuration_that_cannot_be_meant(fields, message):
    with pytest.raises(ValueError) as e: TrainConfig.from_dict(fields)
    assert message in str(e.value)


def test_what_a_configuration_may_be():
    assert TrainConfig(recipe=None, short_weight=0., batch_size=8).batch_size == 8         # no PCA, no need of samples
    assert TrainConfig(recipe=None, short_weight=0).betas == (.9, .999)


@pytest.mark.parametrize('change', [dict(short_weight=1.5), dict(label_smoothing=1.), dict(pca_scope='globl'), dict(keep=28), dict(keep=30), dict(context_length=20), dict(backbone='scenes-clap'),
                                    dict(batch_size=49), dict(data_options=dict(author='third')), dict(data='no-such-data'), dict(init='no-such-tag')])
def test_a_setting_that_does_not_fit_stops_before_the_first_step(change, arm, tmp_path, monkeypatch):
    "Also before that of a pre-training."
    seen, web = steps_seen(monkeypatch), replace(arm, init=None, context_length=28, recipe=None, short_weight=0.)
    with pytest.raises(ValueError): train(replace(arm, **dict(init=web) | change), tmp_path)
    assert seen == []


# Keys

OTHER = dict(data='scenes', root='somewhere', data_options=dict(n=1), backbone='scenes-clip', init='openai', context_length=100, keep=19, recipe='sampled', short_weight=.2, pca_dim=31,
             pca_scope='global', label_smoothing=0., epochs=4, batch_size=512, lr=1e-5, weight_decay=0., betas=(.9, .98), eps=1e-6, warmup=0, logit_scale=2., seed=1, precision='fp32', save_every=7, grad_checkpointing=True, micro_batch=8, freeze_image=True)


def test_every_field_is_in_the_key():
    assert set(OTHER) == {f.name for f in dataclasses.fields(TrainConfig)}
    base = TrainConfig()
    keys = [model_key(base)] + [model_key(replace(base, **{k: v})) for k, v in OTHER.items()]
    keys += [model_key(replace(base, init=c)) for c in (base, replace(base, seed=1))] + [model_key(replace(base, data_options=dict(n=2)))]
    assert len(set(keys)) == len(keys) == len(OTHER) + 4 and all(len(k) == 12 and int(k, 16) >= 0 for k in keys)


def test_the_key_survives_yaml_and_order(tmp_path):
    inner = TrainConfig(**OTHER)
    for config in (TrainConfig(), inner, replace(inner, init=inner, data_options=dict(n=3, text='short', author='own'))):
        plain = config_dict(config)
        turned = {k: dict(reversed(v.items())) if isinstance(v, dict) else v for k, v in reversed(plain.items())}
        for k, (fields, sort) in enumerate(((plain, True), (plain, False), (turned, False))):
            (file := tmp_path/f'{k}.yaml').write_text(yaml.safe_dump(fields, sort_keys=sort))
            assert read_config(file) == config and model_key(read_config(file)) == model_key(config)
    only = tmp_path/'only.yaml'
    only.write_text('seed: 3\n')
    assert model_key(read_config(only)) == model_key(TrainConfig(seed=3))


def test_equal_numbers_and_paths_make_equal_keys():
    base = TrainConfig(short_weight=0, recipe=None, weight_decay=0, betas=[0, .9])
    assert model_key(base) == model_key(TrainConfig(short_weight=0., recipe=None, weight_decay=0., betas=(0, .9)))
    assert TrainConfig(init=Path('weights.pt')).init == 'weights.pt' and TrainConfig(data=Path('table.csv'), root=Path('.')).root == '.'


def test_files_count_by_their_bytes(arm, starts, tmp_path):
    "A checkpoint or a table that moves is the same; one that changes in its place is another."
    moved, other = tmp_path/'moved.safetensors', tmp_path/'other.safetensors'
    shutil.copy(starts['scenes-clip'], moved); shutil.copy(starts['scenes-siglip'], other)
    assert model_key(replace(arm, init=moved)) == model_key(arm) != model_key(replace(arm, init=other))
    assert config_dict(replace(arm, init=moved))['init'] == str(moved)                  # the configuration still says where
    tables = [tmp_path/name for name in ('a.csv', 'b/captions.csv')]
    tables[1].parent.mkdir()
    for t in tables: t.write_text('image,caption\n1.jpg,A dog. It runs.\n')
    keys = [model_key(replace(arm, data=str(d), data_options={})) for d in (tables[0], tables[1], tables[1].parent)]
    tables[0].write_text('image,caption\n1.jpg,A dog. It sits.\n')
    assert len(set(keys)) == 1 and model_key(replace(arm, data=str(tables[0]), data_options={})) != keys[0]


# Memory

@pytest.mark.parametrize('backbone', ['scenes-clip', 'scenes-siglip'])
@pytest.mark.parametrize('settings', [dict(micro_batch=1), dict(micro_batch=5), dict(grad_checkpointing=True), dict(micro_batch=4, grad_checkpointing=True)], ids=str)
def test_less_memory_same_gradient(settings, backbone, starts):
    config, seen = TrainConfig(**SMALL | dict(backbone=backbone), init=starts[backbone]), {}
    records = training_records(config)
    for name, c in dict(plain=config, saving=replace(config, **settings)).items():
        model, transform, tok = trainer.build_model(c, 'models')
        batch = PairDataset(records, TextStore(records.captions, tok), RECIPES['debias'], trainer.images_transform(records, model, transform)).__getitems__([(0, i) for i in range(16)])
        forwards, encode = [], model.encode_image
        model.encode_image = lambda images: forwards.append(len(images)) or encode(images)
        loss = trainer._criterion(c)(*trainer._Towers(model, c.micro_batch)(batch))['loss']
        loss.backward()
        seen[name] = loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, forwards
    (loss, gradient, once), (same, other, again) = seen['plain'], seen['saving']
    assert once == [16] and math.isclose(loss, same, rel_tol=1e-6) and gradient.keys() == other.keys()
    if c.micro_batch: assert max(again) == c.micro_batch and sum(again) == 2*16              # each part, and each again
    for n, g in gradient.items(): assert (g - other[n]).norm() <= 1e-4*g.norm() + 1e-7, n


def test_two_ranks_in_parts_learn_what_one_does_at_once(arm, tmp_path):
    config = replace(arm, pca_scope='global', data_options=dict(n=64), epochs=5, lr=1e-4, save_every=None)
    (tmp_path/'arm.yaml').write_text(yaml.safe_dump(config_dict(replace(config, micro_batch=3, grad_checkpointing=True))))
    status, out, err = torchrun(2, tmp_path/'arm.yaml', '--models', tmp_path/'two')
    assert status == 0, err
    assert len(same_course(train(config, tmp_path/'one'), out)) == 2


@pytest.mark.parametrize('backbone', ['scenes-clip', 'scenes-siglip'])
def test_a_frozen_image_tower_is_run_once(backbone, starts, tmp_path, monkeypatch):
    "Its weights keep their bits, the text tower learns, and the features read from the file give the gradient that computing them each time gives."
    config, calls = TrainConfig(**SMALL | dict(backbone=backbone), init=starts[backbone], freeze_image=True, save_every=2), []
    build = trainer.build_model
    def counted(*args):
        model, *rest = build(*args)
        encode = model.encode_image
        model.encode_image = lambda images: calls.append(len(images)) or encode(images)
        return model, *rest
    monkeypatch.setattr(trainer, 'build_model', counted)
    done = train(config, tmp_path/'once')
    assert sum(calls) == 48                                         # three epochs of 48 pictures
    before, after = (dict(m.named_parameters()) for m in (build(config, tmp_path)[0], done.load()[0]))
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert not any(n.startswith('visual.') for n in moved) and any('resblocks' in n for n in moved) and 'logit_scale' in moved
    assert not list(done.folder.glob('image-features*'))

    towers = trainer._Towers
    def each_time(model, micro_batch, freeze_image): return towers(model, micro_batch)
    monkeypatch.setattr(trainer, '_Towers', each_time)
    monkeypatch.setattr(trainer, '_image_features', lambda *_: None)
    assert len(same_course(train(config, tmp_path/'each'), str(done.weights))) == 1


def test_a_frozen_image_tower_on_two_ranks_and_after_a_kill(arm, tmp_path, monkeypatch):
    config = replace(arm, freeze_image=True, pca_scope='global', data_options=dict(n=50), save_every=1)
    (tmp_path/'arm.yaml').write_text(yaml.safe_dump(config_dict(config)))
    status, out, err = torchrun(2, tmp_path/'arm.yaml', '--models', tmp_path/'two')
    assert status == 0, err
    with monkeypatch.context() as patch:
        steps_seen(patch, stop=4)
        with pytest.raises(Killed): train(config, tmp_path/'one')
    assert (tmp_path/'one'/model_key(config)/'image-features.npy').exists()
    with monkeypatch.context() as patch:
        patch.setattr(CLIP, 'encode_image', refuse)                      # the features are there
        assert len(same_course(train(config, tmp_path/'one'), out)) == 1


# The command

def test_a_bad_file_ends_with_a_message(tmp_path):
    (bad := tmp_path/'bad.yaml').write_text('lr: 1e-6')
    said = subprocess.run([sys.executable, '-m', 'debias_clip.train', bad], capture_output=True, text=True, timeout=900)
    assert said.returncode == 2 and said.stdout == '' and 'Traceback' not in said.stderr
    assert said.stderr.strip().splitlines()[-1] == f"debias_clip.train: error: {bad}: lr='1e-6' is text: YAML reads 1e-6 so; write 1.0e-6."


def test_what_training_refuses_ends_with_a_message(tmp_path):
    (config := tmp_path/'arm.yaml').write_text(yaml.safe_dump(SMALL | dict(data_options=dict(author='third'))))
    said = subprocess.run([sys.executable, '-m', 'debias_clip.train', config, '--models', tmp_path], capture_output=True, text=True, timeout=900)
    assert said.returncode == 2 and said.stdout == '' and said.stderr.strip().splitlines()[-1] == "debias_clip.train: The offline world has no author 'third'; there is own, other."


def test_a_fault_keeps_its_traceback(tmp_path, monkeypatch):
    (config := tmp_path/'arm.yaml').write_text(yaml.safe_dump(SMALL))
    monkeypatch.setattr(trainer, 'train', lambda *_: int('x'))
    with pytest.raises(ValueError, match='invalid literal'): main([str(config)])


@pytest.mark.parametrize('text, message', [('lerning: 1', "no field 'lerning'"), ('- a\n- b', 'no field'), ('7', ''), ('a: [1', 'bad.yaml'), ('batch_size: 8', 'batch_size of 33'), (None, 'bad.yaml'), (b'\xff\xfe\x00', 'bad.yaml')])
def test_nothing_starts_where_one_file_is_bad(text, message, tmp_path, monkeypatch, capsys):
    (good := tmp_path/'good.yaml').write_text(yaml.safe_dump(SMALL))
    bad = tmp_path/'bad.yaml'
    if text is not None: bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr(trainer, 'train', refuse)
    with pytest.raises(SystemExit) as e: main([str(good), str(bad)])
    assert e.value.code == 2 and message in capsys.readouterr().err


def test_the_module_starts_with_m_alone(monkeypatch):
    "In a notebook __name__ is __main__ too; there is no __spec__ there."
    monkeypatch.setattr(sys, 'argv', ['train', 'no-such-file.yaml'])
    code = compile(Path(trainer.__file__).read_text(), 'train', 'exec')
    exec(code, {'__name__': '__main__', '__package__': 'debias_clip'})
    with pytest.raises(SystemExit): exec(code, {'__name__': '__main__', '__package__': 'debias_clip', '__spec__': trainer.__spec__})
    exec(code, {'__name__': 'debias_clip.train', '__package__': 'debias_clip', '__spec__': trainer.__spec__})


def test_unreadable_pictures_are_a_setting(tmp_path):
    "Stop at the first, or leave out up to a share of them, named."
    for i in range(4): Image.new('RGB', (8, 8), (60*i, 0, 0)).save(tmp_path/f'{i}.png')
    (tmp_path/'2.png').write_bytes(b'')
    (tmp_path/'captions.csv').write_text('image,caption\n' + ''.join(f'{i}.png,A square. It is number {i}.\n' for i in range(4)))
    config = TrainConfig(data=str(tmp_path), backbone='scenes-clip', keep=8)
    assert len(training_records(config)) == 4
    with pytest.raises(ValueError, match='1 of 4 images cannot be read'): training_records(replace(config, data_options=dict(max_unreadable=.2)))
    with pytest.warns(UserWarning, match='2.png: the file is empty'): records = training_records(replace(config, data_options=dict(max_unreadable=.25)))
    assert [c[1] for c in records.captions] == [f'It is number {i}.' for i in (0, 1, 3)]
