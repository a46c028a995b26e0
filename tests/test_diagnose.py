"""The report: what it says of models and data sets of every kind, that its page holds all it needs, and that a browser draws it."""
import base64, io, json, os, re, shutil, subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import debias_clip.diagnose as diagnose_module
import debias_clip.runs as runs
from debias_clip.data import ImageError, Normalize, Records
from debias_clip.diagnose import diagnose, page, trained_arms, write_report
from debias_clip.models import create_model, create_model_and_transforms, save_checkpoint
from debias_clip.report import planned_models
from debias_clip.runs import app
from debias_clip.scenes import scene_records
from debias_clip.shortsight import shortsight, shortsight_difference
from debias_clip.tokens import get_tokenizer
from debias_clip.train import train

TRANSFORM = Normalize((.5, .5, .5), (.25, .25, .25))
PARTS = ('index', 'place', 'sentence', 'orders', 'push', 'matrix', 'attention', 'similarity', 'worst', 'falls')


def ask(records, backbone='scenes-clip', length=88, **more):
    torch.manual_seed(0)
    return diagnose(create_model(backbone, context_length=length, keep=8), TRANSFORM, get_tokenizer(backbone, length), records, **dict(shuffles=1, worst=3) | more)


@pytest.fixture(scope='module')
def world(): return scene_records('val', n=30)


@pytest.fixture(scope='module')
def one(world): return ask(world, name='one')


@pytest.fixture(scope='module')
def siglip(world): return ask(world, 'scenes-siglip', name='a SigLIP', n=25)


class Page(HTMLParser):
    "Elements, references and text of a page; refuses a page whose elements are not closed in their order."
    def __init__(self, text):
        super().__init__(); self.refers, self.tags, self.alts, self.text, self.open = [], [], [], '', []
        self.feed(text); self.close()
        assert not self.open
    def handle_starttag(self, tag, attrs):
        self.tags.append(tag); self.refers += [v for k, v in attrs if k in ('src', 'href', 'srcset', 'data', 'action', 'poster')]
        if tag == 'img': self.alts.append(dict(attrs).get('alt'))
        if tag not in ('img', 'meta', 'br'): self.open.append(tag)
    def handle_endtag(self, tag): assert self.open.pop() == tag
    def handle_data(self, data): self.text += '' if self.open and self.open[-1] == 'style' else data


def test_every_part_is_there(one, siglip):
    for found in (one, siglip):
        assert all(found[p] is not None for p in PARTS if p not in ('index',)) and found['index']['n'] > 20
        json.dumps(found, allow_nan=False)
        assert found['card']['seed'] == 0 and found['card']['data'] == 'scenes, val' and found['card']['backbone'].startswith('scenes-')
    assert one['card']['images'] == 30 and siglip['card']['images'] == 25


def test_the_same_again(one, world):
    "The same seed gives the same numbers; another draws other captions and orders."
    assert ask(world, name='one') == one
    few, other = (diagnose_module._sample(world, 20, seed) for seed in (1, 2))
    assert len(few[0]) == len(few[1]) == 20 and few[0] == sorted(few[0]) != other[0] and few[1].captions == [world.captions[i] for i in few[0]]
    other = ask(world, name='one', seed=1)
    assert other['falls'] != one['falls'] and other['orders'] == one['orders']              # the same captions in other orders


def test_the_page_holds_all_it_needs(one, siglip):
    text = page([one, siglip])
    shown = Page(text)
    assert all(r.startswith('data:image/') for r in shown.refers) and len(shown.refers) > 10 and all(shown.alts)
    assert not {'script', 'link', 'iframe', 'object', 'base', 'form'} & set(shown.tags) and 'url(' not in text and '@import' not in text and not re.search(r'\bon\w+=', re.sub(r'"[^"]*"', '', text))
    for uri in shown.refers:
        kind, data = re.fullmatch(r'data:image/([\w+]+);base64,(.*)', uri).groups()
        data = base64.b64decode(data, validate=True)
        if kind == 'svg+xml': assert b'</svg>' in data and b'<script' not in data
        else: Image.open(io.BytesIO(data)).load()
    assert 'viewport' in text and '@media print' in text and '<html lang="en">' in text
    assert not re.search(r'\bnan\b|\bNone\b|\binf\b', shown.text) and 'Protocol' in shown.text and 'one' in shown.text and 'a SigLIP' in shown.text


def test_names_and_captions_stay_text(one, world):
    evil = '_<script>alert("x")</script> & $ <img src=http://x.example/y>'
    captions = [[f'{s} {evil}' for s in c] for c in world.captions]
    found = ask(Records(evil, world.images, captions), name=evil, length=88)
    shown = Page(page([found]))
    assert 'script' not in shown.tags and all(r.startswith('data:') for r in shown.refers) and evil in shown.text


def sharp(found, most):
    "A diagnosis as if each exchange had cost .1, and more at the first place for an index above zero."
    falls = pd.DataFrame(found['falls'])
    falls['fall'] = .1 + most*(falls.place == 1)
    return found | dict(falls=falls.to_dict('list'), index=found['index'] | shortsight(falls))


def test_two_models_side_by_side(one, world, tmp_path):
    "Models of other contexts are compared on the captions of which both hold as many sentences, or not at all, and the page says so."
    two = ask(world, name='two', length=44)
    cut = pd.DataFrame(one['falls'])
    cut = cut[(cut.sentences > 2) & (cut.place <= 2)].assign(sentences=2)
    models = sharp(one, 0.), sharp(two, .5), sharp(one | dict(name='three', falls=cut.to_dict('list')), .5), one | dict(name='four', index=None, place=None, sentence=None, falls=None)
    k, l = (pd.DataFrame(m['falls']).groupby('sample').sentences.first() for m in models[:2])
    same = int((k[l.index] == l).sum())
    text = Page(page(models)).text
    assert f'two against one, paired on {same} captions' in text and f'Left out are {len(l) - same} captions of which the two were asked about different numbers of sentences' in text
    assert 'three against one: no difference can be told, since the two models were asked about fewer than two captions in common' in text and 'four against one: no difference can be told, since four could not be asked' in text
    _, numbers = write_report(models, tmp_path)
    want, written = shortsight_difference(*(pd.DataFrame(m['falls']) for m in models[1::-1])), json.loads(numbers.read_text())['against first']
    assert written['two'] == want and want['low'] > 0 and want['n'] == same and 1 < same < len(l) and written['three']['value'] is written['four']['value'] is None
    with pytest.raises(ValueError, match='different names'): page([one, one])
    with pytest.raises(ValueError, match='different names'): page([])


def test_diagnoses_of_other_draws_pair_the_same_captions(siglip, world):
    drawn = diagnose_module._sample(world, 25, 0)[0]
    assert drawn != list(range(25)) and set(siglip['falls']['sample']) <= set(drawn) and max(siglip['falls']['sample']) > 24


def test_every_section_says_what_it_rests_on(one, siglip):
    shown = re.sub(r'\s+', ' ', Page(page([one, siglip])).text)
    orders, matrix, push = ([r for r in one[k] if r['direction'] == 't2i'] for k in ('orders', 'matrix', 'push'))
    parts = re.split('Where it reads, and what|Order of the sentences|Every order|Early tokens|AttentionWeight|What the embedding holds|The worst captions|Omitted', shown)[1:8]
    assert len(parts) == 7 and all(re.search(r'one – [\d to]+ of 30 captions', p) and re.search(r'a SigLIP – [\d to]+ of 25 captions', p) for p in parts)
    assert f"one – {orders[0]['n']} of 30 captions (left out: of fewer than 4 sentences), " in parts[1] and f"one – {matrix[0]['n']} of 30" in parts[2] and f"one – {push[0]['n']} of 30" in parts[3]
    assert all('cut' in p for p in parts)
    for r in one['similarity']['length']: assert diagnose_module._interval(r, 3) in parts[5] and diagnose_module._interval(dict(value=r['margin'], low=r['margin_low'], high=r['margin_high']), 3) in parts[5]


def test_less_than_all_is_not_shown_as_100(one):
    told = one | dict(index=one['index'] | dict(value=.1, low=.05, high=.2, why=None, asked=99.67065934))
    assert '99.7 % of their sentences' in diagnose_module.verdict(told) and '100 % of their sentences' in diagnose_module.verdict(told | dict(index=told['index'] | dict(asked=100.)))


def test_written_files(one, tmp_path):
    html, numbers = write_report([one], tmp_path/'new'/'folder')
    assert html.read_text() == page([one])
    written = json.loads(numbers.read_text())
    kept, = written['models']
    assert written['against first'] == {} and 'falls' not in kept and kept.keys() == one.keys() - {'falls'}
    assert kept['orders'] == one['orders'] and kept['index'] == one['index']
    assert [set(r) for r in kept['worst']] == [{'sample', 'file', 'sentences', 'before', 'after', 'instead', 'instead_file'}]*len(one['worst']) and sorted(f.name for f in html.parent.iterdir()) == ['diagnosis.html', 'diagnosis.json']
    assert all('image' in r for r in one['worst'])                                     # the diagnosis itself keeps its pictures


# ---- what cannot be measured is said

def test_one_sentence_captions(world):
    found = ask(Records('one-liners', world.images, [list(c[:1]) for c in world.captions]), name='flat')
    assert [p for p in PARTS if found[p] is None] == ['index', 'place', 'sentence', 'push', 'matrix', 'worst', 'falls'] and found['similarity']['added'] is None
    why = {o['what']: o['why'] for o in found['omitted']}
    assert '30 captions of one sentence' in why['index'] and '2 sentences' in why['order matrix'] and 'order: move' in why and 'order: remove' in why and 'two sentences' in why['what each sentence adds']
    text = Page(page([found])).text
    assert all(o['why'] in text for o in found['omitted']) and 'no index' in text


def test_orders_that_few_captions_bear_are_left_out(world):
    "Else all orders would be scored on those few alone."
    captions = [list(c) if i < 8 else list(c[:3]) for i, c in enumerate(world.captions)]
    found, four = ask(Records('short ones', world.images, captions)), sum(len(c) >= 4 for c in captions)
    why = {o['what']: o['why'] for o in found['omitted']}
    assert [r['variant'] for r in found['orders']] == ['full', 'remove', 'first', 'first2', 'swap2']*2 and f'{four} of 30 captions have the 4 sentences it needs' in why['order: move'] and 'order: remove' not in why
    assert found['worst_order'] == 'swap2' and found['orders'][0]['n'] == sum(len(c) >= 2 for c in captions) and max(r['place'] or 0 for r in found['matrix']) == 3


def test_a_context_too_short_for_two_sentences(world):
    long = Records('long', world.images, [[' '.join(c)]*3 for c in world.captions])
    found = ask(long, name='narrow', length=28)
    why = {o['what']: o['why'] for o in found['omitted']}
    assert found['index'] is None and found['push'] is None and 'context holds fewer than two sentences' in why['index'] and '28 tokens' in why['early tokens']
    assert found['card']['truncated texts'] > 25 and f"{found['card']['truncated texts']} of 30 captions have more than the 26 tokens" in why['the end of long captions'] and all(r['truncated'] > 20 for r in found['orders'] if r['variant'] == 'full')
    Page(page([found]))


def test_a_model_that_notices_nothing(world):
    model, tok = create_model('scenes-clip', context_length=88, keep=8), get_tokenizer('scenes-clip', 88)
    noise = torch.randn(30, 128, generator=torch.Generator().manual_seed(0))
    model.encode_image = lambda images: noise[:len(images)]
    found = diagnose(model, TRANSFORM, tok, world, 'blind', shuffles=1)
    assert found['index']['value'] is None and any('does not notice' in o['why'] for o in found['omitted'])
    assert 'no index' in Page(page([found])).text


def test_a_single_image_is_an_error(world):
    with pytest.raises(ValueError, match='scenes, val holds a single image'): ask(scene_records('val', n=1))


def test_two_images_are_little_but_no_error(world):
    found = ask(Records('two', world.images[:2], [list(c) for c in world.captions[:2]]), name='two images')
    Page(page([found]))


def test_a_mistake_in_the_code_is_no_omission(world, monkeypatch):
    def broken(*a, **k): return int('x')
    monkeypatch.setattr(diagnose_module, 'push_rows', broken)
    with pytest.raises(ValueError, match='invalid literal'): ask(world)


def test_an_unreadable_image_is_named(world, tmp_path):
    files = []
    for i in range(4): Image.fromarray(world.images[i]).save(f := tmp_path/f'{i}.png'); files.append(str(f))
    (tmp_path/'2.png').write_bytes(b'no picture')
    model, _, transform = create_model_and_transforms('scenes-clip', context_length=88, keep=8)
    records = Records('files', files, [list(c) for c in world.captions[:4]])
    with pytest.raises(ImageError, match='2.png'): diagnose(model, transform, get_tokenizer('scenes-clip', 88), records)


def test_several_rows_an_image(world, tmp_path):
    "The first row of each counts, or a perfect model would find one of two pictures that are the same, and have a recall of zero."
    files = []
    for i in range(8): Image.fromarray(world.images[i]).save(f := tmp_path/f'{i}.png'); files += [str(f)]*2
    rows = [list(world.captions[i//2 + 8*(i % 2)]) for i in range(16)]
    model, _, transform = create_model_and_transforms('scenes-clip', context_length=88, keep=8)
    found = diagnose(model, transform, get_tokenizer('scenes-clip', 88), Records('rows', files, rows), 'rows', shuffles=1, about=dict(positions='stretched from 77 to 248, not trained'))
    assert found['card']['images'] == found['card']['texts'] == 8 and found['card']['text'] == 'the first caption of each image' and not {i % 2 for i in found['falls']['sample']} - {0}
    assert '8 rows name an image again and are left out' in {o['what']: o['why'] for o in found['omitted']}['other captions of an image'] and found['similarity']['cosine'][0]['n'] == 8
    html, numbers = write_report([found], tmp_path/'out')
    text = Page(html.read_text()).text
    assert '8 rows name an image again' in text and 'positionsstretched from 77 to 248, not trained' in text and json.loads(numbers.read_text())['models'][0]['card']['positions'].startswith('stretched')
    with pytest.raises(ValueError, match='single image'): diagnose(model, transform, get_tokenizer('scenes-clip', 88), Records('rows', files[:2], rows[:2]))


def test_the_card_names_the_caption(world):
    "Of data sets with several independent captions an image, the long one is the first of them."
    several = Records('coco', world.images, world.captions, [[' '.join(c), 'Another.'] for c in world.captions])
    assert diagnose_module._rule(several, 0) == 'the first caption of each image' and diagnose_module._rule(world, 0) == 'the whole caption'


@pytest.mark.parametrize('broken, what', [('text_projection', 'text features of 6 of 6'), ('transformer.resblocks.1.mlp.c_fc.weight', 'text features of 6 of 6'), ('visual.proj', 'image features of 6 of 6')])
def test_features_that_are_not_finite(world, broken, what):
    model = create_model('scenes-clip', context_length=88, keep=8)
    with torch.no_grad(): dict(model.named_parameters())[broken].view(-1)[0] = float('nan')
    with pytest.raises(ValueError, match=f'diverged: the {what} samples are not finite .*Look for NaN in its weights'): diagnose(model, TRANSFORM, get_tokenizer('scenes-clip', 88), world, 'diverged', n=6)


def test_pictures_of_files(world, tmp_path):
    files = []
    for i in range(20): Image.fromarray(world.images[i]).resize((700, 500)).save(f := tmp_path/f'{i}.jpg'); files.append(str(f))
    model, _, transform = create_model_and_transforms('scenes-clip', context_length=88, keep=8)
    found = diagnose(model, transform, get_tokenizer('scenes-clip', 88), Records('files', files, [list(c) for c in world.captions[:20]]), shuffles=1)
    for r in found['worst']: assert r['image'].startswith('data:image/jpeg') and len(r['image']) < 20_000 and r['sample'] != r['instead'] and r['file'] == f"{r['sample']}.jpg"
    assert str(tmp_path) not in page([found]) and str(tmp_path) not in json.dumps(found)   # a page to pass on names no folder of this machine


def test_worst_captions_are_the_worst(one, world):
    from debias_clip.bias import order_ranks
    from debias_clip.retrieval import encode_images
    torch.manual_seed(0)
    model, tok = create_model('scenes-clip', context_length=88, keep=8), get_tokenizer('scenes-clip', 88)
    hows = [r['variant'] for r in one['orders'] if r['direction'] == 't2i']
    ranks, _ = order_ranks(model, TRANSFORM, tok, world, hows, encode_images(model, world, TRANSFORM))
    enough = [i for i, c in enumerate(world.captions) if len(c) >= 4]
    fallen = [(b > 0, b - a, i) for i, b, a in zip(enough, *(ranks[h]['t2i'].tolist() for h in ('full', 'move'))) if a > b]
    assert len(fallen) > 3 and [(r['before'] > 1, r['before'] - r['after'], r['sample']) for r in one['worst']] == sorted(fallen)[:3]   # those that are found as written come first
    c = list(world.captions[one['worst'][0]['sample']])
    assert one['worst'][0]['sentences'] == [c[3], *c[1:3], c[0], *c[4:]]


def test_captions_that_fall_are_not_hidden_by_those_that_do_not(world):
    model, tok, enough = create_model('scenes-clip', context_length=88, keep=8), get_tokenizer('scenes-clip', 88), [i for i, c in enumerate(world.captions) if len(c) >= 4][:8]
    ranks = {'full': dict(t2i=[0]*6 + [1, 1]), 'move': dict(t2i=[0]*6 + [6, 7])}
    worst = diagnose_module._worst(model, tok, world, torch.eye(30, 128), ranks, enough, range(30), 'move', 6)
    assert [(r['sample'], r['before'], r['after']) for r in worst] == [(enough[7], 2, 8), (enough[6], 2, 7)]


# ---- the notebook

def test_the_notebook_names_the_seed_it_measures():
    cells = json.loads((Path(__file__).parents[1]/'nbs'/'experiments'/'diagnose.ipynb').read_text())['cells']
    source = '\n'.join(''.join(c['source']) for c in cells)
    assert 'arms, seeds[:1], finetuning' in source and 'headline(preset, seeds[:1])' in source


# ---- the offline world's models

def test_models_that_are_not_there(tmp_path):
    parameters = dict(out='runs/x', seeds=[3, 4], arms={'pre-trained': None, 'new': dict(recipe='debias')}, pretraining={}, finetuning=dict(data='scenes', backbone='scenes-clip', keep=8))
    with pytest.raises(ValueError, match=r'runs/x holds no trained model for new, seed 3: `debias-clip run x` makes them'): trained_arms(parameters, tmp_path)


# ---- the command

@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp('weights')
    for k, (name, backbone) in enumerate([('a', 'scenes-clip'), ('b', 'scenes-siglip')]):
        torch.manual_seed(k)
        save_checkpoint(create_model(backbone, context_length=88, keep=8), folder/f'{name}.safetensors')
    return folder


@pytest.fixture
def scenes(monkeypatch):
    "Where the command says scenes, twenty of them."
    own = runs._records
    monkeypatch.setattr(runs, '_records', lambda data, root: scene_records('test', n=20) if data == 'scenes' else own(data, root))


def command(*arguments, code=0):
    done = CliRunner().invoke(app, ['diagnose', *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit): raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def test_the_command_on_two_checkpoints(weights, tmp_path, scenes):
    said = command('--pretrained', weights/'a.safetensors', '--against', weights/'b.safetensors', '--images', 15, '--out', tmp_path/'report')
    assert 'asking a\na:' in said and 'asking b\nb:' in said and said.endswith(f"{tmp_path/'report'/'diagnosis.html'}\n{tmp_path/'report'/'diagnosis.json'}\n")
    models = json.loads((tmp_path/'report'/'diagnosis.json').read_text())['models']
    assert [(m['name'], m['card']['backbone'], m['card']['weights'], m['card']['images']) for m in models] == [('a', 'scenes-clip', 'a.safetensors', 15), ('b', 'scenes-siglip', 'b.safetensors', 15)]
    assert all(re.fullmatch('[0-9a-f]{16}', m['card']['sha256']) for m in models)
    assert str(weights) not in (tmp_path/'report'/'diagnosis.html').read_text()


def test_the_command_on_own_captions(weights, tmp_path, world):
    for i in range(12): Image.fromarray(world.images[i]).save(tmp_path/f'{i}.png')
    rows = [dict(image=f'{i}.png', caption=' '.join(world.captions[i])) for i in range(12)]
    (tmp_path/'captions.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    command('--model', 'scenes-clip', '--pretrained', weights/'a.safetensors', '--data', tmp_path, '--out', tmp_path/'out')
    found, = json.loads((tmp_path/'out'/'diagnosis.json').read_text())['models']
    assert found['card']['images'] == 12 and found['index']['n'] >= 10


def test_files_of_one_name_are_told_apart(weights, tmp_path):
    (tmp_path/'other').mkdir()
    shutil.copy(weights/'a.safetensors', tmp_path/'other'/'a.safetensors')
    assert runs._names([str(weights/'a.safetensors'), str(tmp_path/'other'/'a.safetensors')]) == [f'{weights.name}/a', 'other/a']
    with pytest.raises(ValueError, match='are the same: give --against another checkpoint'): runs._names([str(weights/'a.safetensors')]*2)


def test_the_command_says_what_is_wrong(weights, tmp_path, scenes):
    assert '--model and --against need --pretrained' in command('--model', 'scenes-clip', code=2)
    with pytest.raises(ValueError, match='there is no nowhere'): command('--pretrained', weights/'a.safetensors', '--data', 'nowhere')
    with pytest.raises(ValueError, match=r'nothing.safetensors is no file that could tell its backbone'): command('--pretrained', tmp_path/'nothing.safetensors')
    with pytest.raises(ValueError, match='stretched from 28 to 88 positions; context_length=40'): command('--pretrained', weights/'a.safetensors', '--context', 40)
    with pytest.raises(ValueError, match='holds no trained model for Long-CLIP recipe, seed 0; .*DeBias recipe, seed 0'): command('--preset', 'paper-l14')


def test_the_models_of_a_preset(tmp_path, monkeypatch, scenes):
    "Those its main table has trained: without --pretrained the command asks them."
    small = dict(data='scenes', backbone='scenes-clip', context_length=88, keep=8, epochs=1, batch_size=16, pca_dim=4, lr=1e-3, warmup=1, data_options=dict(split='train', n=16))
    parameters = dict(out='runs/x', preset='x', seeds=[3, 4], arms={'pre-trained': None, 'new': dict(recipe='debias')}, finetuning=small,
                      pretraining=dict(small, data_options=dict(split='web', text='short', n=16), recipe=None, short_weight=0., context_length=28), tests={})
    parameters['pretraining'].pop('backbone')
    for config in planned_models(parameters | dict(seeds=[3])).values(): train(config, tmp_path/'runs/x/models')
    job = runs.Job('main_table', Path('main_table.ipynb'), tmp_path, 'runs/x', parameters, '', '')
    monkeypatch.setattr(runs, 'read_preset', lambda preset: runs.Preset('x', 'runs/x', '', [job]))
    said = command('--preset', 'x', '--images', 15, '--out', tmp_path/'report')
    models = json.loads((tmp_path/'report'/'diagnosis.json').read_text())['models']
    assert [(m['name'], m['card']['weights']) for m in models] == [('pre-trained', 'runs/x, seed 3'), ('new', 'runs/x, seed 3')] and 'asking new' in said
    one, two = trained_arms(parameters, tmp_path)
    assert (one[0], two[0]) == ('pre-trained', 'new') and not torch.equal(*(load()[0].positional_embedding for _, load in (one, two)))


# ---- in a browser

CHROMIUM = os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'chrome'))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason='no chromium, chromium-browser or google-chrome is installed, and CHROMIUM names none')


def chromium(*arguments, folder):
    command = [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--enable-logging=stderr', '--v=0', '--host-resolver-rules=MAP * ~NOTFOUND', f'--user-data-dir={folder}/profile', *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


PROBE = """<script>addEventListener("load",async()=>{const f=[...document.images];const ok=await Promise.all(f.map(i=>i.decode().then(()=>i.naturalWidth>0&&i.getBoundingClientRect().width>40,()=>false)));
parent.postMessage([location.hash.slice(1),{figures:f.length,drawn:ok.filter(Boolean).length,wide:document.documentElement.scrollWidth,screen:innerWidth,tables:Math.max(...[...document.querySelectorAll("table")].map(t=>t.getBoundingClientRect().right))}],"*")})</script>"""
SCREENS = dict(phone=360, desk=1200, paper=717)                                           # CSS pixels; paper is A4 without Chromium's margins


def framed(pages, folder):
    "What a browser finds of each page (name in SCREENS -> HTML) in a frame of that width: a window of its own would not be narrower than 500. The probe is added here; the pages themselves have no script."
    for name, text in pages.items(): (folder/f'{name}.html').write_text(text.replace('</body>', PROBE + '</body>'))
    frames = ''.join(f'<iframe src="{name}.html#{name}" width="{SCREENS[name]}" height="9000" style="border:0"></iframe>' for name in pages)
    (folder/'frames.html').write_text(f'<!doctype html><script>const found={{}};onmessage=e=>{{found[e.data[0]]=e.data[1];document.body.setAttribute("data-found",JSON.stringify(found))}}</script><body>{frames}</body>')
    for budget in (20_000, 120_000, 600_000):                                            # ms of the page's own time: a busy machine needs more
        done = chromium('--window-size=1300,1000', f'--virtual-time-budget={budget}', '--dump-dom', (folder/'frames.html').as_uri(), folder=folder)
        assert 'CONSOLE' not in done.stderr, done.stderr[-2000:]
        if (said := re.search(r'data-found="([^"]*)"', done.stdout)) and (found := json.loads(said[1].replace('&quot;', '"'))).keys() == pages.keys(): return found


@needs_chromium
@pytest.mark.filterwarnings('error:constrained_layout')   # which leaves a figure without room for itself
def test_a_browser_draws_it(one, siglip, tmp_path):
    "Every figure is decoded, nothing is wider than a phone, a screen, or, in the styles for print, the tables of many models than paper, and the console stays silent."
    long = siglip | dict(name='a-checkpoint-whose-name-is-as-long-as-names-of-files-can-be-epoch-3')
    html, _ = write_report([one, long], tmp_path)
    many = page([one | dict(name=f'model {i}') for i in range(6)])
    assert many.count('@media print{') == 1
    pages = dict(phone=html.read_text(), desk=html.read_text(), paper=many.replace('@media print{', '@media all{'))
    for name, found in framed(pages, tmp_path).items():
        assert found['screen'] == SCREENS[name] and found['wide'] <= SCREENS[name], (name, found)
        assert found['figures'] == found['drawn'] == len(Page(pages[name]).refers), (name, found)
        if name == 'paper': assert found['tables'] <= SCREENS[name], found
    chromium('--window-size=1200,6000', f'--screenshot={tmp_path}/shot.png', html.as_uri(), folder=tmp_path)
    shot = np.asarray(Image.open(tmp_path/'shot.png').convert('L'))
    assert shot.shape[1] >= 1200 and (shot < 128).mean() > .002                         # something is on it


@needs_chromium
def test_it_prints(one, tmp_path):
    html, _ = write_report([one], tmp_path)
    chromium(f'--print-to-pdf={tmp_path}/page.pdf', '--no-pdf-header-footer', html.as_uri(), folder=tmp_path)
    assert Path(tmp_path/'page.pdf').read_bytes().startswith(b'%PDF') and (tmp_path/'page.pdf').stat().st_size > 20_000
