"""Every order of the sentences: of the same captions, each texts what it says, and reductions by hand."""
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import debias_clip.bias as bias
import debias_clip.order as order
from debias_clip.data import Normalize, Records
from debias_clip.models import create_model
from debias_clip.order import leave_out, order_matrix, place_summary, shuffle_hits, shuffled
from debias_clip.scenes import scene_records
from debias_clip.tokens import get_tokenizer

TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))
sentences = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=9)


@given(sentences, st.integers(1, 9))
def test_place_summary(s, place):
    if place > len(s):
        with pytest.raises(ValueError, match='no place'): place_summary(s, place)
        return
    moved = place_summary(s, place)
    assert moved[place - 1] == s[0] and moved[:place - 1] + moved[place:] == s[1:]


@given(sentences, st.integers(0, 9))
def test_leave_out(s, place):
    if not 1 <= place <= len(s) or len(s) == 1:
        with pytest.raises(ValueError): leave_out(s, place)
        return
    left = leave_out(s, place)
    assert left[:place - 1] == s[:place - 1] and left[place - 1:] == s[place:]


@given(sentences, st.integers(0, 99), st.integers(0, 9), st.integers(0, 999))
def test_shuffled(s, seed, draw, sample):
    assert sorted(shuffled(s, seed, draw, sample)) == sorted(s) and shuffled(s, seed, draw, sample) == shuffled(tuple(s), seed, draw, sample)


def test_every_order_is_equally_likely():
    counts = {}
    for draw in range(2400): counts[o] = counts.get(o := tuple(shuffled('abcd', 0, draw, 3)), 0) + 1
    assert len(counts) == 24 and 60 < min(counts.values()) and max(counts.values()) < 145
    assert [shuffled('abcd', 0, 0, i) for i in range(9)] != [shuffled('abcd', 1, 0, i) for i in range(9)]


@pytest.fixture(scope='module', params=['scenes-clip', 'scenes-siglip'])
def tower(request):
    torch.manual_seed(0)
    return create_model(request.param, context_length=88, keep=8).eval(), get_tokenizer(request.param, 88)


@pytest.fixture(scope='module')
def world():
    records = scene_records('val', n=30)
    return Records('mixed', records.images, [list(c[:1 + i % 6]) for i, c in enumerate(records.captions)])


def test_all_are_of_the_same_captions(tower, world, monkeypatch):
    model, tok = tower
    texts, encode = [], order.encode_captions
    monkeypatch.setattr(order, 'encode_captions', lambda m, t, x: (texts.append(x), encode(m, t, x))[1])
    found, left_out = order_matrix(model, TRANSFORM, tok, world, places=3, shuffles=2, seed=5)
    index = [i for i, c in enumerate(world.captions) if len(c) >= 3]
    assert left_out == 30 - len(index) and list(found) == [('summary at', p) for p in (1, 2, 3)] + [('without', p) for p in (1, 2, 3)] + [('shuffle', 0), ('shuffle', 1)]
    want = {('summary at', p): [' '.join(place_summary(world.captions[i], p)) for i in index] for p in (1, 2, 3)}
    want |= {('without', p): [' '.join(leave_out(world.captions[i], p)) for i in index] for p in (1, 2, 3)}
    want |= {('shuffle', d): [' '.join(shuffled(world.captions[i], 5, d, i)) for i in index] for d in (0, 1)}
    assert texts == [want[k] for k in found] and all(len(r[d]) == len(index) for r in found.values() for d in ('t2i', 'i2t'))


def test_agrees_with_the_papers_orders(tower, world):
    model, tok = tower
    found, _ = order_matrix(model, TRANSFORM, tok, world, places=4, shuffles=0)
    known, _ = bias.order_ranks(model, TRANSFORM, tok, world, ('full', 'move', 'remove'))
    for mine, theirs in (('summary at', 1), 'full'), (('without', 1), 'remove'):
        assert all((found[mine][d] == known[theirs][d]).all() for d in ('t2i', 'i2t')) and found[mine]['truncated'] == known[theirs]['truncated']


def test_captions_that_do_not_fit_are_left_out(tower, world):
    "Every order would cut other words from them."
    name = 'scenes-clip' if tower[1].family == 'clip' else 'scenes-siglip'
    small, tok = create_model(name, context_length=36, keep=8).eval(), get_tokenizer(name, 36)
    fits = [i for i, c in enumerate(world.captions) if len(c) >= 2 and len(tok.encode(' '.join(c))) <= tok.room]
    assert 2 <= len(fits) < sum(len(c) >= 2 for c in world.captions)
    found, left_out = order_matrix(small, TRANSFORM, tok, world, places=2, shuffles=2)
    assert left_out == 30 - len(fits) and all(len(r['t2i']) == len(r['i2t']) == len(fits) and r['truncated'] == 0 for r in found.values())
    alone, none = order_matrix(small, TRANSFORM, tok, Records('mixed', world.images[fits], [world.captions[i] for i in fits]), places=2, shuffles=0)
    assert none == 0 and all((found[k][d] == r[d]).all() for k, r in alone.items() for d in ('t2i', 'i2t'))
    with pytest.raises(ValueError, match=r'mixed: [01] of the \d+ captions of 4 sentences or more fit 36 tokens'): order_matrix(small, TRANSFORM, tok, world, places=4)


def test_shuffle_hits_by_hand():
    draws = [dict(t2i=np.array(r), i2t=np.zeros(4)) for r in ([0, 0, 3, 9], [0, 2, 0, 9], [0, 0, 0, 9])]
    found = {('summary at', 1): draws[0]} | {('shuffle', d): r for d, r in enumerate(draws)}
    hits = shuffle_hits(found)['t2i']
    assert np.allclose(hits['mean'], [1, 2/3, 2/3, 0]) and hits['worst'].tolist() == [True, False, False, False] and hits['best'].tolist() == [True, True, True, False]
    assert shuffle_hits(found, k=4)['t2i']['worst'].tolist() == [True, True, True, False]
    assert shuffle_hits({k: {d: torch.as_tensor(r[d]) for d in r} for k, r in found.items()})['t2i']['best'].tolist() == [True, True, True, False]


def test_errors(tower, world):
    model, tok = tower
    ask = lambda **more: order_matrix(model, TRANSFORM, tok, world, **more)
    with pytest.raises(ValueError, match='at least two places'): ask(places=1)
    with pytest.raises(ValueError, match='0 of 30 captions have 40 sentences or more'): ask(places=40)
    with pytest.raises(ValueError, match='3 image features for 30 records'): ask(images=torch.zeros(3, 128))
    with pytest.raises(ValueError, match='no shuffles'): shuffle_hits(ask(places=2, shuffles=0)[0])
    one = Records('one-liners', world.images[:3], [c[:1] for c in world.captions[:3]])
    with pytest.raises(ValueError, match='one-liners: 0 of 3 captions have 2 sentences'): order_matrix(model, TRANSFORM, tok, one, places=2)
