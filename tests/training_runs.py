"""What the tests of the trainer share: tiny models, kills, and trainings in several processes."""
import json
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import open_clip
import torch
from safetensors.torch import load_file

import debias_clip.train as trainer
from debias_clip import resume
from debias_clip.config import RunOptions
from debias_clip.families import model_config
from debias_clip.resume import Stopped
from debias_clip.train import train

def tiny(backbone, **vision):
    "The offline world's backbone with one layer an eye and two a reader; a quarter of the time of a step."
    config = json.loads(json.dumps(model_config(backbone)))
    config["embed_dim"] = 16
    config["vision_cfg"] |= dict(layers=1, width=32, head_width=16) | vision
    config["text_cfg"] |= dict(layers=2, width=32, heads=2)
    return config


def register(name, config):
    "Makes a backbone known to open_clip in this process."
    (file := Path(tempfile.mkdtemp())/f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(file)


register("trained-clip", tiny("scenes-clip"))
register("trained-siglip", tiny("scenes-siglip"))
register("trained-dropout", tiny("scenes-clip", patch_dropout=0.5))
register("trained-resnet", tiny("scenes-clip") | dict(vision_cfg=dict(image_size=64, layers=[1, 1, 1, 1], width=8)))
register("trained-convnext", tiny("scenes-clip") | dict(vision_cfg=dict(
    image_size=48, timm_model_name="test_convnext", timm_model_pretrained=False, timm_pool="avg", timm_proj="linear",
    timm_drop_path=0.5)))

SMALL = dict(data="scenes", data_options=dict(n=48), backbone="trained-clip", context_length=88, keep=8, pca_dim=8,
             epochs=3, batch_size=16, lr=1e-3, warmup=2, precision="fp32")
EACH_STEP = RunOptions(save_every=1)
SECOND_STEP = RunOptions(save_every=2)


class Killed(Exception):
    "Stands for a kill in this process."


def steps_seen(monkeypatch, stop=None):
    "Records the sample numbers of each step; raises Killed in place of the step numbered `stop` (from 0)."
    seen, take = [], trainer.Step.__call__
    def recorded(self, batch, step):
        if len(seen) == stop: raise Killed
        seen.append(batch["index"].tolist())
        return take(self, batch, step)
    monkeypatch.setattr(trainer.Step, "__call__", recorded)
    return seen


def refuse(*_, **__): raise AssertionError("this should not have been called")


def same_bits(a, b):
    a, b = load_file(a), load_file(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a, b):
    "The largest difference of two files of weights."
    a, b = load_file(a), load_file(b)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# Several processes

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def join_group(rank, world, port):
    "What torchrun tells a process."
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))


def work(rank, world, port, config, models, options, patience, spoil):
    "One rank of a training; `spoil(rank, step)` is called before each of its steps."
    join_group(rank, world, port)
    resume.PATIENCE, take, done = timedelta(seconds=patience), trainer.Step.__call__, []
    def spoilt(self, batch, step):
        if spoil: spoil(rank, len(done))
        done.append(1)
        return take(self, batch, step)
    trainer.Step.__call__ = spoilt
    try: train(config, models, options)
    except Stopped: raise SystemExit(143) from None


def start(processes, world, config, models, options=EACH_STEP, spoil=None, patience=60):
    "The ranks of a training, started."
    port = free_port()
    ranks = [processes(target=work, args=(r, world, port, config, models, options, patience, spoil), daemon=True)
             for r in range(world)]
    for p in ranks: p.start()
    return ranks


def ends(ranks, seconds=120):
    "Exit codes, once all have ended; a rank that has not by then is killed and counts as None."
    until = time.time() + seconds
    for p in ranks: p.join(max(0, until - time.time()))
    codes = [p.exitcode for p in ranks]
    for p in ranks:
        p.kill()
        p.join()
    return codes


def wait_for(condition, ranks, seconds=120):
    until = time.time() + seconds
    while not condition():
        assert time.time() < until and all(p.is_alive() for p in ranks)
        time.sleep(0.002)
