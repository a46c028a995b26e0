"""Diagnoses that several test files look at, each made once."""
from functools import lru_cache

import torch

from debias_clip.authors import scene_records
from debias_clip.diagnosis import diagnose
from debias_clip.models import create_model
from debias_clip.pairs import Normalize
from debias_clip.records import Records
from debias_clip.tokens import get_tokenizer

TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))


def asked_model(length=88, backbone="scenes-clip", tag="web-0"):
    "(a model that comes with the package, or (tag None) of random weights, tokeniser)."
    torch.manual_seed(0)
    return create_model(backbone, tag, context_length=length, keep=8), get_tokenizer(backbone, length)


def ask(records, length=88, backbone="scenes-clip", tag="web-0", **more):
    model, tok = asked_model(length, backbone, tag)
    return diagnose(model, TRANSFORM, tok, records, **dict(shuffles=1, worst=3) | more)


@lru_cache
def world(): return scene_records("val", n=30)


def one_liners(): return Records("one-liners", world().images, [list(c[:1]) for c in world().captions])


@lru_cache
def diagnosis(name):
    "Of a CLIP ('one'), a SigLIP on 25 of the images ('a SigLIP'), the CLIP on captions of one sentence ('flat')."
    if name == "one": return ask(world(), name=name)
    if name == "a SigLIP": return ask(world(), backbone="scenes-siglip", name=name, n=25)
    return ask(one_liners(), name=name)
