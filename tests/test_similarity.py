"""Cosines are those of the texts they name; shares, growth and slopes by hand."""
import numpy as np
import pandas as pd
import pytest
import torch

from debias_clip import retrieval
from debias_clip.captions import split_sentences
from debias_clip.data import Normalize, Records
from debias_clip.models import create_model
from debias_clip.retrieval import encode_captions, encode_images
from debias_clip.scenes import scene_records
from debias_clip.similarity import PAPER_COSINE, added, alone, by_length, cosines, first_and_whole, growth, slope
from debias_clip.tokens import get_tokenizer

pytestmark = pytest.mark.filterwarnings('error::UserWarning')
TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))


@pytest.fixture(scope='module', params=['scenes-clip', 'scenes-siglip'])
def tower(request):
    torch.manual_seed(0)
    return create_model(request.param, context_length=88, keep=8).eval(), get_tokenizer(request.param, 88)


@pytest.fixture(scope='module')
def world():
    records = scene_records('val', n=24)
    return Records('mixed', records.images, [list(c[:1 + i % 5]) for i, c in enumerate(records.captions)])


@pytest.fixture(scope='module')
def found(tower, world): return cosines(tower[0], TRANSFORM, tower[1], world)


def texts_of(caption, joiner=' '):
    yield 'whole caption', 0, joiner.join(caption)
    for j, s in enumerate(caption, 1):
        yield 'sentence', j, s
        yield 'first sentences', j, joiner.join(caption[:j])
        if len(caption) > 1: yield 'without sentence', j, joiner.join(caption[:j - 1] + caption[j:])


def test_every_cosine_is_of_its_text(tower, world, found):
    model, tok = tower
    images = encode_images(model, world, TRANSFORM)
    want = [(i, *t) for i, c in enumerate(world.captions) for t in texts_of(c)]
    assert [tuple(r) for r in found[['sample', 'what', 'sentence']].itertuples(index=False)] == [w[:3] for w in want]
    score = encode_captions(model, tok, [w[3] for w in want]) @ images.T
    own = np.array([score[k, w[0]] for k, w in enumerate(want)])
    assert np.abs(found.cosine - own).max() < 1e-5 and np.abs(found.others - (score.sum(1).numpy() - own)/23).max() < 1e-5
    assert found.tokens.tolist() == [len(tok.encode(w[3])) for w in want] and not found.cut.any()
    assert found.sentences.tolist() == [len(world.captions[w[0]]) for w in want]


def test_captions_longer_than_the_context_are_marked(tower, world):
    name = 'scenes-clip' if tower[1].family == 'clip' else 'scenes-siglip'
    tok = get_tokenizer(name, 28)
    got = cosines(create_model(name, context_length=28), TRANSFORM, tok, world)
    whole = got[got.what == 'whole caption']
    assert whole.cut.tolist() == [len(tok.encode(' '.join(c))) > tok.room for c in world.captions] and whole.cut.any() and got.tokens.max() == tok.room
    assert sum(r['cut'] for r in by_length(got)) == whole.cut.sum() and [r['cut'] for r in first_and_whole(got)] == [got[(got.what == 'sentence') & (got.sentence == 1)].cut.sum(), whole.cut.sum(), whole.cut.sum()]
    rows = growth(got) + added(got) + alone(got) + [slope(got)]
    assert {r['cut'] for r in rows} == {whole.cut.sum()} and growth(got)[0]['n'] + growth(got)[0]['left_out'] == 24 == added(got)[0]['n'] + added(got)[0]['left_out']


def test_captions_that_are_cut_change_nothing_of_the_others(tower, world):
    "What is told of sentences and of length is what the captions that fit tell by themselves."
    name = 'scenes-clip' if tower[1].family == 'clip' else 'scenes-siglip'
    model, tok = create_model(name, context_length=28).eval(), get_tokenizer(name, 28)
    fit = [i for i, c in enumerate(world.captions) if len(tok.encode(' '.join(c))) <= tok.room]
    got, alike = cosines(model, TRANSFORM, tok, world), cosines(model, TRANSFORM, tok, Records('fit', world.images[fit], [world.captions[i] for i in fit]))
    assert 2 < len(fit) < 20 and any(len(world.captions[i]) > 1 for i in fit)
    for ask in (lambda f: growth(f), lambda f: added(f, 3), lambda f: alone(f, 3), lambda f: [slope(f)]):
        for a, b in zip(ask(got), ask(alike), strict=True):
            assert a['n'] == b['n'] and a['left_out'] - b['left_out'] == a['cut'] == 24 - len(fit) and b['cut'] == 0
            assert all(np.isclose(a[k], b[k], atol=1e-6) for k in ('value', 'low', 'high', 'share', 'words', 'tokens') if a.get(k) is not None)


def test_every_text_is_tokenised_and_encoded_once(tower, world, monkeypatch):
    model, tok = tower
    read, encoded, encode = [], [], retrieval.encode_texts
    class Counting:
        def __getattr__(self, name): return getattr(tok, name)
        def encode(self, text): read.append(text); return tok.encode(text)
    monkeypatch.setattr(retrieval, 'encode_texts', lambda model, rows, **more: encoded.extend(rows.tolist()) or encode(model, rows, **more))
    cosines(model, TRANSFORM, Counting(), world, torch.zeros(24, 128))
    assert sorted(read) == sorted({w[2] for c in world.captions for w in texts_of(c)}) and len({tuple(r) for r in encoded}) == len(encoded) == len({tuple(tok.encode(t)) for t in read})


def test_period_captions_keep_their_full_stops(tower, world):
    model, tok = tower
    period = Records('mixed', world.images, [split_sentences(' '.join(c), 'period') for c in world.captions], splitter='period')
    got = cosines(model, TRANSFORM, tok, period)
    want = [len(tok.encode(t)) for c in period.captions for _, _, t in texts_of(c, '. ')]
    assert got.tokens.tolist() == want


def test_first_and_whole(found, world):
    rows = {r['text']: r for r in first_and_whole(found)}
    whole = found[found.what == 'whole caption'].cosine.to_numpy()
    first = found[(found.what == 'sentence') & (found.sentence == 1)].cosine.to_numpy()
    assert list(rows) == ['first sentence', 'whole caption', 'whole − first'] and all(r['n'] == 24 and r['low'] <= r['value'] <= r['high'] for r in rows.values())
    assert np.allclose(rows['whole − first']['scores'], whole - first) and np.isclose(rows['whole − first']['value'], (whole - first).mean())
    again = {r['text']: r for r in first_and_whole(found.sample(frac=1, random_state=0))}
    assert np.allclose(again['whole − first']['scores'], whole - first)                # whatever the order of the rows
    assert set(PAPER_COSINE) == {('Long-CLIP recipe', 'first sentence'), ('Long-CLIP recipe', 'whole caption')}


def test_growth_is_of_the_same_captions(found):
    rows = growth(found)
    lengths = found[found.what == 'whole caption'].sentences
    k = rows[-1]['sentence']
    assert (lengths >= k).sum() >= 8 and (lengths >= k + 1).sum() < 8 and {r['n'] for r in rows} == {(lengths >= k).sum()} and [r['sentence'] for r in rows] == list(range(1, k + 1))
    assert {(r['left_out'], r['cut']) for r in rows} == {((lengths < k).sum(), 0)}
    few = found[found['sample'].isin([0, 1, 4])]                                       # one, two and five sentences: a third has five, but one caption is too few
    assert [(r['sentence'], r['n']) for r in growth(few)] == [(1, 2), (2, 2)] and [r['n'] for r in growth(found[found['sample'] == 1])] == [1, 1]


def test_by_length(found):
    rows = by_length(found, 5)
    assert sum(r['n'] for r in rows) == 24 and all(a['longest'] <= b['shortest'] for a, b in zip(rows, rows[1:]))
    assert len(by_length(found[found['sample'] < 3], 5)) == 3
    whole = found[found.what == 'whole caption'].sort_values(['tokens', 'sample'])
    first = whole.iloc[:len(rows[0]['scores'])]
    assert np.isclose(rows[0]['margin'], np.mean([c - o for c, o in zip(first.cosine, first.others)])) and np.isclose(rows[0]['margin'], rows[0]['value'] - rows[0]['others']) and rows[0]['margin_low'] < rows[0]['margin'] < rows[0]['margin_high']


def test_groups_of_length_are_told_apart(found):
    "Of distinct lengths, each caption in one, however many are of one length or cut to it."
    for tokens in ([7]*24, [3]*20 + [9]*4, [3] + [26]*23, list(range(24)), [5]*7 + [6]*7 + [8]*10):
        rows = by_length(found[found.what == 'whole caption'].assign(tokens=tokens))
        groups = [set(range(r['shortest'], r['longest'] + 1)) for r in rows]
        assert 1 <= len(rows) <= min(4, len(set(tokens))) and sum(r['n'] for r in rows) == 24
        assert all(sum(t in g for g in groups) == 1 for t in tokens) and [r['n'] for r in rows] == [sum(t in g for t in tokens) for g in groups]
    assert [r['n'] for r in by_length(found[found.what == 'whole caption'].assign(tokens=range(24)))] == [6]*4


def made(*captions):
    "Rows of captions given as lists of (words, what a sentence adds)."
    rows = []
    for i, c in enumerate(captions):
        k, total, words = len(c), sum(a for _, a in c), sum(w for w, _ in c)
        rows.append((i, k, 'whole caption', 0, words, total))
        for j, (w, a) in enumerate(c, 1):
            rows.append((i, k, 'sentence', j, w, a))
            if k > 1: rows.append((i, k, 'without sentence', j, words - w, total - a))
    return pd.DataFrame(rows, columns=['sample', 'sentences', 'what', 'sentence', 'tokens', 'cosine']).assign(others=0., cut=False)


def test_added_by_hand():
    rows = added(made([(10, .3), (30, .1)], [(20, .1), (20, .1)], [(5, .2)]), least=1)
    assert [r['place'] for r in rows] == [1, 2] and not any(r['last'] for r in rows) and all(r['left_out'] == 1 and r['n'] == 2 for r in rows)
    assert np.allclose([r['value'] for r in rows], [.2, .1]) and np.allclose([r['share'] for r in rows], [100*.4/.6, 100*.2/.6]) and np.allclose([r['words'] for r in rows], [37.5, 62.5])
    assert all(r['share_low'] <= r['share'] <= r['share_high'] for r in rows)


def reader(captions, room):
    "Cosines of an even reader of captions (lists of words a sentence) that sees the first `room` words: 0.01 for each."
    rows = []
    for i, c in enumerate(captions):
        texts = [('whole caption', 0, c), *((what, j, t) for j in range(1, len(c) + 1) for what, t in (('sentence', [c[j - 1]]), ('first sentences', c[:j]), ('without sentence', c[:j - 1] + c[j:])))]
        rows += [(i, len(c), what, j, min(sum(t), room), sum(t) > room, .01*min(sum(t), room)) for what, j, t in texts]
    return pd.DataFrame(rows, columns=['sample', 'sentences', 'what', 'sentence', 'tokens', 'cut', 'cosine']).assign(others=0.)


def test_what_is_cut_is_not_taken_for_short_sight():
    "An even reader of captions of which half are cut is even."
    found = reader([[5]*4]*10 + [[4]*2]*10 + [[5]*12]*20, room=30)
    assert [(r['place'], r['n'], r['left_out'], r['cut']) for r in added(found)] == [(1, 20, 20, 20), (2, 20, 20, 20), (3, 10, 20, 20), (4, 10, 20, 20)]
    assert np.allclose([r['value'] for r in added(found)], [.045, .045, .05, .05]) and np.allclose([r['value'] for r in growth(found)], [.05, .1, .15, .2])
    assert all(np.isclose(r['share'], r['words']) for r in added(found))
    assert np.isclose(slope(found)['value'], .1) and (slope(found)['n'], slope(found)['left_out']) == (20, 20)


def test_where_no_caption_fits_nothing_is_told():
    found = reader([[5]*12]*20, room=30)
    assert growth(found) == [] and slope(found)['value'] is None and 'no caption fits the context whole (20 do not fit)' == slope(found)['why'] and slope(found)['n'] == 0
    for ask in (added, alone):
        with pytest.raises(ValueError, match=r'No caption of two sentences fits the context whole \(20 of 20'): ask(found)
    assert [(r['n'], r['cut'], r['shortest'], r['longest']) for r in by_length(found)] == [(20, 20, 30, 30)]


def test_alone_is_of_the_captions_and_places_of_added(found):
    rows, beside = alone(found, 5), added(found, 5)
    same = ('place', 'last', 'n', 'left_out', 'cut')
    assert [[r[k] for k in same] for r in rows] == [[r[k] for k in same] for r in beside] and rows[-1]['last']
    each = found[(found.what == 'sentence') & (found.sentences > 1)]
    for r in rows:
        here = each[each.sentence >= r['place']] if r['last'] else each[each.sentence == r['place']]
        own, others = ([np.mean([t for s, t in zip(here['sample'], here[k]) if s == i]) for i in sorted(set(here['sample']))] for k in ('cosine', 'others'))
        assert np.isclose(r['value'], np.mean(own)) and np.isclose(r['others'], np.mean(others)) and np.isclose(r['margin'], r['value'] - r['others']) and r['low'] <= r['value'] <= r['high']


def test_added_is_that_of_a_loop():
    g = np.random.default_rng(0)
    captions = [[(int(g.integers(1, 20)), float(g.normal(.1, .05))) for _ in range(1 + int(g.integers(7)))] for _ in range(60)]
    rows, places = added(made(*captions), least=15), {}
    several = [c for c in captions if len(c) > 1]
    last = max(p for p in range(1, 8) if sum(len(c) >= p for c in several) >= 15)
    for c in several:
        mine = {}
        for p, (w, a) in enumerate(c, 1): mine.setdefault(min(p, last), []).append((w, a))
        for p, x in mine.items(): places.setdefault(p, []).append(x)
    adds, words = (sum(x[k] for c in several for x in c) for k in (1, 0))
    assert [r['place'] for r in rows] == sorted(places) and rows[-1]['last'] and all(r['left_out'] == 60 - len(several) for r in rows)
    for r in rows:
        here = places[r['place']]
        assert r['n'] == len(here) and np.isclose(r['value'], np.mean([np.mean([a for _, a in x]) for x in here]))
        assert np.isclose(r['share'], 100*sum(a for x in here for _, a in x)/adds) and np.isclose(r['words'], 100*sum(w for x in here for w, _ in x)/words)


def test_late_places_are_joined():
    long = [(10, .1)]*6
    rows = added(made(*[long]*3, *[[(10, .1)]*2]*20), least=10)
    assert [r['place'] for r in rows] == [1, 2] and [r['last'] for r in rows] == [False, True]
    assert np.isclose(sum(r['share'] for r in rows), 100) and np.isclose(sum(r['words'] for r in rows), 100) and np.isclose(rows[1]['share'], 100*(15 + 20)/58)


@pytest.mark.parametrize('adds', [0., -.1])
def test_a_share_of_nothing_is_none(adds):
    rows = added(made(*[[(10, adds)]*3]*12))
    assert all(r['share'] is r['share_low'] is r['share_high'] is None for r in rows) and np.allclose([r['value'] for r in rows], adds)
    noise = np.random.default_rng(0).normal(0, 1, (40, 2))
    assert added(made(*[[(10, a), (10, b)] for a, b in noise]))[0]['share'] is None       # an interval that holds zero


def test_slope():
    line = made(*[[(n, .001*n)] for n in range(10, 60)])
    assert np.allclose([slope(line)[k] for k in ('value', 'low', 'high')], .01)
    assert slope(made(*[[(10, .1)]]*5)) == dict(value=None, low=None, high=None, n=5, left_out=0, cut=0, why='all captions that fit the context are of one length')
    some = [(int(n), float(c)) for n, c in np.random.default_rng(2).normal((40, .3), (12, .1), (80, 2)) if n >= 1]
    assert np.isclose(slope(made(*[[x] for x in some]))['value'], 10*np.polyfit(*zip(*some), 1)[0])
    flat = slope(made(*[[(n, float(x))] for n, x in zip(range(100), np.random.default_rng(1).normal(size=100))]))
    assert flat['low'] < 0 < flat['high']


def test_errors(tower, world):
    model, tok = tower
    with pytest.raises(ValueError, match='3 image features for 24 records'): cosines(model, TRANSFORM, tok, world, torch.zeros(3, 128))
    with pytest.raises(ValueError, match='No caption has two sentences'): added(made([(10, .1)], [(5, .1)]))
    lone = cosines(model, TRANSFORM, tok, Records('one', world.images[:1], world.captions[:1]))
    assert lone.others.isna().all()
