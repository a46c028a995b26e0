"""Answers as rows, differences paired by seed or by image, and curves that show what they are given."""
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

import debias_clip.analyses as analyses
from debias_clip.analyses import as_rows, attention_rows, counted, curves, matrix_rows, measure_arms, pair_rows, paired, push_rows, rank_rows, shortsight_rows, similarity_rows, with_counts
from debias_clip.attention import by_sentence, read_captions
from debias_clip.bias import order_ranks, push_ranks
from debias_clip.data import Normalize, Records
from debias_clip.models import create_model
from debias_clip.order import order_matrix
from debias_clip.report import differences, summarise, table
from debias_clip.results import write_metrics
from debias_clip.scenes import scene_records
from debias_clip.similarity import added, alone, cosines, growth
from debias_clip.tokens import get_tokenizer

TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))


@pytest.fixture(scope='module')
def asked():
    torch.manual_seed(0)
    return create_model('scenes-clip', context_length=88, keep=8).eval(), TRANSFORM, get_tokenizer('scenes-clip', 88), scene_records('val', n=40)


def recall(ranks, direction): return 100*float((np.asarray(ranks[direction]) < 1).mean())


def test_push_rows(asked):
    rows, (found, left_out) = push_rows(*asked, copies=(0, 2)), push_ranks(*asked, copies=(0, 2))
    assert {(r['by'], r['tokens'], r['direction']): r['value'] for r in rows} == {(*k, d): recall(r, d) for k, r in found.items() for d in ('t2i', 'i2t')}
    assert all(r['left_out'] == left_out and len(r['scores']) == r['n'] and np.isclose(r['scores'].mean(), r['value']) and r['low'] <= r['value'] <= r['high'] for r in rows)


def test_pair_rows(asked):
    rows, (found, _) = pair_rows(*asked), order_ranks(*asked, ('first2', 'swap2', 'first'))
    assert [(r['order'], r['value']) for r in rows if r['direction'] == 't2i'] == [(n, recall(found[h], 't2i')) for n, h in (('First 2', 'first2'), ('Swap 2', 'swap2'), ('First only', 'first'))]


def test_matrix_rows(asked):
    rows, (found, left_out) = matrix_rows(*asked, places=3, shuffles=3), order_matrix(*asked, places=3, shuffles=3)
    assert {(r['change'], r['place'], r['direction']): r['value'] for r in rows if r['place']} == {(*k, d): recall(r, d) for k, r in found.items() if k[0] != 'shuffle' for d in ('t2i', 'i2t')}
    of = {(r['order'], r['direction']): r for r in rows if r['change'] == 'shuffled'}
    for d in ('t2i', 'i2t'):
        each = [recall(found['shuffle', s], d) for s in range(3)]
        assert np.isclose(of['mean', d]['value'], np.mean(each)) and of['worst', d]['value'] <= min(each) and of['best', d]['value'] >= max(each) and of['mean', d]['n'] == 40 - left_out
    assert not [r for r in matrix_rows(*asked, places=3, shuffles=0) if r['change'] == 'shuffled']


def test_what_was_not_read_stands_beside_every_mean(asked):
    "Of long captions, by a model that reads 36 tokens: in the summary, and in a table of several columns the most of any."
    model, tok = create_model('scenes-clip', context_length=36, keep=8).eval(), get_tokenizer('scenes-clip', 36)
    rows = [r | dict(arm='x', seed=s, test='t') for r in pair_rows(model, TRANSFORM, tok, asked[3]) + matrix_rows(model, TRANSFORM, tok, asked[3], places=2, shuffles=2) for s in (0, 1)]
    by = ['test', 'arm', 'change', 'order', 'direction']
    summary = counted(rows, by)
    pd.testing.assert_frame_equal(summary.drop(columns=['left_out', 'truncated']), summarise(rows, by))
    for r in summary.to_dict('records'): assert {(x['n'], x['left_out'], x['truncated']) for x in rows if all(x[k] == r[k] for k in by)} == {(r['n'], r['left_out'], r['truncated'])}
    t2i = summary[summary.direction == 't2i'].set_index('order')
    assert t2i.truncated['First 2'] == sum(len(tok.encode(' '.join(c[:2]))) > tok.room for c in asked[3].captions) > 0 == t2i.truncated['mean'] and t2i.n['mean'] + t2i.left_out['mean'] == 40 and t2i.left_out['mean'] > t2i.left_out['First 2'] == 0
    shown = with_counts(table(t2i.reset_index(), ['test', 'arm', 'change'], columns='order'), t2i.reset_index())
    assert shown.index.names == ['test', 'arm', 'change'] and shown.loc['t', 'x', 'two sentences'][['n', 'left out', 'cut']].tolist() == [40, 0, t2i.truncated['First 2']]
    assert shown.loc['t', 'x', 'shuffled'][['n', 'left out', 'cut']].tolist() == [t2i.n['mean'], t2i.left_out['mean'], 0]


def test_all_rows_can_be_summarised_and_kept(asked, tmp_path, monkeypatch):
    "Also over seeds, and whatever is None or NaN on the way."
    found, told = analyses.falls(*asked)
    monkeypatch.setattr(analyses, 'falls', lambda *a: (found.assign(fall=.1 + .05*(found.place == 1)), told))   # random weights notice nothing, and would give no rows
    places = shortsight_rows(*asked)
    assert {r['what'] for r in places} == {'index', 'place', 'sentence'}
    for name, rows, by in [('attention', attention_rows(*asked), ['what', 'layer', 'x']), ('similarity', similarity_rows(*asked), ['what', 'x']), ('shortsight', places[:1], ['what']), ('places', places[1:], ['what', 'x'])]:
        for seeds in ([0], [0, 1]):
            summary = summarise([r | dict(seed=s) for r in rows for s in seeds], by)
            assert len(summary) == len(pd.DataFrame(rows)[by].drop_duplicates()) and summary.value.notna().all()
            write_metrics(str(tmp_path), name, {'table': as_rows(summary)})


def test_attention_rows(asked):
    rows = attention_rows(*asked, text='A red ring. A blue cross.')
    strip = rows.pop()
    assert strip['what'] == 'strip' and abs(sum(w for _, w, _ in strip['strip']) - 1) < 1e-5
    assert {r['what'] for r in rows} == {'position', 'sentence', 'layers', 'centre', 'start', 'words', 'end', 'pads'} and {r['layer'] for r in rows if r['what'] in ('position', 'sentence')} == {3}
    read = read_captions(asked[0], asked[2], asked[3].captions)
    for layer in (1, 2, 3):
        want = by_sentence(read, layer - 1)
        for what, at in (('layers', -1), ('sentence', layer - 1)): assert [(r['x'], r['value'], r['n']) for r in attention_rows(*asked, layer=at) if r['what'] == what and r['layer'] == layer] == [*zip(want.sentence, want.value, want.n)]
    for layer in (1, 2, 3): assert np.isclose(sum(r['value'] for r in rows if r['x'] == layer and r['what'] in ('start', 'words', 'end', 'pads')), 100, atol=1e-3)


def test_similarity_of_one_liners_omits_what_sentences_add(asked):
    model, transform, tok, world = asked
    rows = similarity_rows(model, transform, tok, Records('one-liners', world.images, [list(c[:1]) for c in world.captions]))
    assert {r['what'] for r in rows} == {'cosine', 'growth', 'length', 'margin', 'slope', 'omitted'}
    assert [(r['x'], r['why'], r['value']) for r in rows if r['what'] == 'omitted'] == [('added', 'No caption has two sentences, so none can be left out.', 40)]


def test_similarity_rows(asked):
    rows, found = similarity_rows(*asked), cosines(*asked)
    for what, ask in (('alone', alone), ('added', added), ('growth', growth)):
        assert [(r['value'], r['low'], r['high'], r['n'], r['left_out'], r['cut']) for r in rows if r['what'] == what] == [(r['value'], r['low'], r['high'], r['n'], r['left_out'], r['cut']) for r in ask(found)]
    assert [r['x'] for r in rows if r['what'] == 'alone'] == [r['x'] for r in rows if r['what'] == 'added']


@pytest.mark.parametrize('length', [48, 28])
def test_similarity_where_captions_are_cut(asked, length):
    "Many or all of them: each group of lengths has a name of its own, and what no caption can tell is said."
    model, transform, _, world = asked
    rows = similarity_rows(create_model('scenes-clip', context_length=length, keep=8).eval(), transform, get_tokenizer('scenes-clip', length), world)
    summarise([r | dict(seed=0) for r in rows], ['what', 'x'])
    room, cut = length - 2, next(r['cut'] for r in rows if r['x'] == 'whole caption')
    assert cut > 10 and [r['x'] for r in rows if r['what'] == 'length'][-1].endswith(f'{room}+ tokens') and all(r['n'] + r['left_out'] <= 40 for r in rows if r['what'] in ('growth', 'slope'))
    assert all(r['left_out'] >= cut == r['cut'] for r in rows if r['what'] in ('alone', 'added', 'share', 'growth', 'slope'))
    if length == 28: assert cut == 40 and {r['x'] for r in rows if r['what'] == 'omitted'} == {'growth', 'slope', 'added'} and all('40' in r['why'] for r in rows if r['what'] == 'omitted')


def rows_of(*values): return [dict(arm=a, seed=s, test='t', value=float(np.mean(v)), scores=np.array(v, float)) for a, s, v in values]


def test_paired_by_image():
    got = paired(rows_of(('a', 0, [0, 100]*20), ('b', 0, [100, 100]*20)), 'a', ['test'])
    assert got.arm.tolist() == ['b'] and got.value.tolist() == [50] and 30 < got.low[0] < 50 < got.high[0] < 70 and got.interval.tolist() == ['over images']


def test_paired_by_seed_ignores_seeds_of_one_side():
    got = paired(rows_of(*[('a', s, [s, s]) for s in range(4)], *[('b', s, [s + 1, s + 1]) for s in range(3)], ('b', 9, [99, 99])), 'a', ['test'])
    assert got.value.tolist() == [1] and got.seeds.tolist() == [3] and np.isclose(got.low[0], 1) and np.isclose(got.high[0], 1)


def test_paired_agrees_with_the_report(asked):
    found, left_out = order_ranks(*asked, ('full', 'move'))
    rows = [r | dict(arm='x', seed=0, test='t') for r in rank_rows(found, left_out, lambda v: dict(text=v))]
    mine = paired(rows, 'full', ['test', 'direction'], column='text')
    theirs = differences([r | dict(hits=r['scores'] > 50, image_of=None) for r in rows], 'full', ['test', 'direction'], column='text')
    pd.testing.assert_frame_equal(mine, theirs)


def test_paired_errors():
    with pytest.raises(ValueError, match="no arm 'c' to compare with; there is a, b"): paired(rows_of(('a', 0, [1]), ('b', 0, [1])), 'c', ['test'])
    with pytest.raises(ValueError, match='1 and 2 images cannot be paired'): paired(rows_of(('a', 0, [1, 2]), ('b', 0, [1])), 'a', ['test'])
    with pytest.raises(ValueError, match='holds the same arm and seed twice'): paired(rows_of(('a', 0, [1]), ('a', 0, [2]), ('b', 0, [1])), 'a', ['test'])


def test_curves(tmp_path):
    frame = pd.DataFrame([dict(arm=a, test=t, by=b, x=x, value=float(x), low=x - 1., high=x + 1.) for a in ('one', 'two') for t in ('own', 'other') for b in ('words', 'pads') for x in (0, 5, 20)])
    fig = curves(frame, out=str(tmp_path), name='c', style='by', even=1)
    assert (tmp_path/'c.png').stat().st_size > 1000 and len(fig.axes) == 2
    lines = fig.axes[0].lines
    assert [line.get_xdata().tolist() for line in lines[:4]] == [[0, 5, 20]]*4 and [line.get_label() for line in lines[:4]] == ['one, words', 'one, pads', 'two, words', 'two, pads']
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ['one', 'two', 'words', 'pads']
    fig.canvas.draw()
    assert all(0 <= b.x0 and b.x1 <= fig.bbox.x1 for b in [t.get_window_extent() for t in fig.legends[0].get_texts()])
    texts = curves(frame.assign(x=frame.x.map({0: 'a', 5: 'b', 20: 'c'})).query("by == 'pads'"))
    assert [t.get_text() for t in texts.axes[0].get_xticklabels()] == ['a', 'b', 'c'] and texts.axes[0].lines[0].get_xdata().tolist() == [0, 1, 2]
    mixed = curves(frame.iloc[::-1].query("by == 'pads'"))
    assert mixed.axes[0].lines[0].get_xdata().tolist() == [0, 5, 20]                   # a line goes from left to right
    wide = curves(frame.query("by == 'pads'").assign(panel=frame.test + frame.arm), panels='panel')
    assert [ax.get_title() for ax in wide.axes] == ['ownone', 'otherone', 'owntwo', 'othertwo'] and len({ax.get_subplotspec().rowspan.start for ax in wide.axes}) == 2
    long = curves(frame.query("test == 'own'").assign(arm=frame.arm.map({'one': 'a model with a name that is long', 'two': 'another with a long one too'})), style='by')
    long.canvas.draw()
    assert all(0 <= b.x0 and b.x1 <= long.bbox.x1 for b in [t.get_window_extent() for t in long.legends[0].get_texts()])
    alone = curves(frame.query("by == 'pads' and test == 'own'").assign(low=None, high=None), panels=None)
    assert len(alone.axes) == 1 and not alone.axes[0].collections
    plt.close('all')


def test_measure_arms(monkeypatch, tmp_path):
    "Every arm, seed, backbone and test set, once, in that order; nothing is trained for the start."
    class Found:
        def __init__(self, config): self.config, self.key = config, f'{config.recipe} {config.seed} {config.backbone}'
        def load(self): return Model(self.key), None, None
    class Model:
        def __init__(self, name): self.name = name
        def to(self, device): return self
    monkeypatch.setattr(analyses, 'train', lambda config, models: Found(config))
    monkeypatch.setattr(analyses, 'starting_model', lambda config, models: (Model('start'), None, None))
    monkeypatch.setattr(analyses, 'images_transform', lambda records, model, transform: None)
    monkeypatch.setattr(analyses, 'test_records', lambda source: source)
    fine, arms = dict(data='scenes', backbone='scenes-clip', keep=8, batch_size=64), {'pre-trained': None, 'new': dict(recipe='debias')}
    ask = lambda model, transform, tok, records: [dict(model=model.name, records=records['data'])]
    rows, keys = measure_arms(ask, arms, [0, 1], fine, {}, dict(a=dict(data='x'), b=dict(data='y')), str(tmp_path))
    assert rows == [dict(arm=arm, seed=s, test=t, model=m, records=r) for s in (0, 1) for arm, m in (('pre-trained', 'start'), ('new', f'debias {s} scenes-clip')) for t, r in (('a', 'x'), ('b', 'y'))]
    assert keys == {f'new, seed {s}': f'debias {s} scenes-clip' for s in (0, 1)}
    rows, keys = measure_arms(ask, arms, [0], fine, {}, dict(a=dict(data='x')), str(tmp_path), {'scenes-clip': {}, 'scenes-siglip': dict(finetuning=dict(batch_size=48))})
    assert [(r['backbone'], r['model']) for r in rows] == [('scenes-clip', 'start'), ('scenes-clip', 'debias 0 scenes-clip'), ('scenes-siglip', 'start'), ('scenes-siglip', 'debias 0 scenes-siglip')]
    assert list(keys) == ['scenes-clip, new, seed 0', 'scenes-siglip, new, seed 0']
