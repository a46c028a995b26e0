"""The paper's measurements on a small model of random weights: what is compared with what, not how well it does."""
import numpy as np
import pytest
import torch

import debias_clip.bias as bias
from debias_clip.bias import drops, order_ranks, push_ranks, with_sentences
from debias_clip.captions import permute, split_sentences
from debias_clip.data import Normalize, Records
from debias_clip.models import create_model
from debias_clip.retrieval import encode_captions, encode_images, ranks
from debias_clip.scenes import scene_records
from debias_clip.tokens import get_tokenizer

TRANSFORM, FILLER = Normalize((.5, .5, .5), (.25, .25, .25)), 'This is a photo.'


@pytest.fixture(scope='module', params=['scenes-clip', 'scenes-siglip'])
def tower(request):
    torch.manual_seed(0)
    return create_model(request.param, context_length=88, keep=8).eval(), get_tokenizer(request.param, 88)


@pytest.fixture(scope='module')
def world():
    "Forty scenes with captions of 1 to 6 sentences."
    records = scene_records('val', n=40)
    captions = [c[:1 + i % 6] for i, c in enumerate(records.captions)]
    return Records('mixed', records.images, captions)


@pytest.fixture
def seen(monkeypatch):
    "What is encoded: lists of images, texts and token rows, in the order of the calls."
    seen = dict(images=[], texts=[], rows=[])
    images, captions, rows = bias.encode_images, bias.encode_captions, bias.encode_rows
    monkeypatch.setattr(bias, 'encode_images', lambda model, records, *a: (seen['images'].append(records.images), images(model, records, *a))[1])
    monkeypatch.setattr(bias, 'encode_captions', lambda model, tok, texts: (seen['texts'].append(texts), captions(model, tok, texts))[1])
    monkeypatch.setattr(bias, 'encode_rows', lambda model, tok, r: (seen['rows'].append(r), rows(model, tok, r))[1])
    return seen


def equal(a, b): return all((a[d] == b[d]).all() for d in ('t2i', 'i2t'))


def test_with_sentences(world):
    lengths = [len(c) for c in world.captions]
    assert min(lengths) == 1 and max(lengths) >= 4
    for least in range(1, 5):
        kept, left_out = with_sentences(world, least)
        index = [i for i, n in enumerate(lengths) if n >= least]
        assert kept.captions == [world.captions[i] for i in index] and (kept.images == world.images[index]).all()
        assert left_out == 40 - len(index) == 40 - len(kept)


@pytest.mark.parametrize('hows, least', [(('full', 'move', 'remove', 'first'), 4), (('full', 'remove'), 2), (('full', 'first'), 1), (('swap2', 'first2'), 2)])
def test_every_order_is_of_the_same_captions(tower, world, seen, hows, least):
    found, left_out = order_ranks(*(tower[0], TRANSFORM, tower[1]), world, hows)
    index = [i for i, c in enumerate(world.captions) if len(c) >= least]
    assert left_out == 40 - len(index) and list(found) == list(hows)
    assert len(seen['images']) == 1 and (seen['images'][0] == world.images[index]).all()
    assert seen['texts'] == [[' '.join(permute(world.captions[i], how)) for i in index] for how in hows]
    assert all(len(r[d]) == len(index) for r in found.values() for d in ('t2i', 'i2t'))


def test_full_is_the_whole_caption(tower, world):
    model, tok = tower
    found, _ = order_ranks(model, TRANSFORM, tok, world)
    kept, _ = with_sentences(world, 4)
    whole = ranks(encode_images(model, kept, TRANSFORM), encode_captions(model, tok, [' '.join(c) for c in kept.captions]), range(len(kept)))
    assert equal(found['full'], whole) and not equal(found['full'], found['first'])
    assert equal(order_ranks(model, TRANSFORM, tok, kept, ('full',))[0]['full'], whole)


def test_drops_by_hand():
    zero = torch.zeros(8, dtype=torch.int64)
    worse = zero + torch.tensor([0, 0, 0, 0, 1, 1, 5, 5])
    found = {'full': {'t2i': zero, 'i2t': worse}, 'move': {'t2i': worse, 'i2t': zero}, 'same': {'t2i': zero, 'i2t': worse}}
    table = drops(found, left_out=3).set_index(['direction', 'variant'])
    assert list(table.columns) == ['recall', 'low', 'high', 'drop', 'drop_low', 'drop_high', 'n', 'left_out', 'truncated']
    assert table.recall.to_dict() == {('t2i', 'full'): 100, ('t2i', 'move'): 50, ('t2i', 'same'): 100, ('i2t', 'full'): 50, ('i2t', 'move'): 100, ('i2t', 'same'): 50}
    assert table['drop'].to_dict() == {('t2i', 'full'): 0, ('t2i', 'move'): 50, ('t2i', 'same'): 0, ('i2t', 'full'): 0, ('i2t', 'move'): -50, ('i2t', 'same'): 0}
    for variant in ('full', 'same'): assert (table.xs(variant, level='variant')[['drop_low', 'drop_high']] == 0).all(axis=None)     # the same queries: nothing to doubt
    assert (table.low <= table.recall).all() and (table.recall <= table.high).all() and (table.n == 8).all() and (table.left_out == 3).all()
    move = table.loc['t2i', 'move']
    assert 0 < move.drop_low < 50 < move.drop_high < 100
    assert drops(found, k=2).set_index(['direction', 'variant']).recall['t2i', 'move'] == 75


def test_cut_captions_are_counted(tower, world):
    model, tok = tower
    torch.manual_seed(0)
    small = create_model('scenes-clip' if tok.family == 'clip' else 'scenes-siglip', context_length=30, keep=8).eval()
    short = get_tokenizer('scenes-clip' if tok.family == 'clip' else 'scenes-siglip', 30)
    short.truncated = 7                                                   # of an earlier text
    found, left_out = order_ranks(small, TRANSFORM, short, world)
    kept, _ = with_sentences(world, 4)
    want = {how: sum(len(short.encode(' '.join(permute(c, how)))) > short.room for c in kept.captions) for how in found}
    assert {how: r['truncated'] for how, r in found.items()} == want and want['full'] > want['first']
    table = drops(found, left_out=left_out)
    assert table.truncated.tolist() == [*want.values()]*2
    assert drops({k: {d: v[d] for d in ('t2i', 'i2t')} for k, v in found.items()}).truncated.isna().all()      # not known is not 0
    pushed, _ = push_ranks(model, TRANSFORM, tok, world)
    assert all(r['truncated'] == 0 for r in pushed.values())


def test_images_may_be_encoded_before(tower, world, seen):
    model, tok = tower
    images = encode_images(model, world, TRANSFORM)
    index = [i for i, c in enumerate(world.captions) if len(c) >= 4]
    found, left_out = order_ranks(model, TRANSFORM, tok, world, images=images)
    texts = encode_captions(model, tok, [' '.join(world.captions[i]) for i in index])
    assert equal(found['full'], ranks(images[index], texts, range(len(index)))) and left_out == 40 - len(index)
    push_ranks(model, TRANSFORM, tok, world, images=images)
    assert not seen['images']
    for f in (order_ranks, push_ranks):
        with pytest.raises(ValueError, match='39 image features for 40 records'): f(model, TRANSFORM, tok, world, images=images[1:])


def test_period_captions_keep_their_full_stops(tower, world, seen):
    model, tok = tower
    period = Records('mixed', world.images, [split_sentences(' '.join(c), 'period') for c in world.captions], splitter='period')
    order_ranks(model, TRANSFORM, tok, period, ('full', 'move'))
    kept = [c for c in world.captions if len(c) >= 4]
    assert seen['texts'][0] == [' '.join(c) for c in kept] and all(t.count('.') == len(c) for t, c in zip(seen['texts'][1], kept))
    seen['texts'].clear()
    push_ranks(model, TRANSFORM, tok, period, (0, 1))
    assert seen['texts'][0][0] == '. '.join(next(c for c in period.captions if len(c) > 1)[:2]) and seen['texts'][1][0] == FILLER + ' ' + seen['texts'][0][0]


def test_the_base_loses_nothing(tower, world):
    found, left_out = order_ranks(tower[0], TRANSFORM, tower[1], world)
    table = drops(found, left_out=left_out)
    assert (table[table.variant == 'full'][['drop', 'drop_low', 'drop_high']] == 0).all(axis=None) and (table.n + table.left_out == 40).all()


def test_words_and_pads_push_the_same_captions_equally_far(tower, world, seen):
    model, tok = tower
    step = len(tok.encode(FILLER))
    tok.reset()
    found, left_out = push_ranks(model, TRANSFORM, tok, world, copies=(0, 1, 3))
    assert tok.truncated == 0
    index = [i for i, c in enumerate(world.captions) if len(c) >= 2]
    texts = [' '.join(world.captions[i][:2]) for i in index]
    assert left_out == 40 - len(index) and list(found) == [(what, n*step) for n in (0, 1, 3) for what in ('words', 'pads')]
    assert seen['texts'] == [[' '.join([FILLER]*n + [t]) for t in texts] for n in (0, 1, 3)] and (seen['images'][0] == world.images[index]).all()
    start = 0 if tok.sot is None else 1
    for n, rows in zip((0, 1, 3), seen['rows']):
        words = tok([' '.join([FILLER]*n + [t]) for t in texts])
        for row, pushed, text in zip(rows, words, texts):
            at = start + n*step
            ids = tok.encode(text)
            assert row[start:at].eq(tok.pad).all() and row[at:at + len(ids)].tolist() == pushed[at:at + len(ids)].tolist() == ids
            assert row[at + len(ids)] == tok.eot and (tok.sot is None or row[0] == tok.sot)
    assert equal(found['words', 0], found['pads', 0])
    assert not equal(found['words', 3*step], found['words', 0])


def test_captions_that_do_not_fit_are_counted(tower, world, seen):
    model, tok = tower
    step = len(tok.encode(FILLER))
    lengths = {i: len(tok.encode(' '.join(c[:2]))) for i, c in enumerate(world.captions) if len(c) >= 2}
    copies = (tok.room - int(np.median(list(lengths.values()))))//step
    index = [i for i, n in lengths.items() if n + copies*step <= tok.room]
    assert 2 <= len(index) < len(lengths)
    tok.reset()
    found, left_out = push_ranks(model, TRANSFORM, tok, world, copies=(0, copies))
    assert left_out == 40 - len(index) and all(len(r['t2i']) == len(index) for r in found.values()) and tok.truncated == 0
    assert (seen['images'][0] == world.images[index]).all()


def test_errors(tower, world):
    model, tok = tower
    one = Records('one-liners', world.images[:3], [c[:1] for c in world.captions[:3]])
    with pytest.raises(ValueError, match='one-liners: 0 of 3 captions have 4 sentences or more'): order_ranks(model, TRANSFORM, tok, one)
    with pytest.raises(ValueError, match='one-liners: 0 of 3 captions have 2 sentences or more'): push_ranks(model, TRANSFORM, tok, one)
    with pytest.raises(ValueError, match='1 of 6 captions have 4 sentences'): order_ranks(model, TRANSFORM, tok, Records('six', world.images[:6], [c[:1] for c in world.captions[:5]] + [['A.', 'B.', 'C.', 'D.']]))
    with pytest.raises(ValueError, match="unknown permutation 'moved', did you mean 'move'"): order_ranks(model, TRANSFORM, tok, world, ('full', 'moved'))
    with pytest.raises(ValueError, match=f'0 of .. captions fit 88 tokens behind 40 × {len(tok.encode(FILLER))} tokens'): push_ranks(model, TRANSFORM, tok, world, copies=(0, 40))
