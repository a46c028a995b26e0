"""The offline world against slow readers: every phrase of a caption read back and looked up in the scene, every cell of a picture looked at."""
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from debias_clip import scenes as world
from debias_clip.captions import split_sentences
from debias_clip.scenes import AUTHORS, COLOURS, GROUNDS, PLACES, SHAPES, SIZES, draw_scenes, long_caption, render, scene_records, short_caption

RGB = dict(red=(214, 39, 40), green=(44, 160, 44), blue=(31, 90, 220), yellow=(240, 220, 40), purple=(130, 50, 170), orange=(255, 140, 20), white=(245, 245, 245), black=(15, 15, 15))
GROUND_RGB = dict(grey=(150, 150, 150), brown=(150, 115, 80), teal=(95, 160, 160), pink=(225, 170, 185))


# A reader of captions: words to numbers, synonyms too, then everything said is looked up.

def number(table): return {word: k for k, pair in enumerate(table.items()) for word in pair}

SIZE, COLOUR, SHAPE, GROUND, PLACE = map(number, (SIZES, COLOURS, SHAPES, GROUNDS, PLACES))
AT = '|'.join(sorted(PLACE, key=len, reverse=True))
one = lambda table: '|'.join(table)
PHRASE = re.compile(rf'\b(an?) (?:({one(SIZE)}) )?(?:({one(COLOUR)}) )?({one(SHAPE)}|shape)\b(?: (?:is |sits |can be found )?({AT})\b)?', re.I)
FRONT = re.compile(rf"({AT})(?: is|,) ", re.I)   # a sentence that opens with a place: "At the top is ", "In the upper left, "


def told(sentence):
    "What a sentence says of objects: list of (size, colour, shape, cell), None where it is silent."
    out = []
    for m in PHRASE.finditer(sentence):
        article, size, colour, shape, at = (g and g.lower() for g in m.groups())
        if not at and (front := FRONT.fullmatch(sentence[:m.start()])): at = front[1].lower()
        word = next(w for w in (size, colour, shape) if w)
        assert article == ('an' if word[0] in 'aeiou' else 'a'), sentence
        out.append((SIZE.get(size), COLOUR.get(colour), SHAPE.get(shape), PLACE.get(at)))
    return out


def matching(scenes, i, said):
    "Cells of scene i whose object is as `said`."
    size, colour, shape, at = said
    return [c for c in range(9) if scenes.present[i, c] and at in (None, c) and size in (None, scenes.large[i, c])
            and colour in (None, scenes.colour[i, c]) and shape in (None, scenes.shape[i, c])]


def check_sentence(scenes, i, sentence):
    assert sentence.endswith('.') and sentence[0].isupper() and '  ' not in sentence and sentence.count('.') == 1, sentence
    assert not re.search(r'[{}]', sentence)
    for said in told(sentence): assert matching(scenes, i, said), (sentence, said)
    for ground in re.findall(rf'\b({one(GROUND)})\b', sentence.lower()): assert GROUND[ground] == scenes.ground[i], sentence
    return told(sentence)


def units(sentences):
    "The details, the two sentences of a split one put together: 'I notice a shape at the top.' 'It is a red disc.'"
    for k, s in enumerate(sentences):
        if s.startswith('It is a'):
            ((*_, at),), ((size, colour, shape, _),) = told(sentences[k - 1]), told(s)
            yield size, colour, shape, at
        elif k + 1 == len(sentences) or not sentences[k + 1].startswith('It is a'): yield from told(s)


@pytest.fixture(scope='module')
def some(): return draw_scenes(400, 7)


def test_the_reader_reads():
    assert told('A crimson moon sits at the top left.') == [(None, 0, 7, 0)]
    assert told('In the upper middle, an azure hoop.') == [(None, 2, 4, 1)]
    assert told('A tiny shape is to the right, and a plus is at the centre.') == [(0, None, None, 5), (None, None, 5, 4)]
    assert told('A little noise, as in an old print.') == told('Seen straight from above, as if the shapes lay on a table.') == []
    scenes = draw_scenes(1, 0)
    absent = int(np.flatnonzero(~scenes.present[0])[0])
    assert not matching(scenes, 0, (None, None, None, absent))


@pytest.mark.parametrize('name', AUTHORS)
def test_long_captions_are_true(some, name):
    author = AUTHORS[name]
    for i in range(len(some)):
        caption = long_caption(some, i, random.Random(f'{name} {i}'), author)
        assert len(caption) >= 2
        for sentence in caption: check_sentence(some, i, sentence)
        summary = told(caption[0])
        assert 2 <= len(summary) <= 3 and all(size is None and at is None for size, _, _, at in summary)
        details = list(units(caption[1:]))
        assert max(2, round(author.mention*some.present[i].sum())) <= len(details) <= some.present[i].sum()
        assert all(matching(some, i, said) for said in details), caption       # the two halves of a split detail are of one object
        placed = [at for *_, at in details if at is not None]
        assert len(set(placed)) == len(placed), caption                         # no object is told twice


@pytest.mark.parametrize('name', AUTHORS)
def test_short_captions_are_true(some, name):
    counts = set()
    for i in range(len(some)):
        caption = short_caption(some, i, random.Random(i), AUTHORS[name])
        counts.add(len(check_sentence(some, i, caption)))
        assert split_sentences(caption) == [caption]
    assert counts == {1, 2, 3}


def test_summaries_name_the_largest(some):
    several = [i for i in range(len(some)) if some.large[i][some.present[i]].sum() >= 3]     # scenes with large things enough
    assert len(several) > 50
    for i in several:
        for said in told(long_caption(some, i, random.Random(i), AUTHORS['own'])[0]): assert any(some.large[i, c] for c in matching(some, i, said))


@given(st.integers(0, 2**31), st.integers(0, 19), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_author_tells_the_truth(seed, i, synonym, split, pair, fillers):
    scenes = draw_scenes(20, 5)
    author = replace(AUTHORS['other'], synonym=synonym, split=split, pair=pair, fillers=fillers)
    caption = long_caption(scenes, i, random.Random(seed), author)
    for sentence in caption: check_sentence(scenes, i, sentence)
    assert all(matching(scenes, i, said) for said in units(caption[1:]))


def test_sentences_survive_the_splitter(some):
    "The captions joined by a space fall into the same sentences again, so that nothing about them hangs on how they were made."
    for i in range(100):
        caption = long_caption(some, i, random.Random(i), AUTHORS['own'])
        assert split_sentences(' '.join(caption)) == caption


# Authors

def test_authors_write_differently():
    n, texts = 300, {}
    for name in AUTHORS: texts[name] = scene_records('val', n=n, author=name)
    own, other = (texts[a].captions for a in AUTHORS)
    assert (texts['own'].images == texts['other'].images).all() and not any(a == b for a, b in zip(own, other))
    words = {name: [w for c in texts[name].captions for w in re.findall('[a-z]+', ' '.join(c).lower())] for name in AUTHORS}
    synonyms = {word for table in (SHAPES, COLOURS, SIZES) for word in table.values()}
    plain = {word for table in (SHAPES, COLOURS, SIZES) for word in table}
    share = {name: sum(w in synonyms for w in ws)/sum(w in synonyms | plain for w in ws) for name, ws in words.items()}
    for name in AUTHORS: assert abs(share[name] - AUTHORS[name].synonym) < .03
    assert np.mean([len(c) for c in other]) > np.mean([len(c) for c in own]) + 1
    for what in ('summary', 'detail', 'unplaced', 'filler'): assert not set(getattr(AUTHORS['own'], what)) & set(getattr(AUTHORS['other'], what))


# Pictures

def cells(image): return image.reshape(3, 16, 3, 16, 3).swapaxes(1, 2).reshape(9, 256, 3)


def test_every_object_is_drawn_and_nothing_else(some):
    images, areas = render(some, grain=0), {}
    assert images.shape == (400, 48, 48, 3) and images.dtype == np.uint8
    for i, image in enumerate(images):
        ground = np.array(list(GROUND_RGB.values())[some.ground[i]])
        for c, pixels in enumerate(cells(image)):
            empty = (pixels == ground).all(1)
            if not some.present[i, c]: assert empty.all(); continue
            assert (pixels[~empty] == list(RGB.values())[some.colour[i, c]]).all() and 12 <= (~empty).sum() < 220
            areas.setdefault((some.shape[i, c], some.large[i, c]), set()).add(int((~empty).sum()))
    assert len(areas) == 16
    for shape in range(8): assert min(areas[shape, 1]) > max(areas[shape, 0])


def test_shapes_and_shifts_look_different():
    "One scene for each shape, size and shift, all in the middle cell: 144 different pictures, each moved by its shift."
    n = 8*2*9
    shape, large, shift = (a.ravel() for a in np.meshgrid(range(8), range(2), range(9)))
    one = lambda values: np.repeat(np.asarray(values)[:, None], 9, 1)
    shifts = np.stack([shift//3 - 1, shift % 3 - 1], 1)
    scenes = world.Scenes(np.arange(9) == np.full((n, 1), 4), one(shape), one(np.zeros(n, int)), one(large), np.zeros(n, int), np.repeat(shifts[:, None], 9, 1), 0)
    middle = render(scenes, grain=0)[:, 16:32, 16:32]
    drawn = {(s, l, tuple(d)): (m == RGB['red']).all(-1) for s, l, d, m in zip(shape, large, shifts, middle)}
    assert len({d.tobytes() for d in drawn.values()}) == n
    for (s, l, (down, right)), mask in drawn.items():
        assert (np.roll(drawn[s, l, (0, 0)], (down, right), (0, 1)) == mask).all(), (s, l, down, right)


def test_grain_is_noise_around_the_scene(some):
    clean, noisy = (render(some, grain=g).astype(float) for g in (0, 8.))
    middling = (clean > 40) & (clean < 215)         # away from 0 and 255, where it is cut off
    difference = (noisy - clean)[middling]
    assert abs(difference.std() - 8) < .2 and abs(difference.mean()) < .6      # rounding down costs half a grey level
    assert noisy.min() >= 0 and noisy.max() <= 255


# The same bits; splits; names

def test_same_arguments_same_bits():
    for split, text, author in (('train', 'long', 'own'), ('web', 'short', 'own'), ('test', 'short', 'other'), ('val', 'long', 'other')):
        a = scene_records(split, n=50, text=text, author=author)
        world._pictures.cache_clear()
        b = scene_records(split, n=50, text=text, author=author)
        assert a.images is not b.images and (a.images == b.images).all() and (a.captions, a.short, a.protocol) == (b.captions, b.short, b.protocol)
    a, b = draw_scenes(9, 1), draw_scenes(9, 2)
    assert not (a.colour == b.colour).all() and a.seed != b.seed


def test_known_bits():
    "Values that another machine or library version must give too: models are found by the settings that made them, and the world is one of them."
    records = scene_records('test', n=5)
    assert ' '.join(records.captions[0][:3]) == ('This is a drawing of an orange plus, a blue square and a yellow circle. At the top left is a small white square. '
                                                 'A tiny blue cross is at the bottom, and a small white diamond is at the top.')
    assert records.short[0][0] == 'A blue plus.' and draw_scenes(5, 104).present.sum() == 27


def visible(scenes):
    "What can be seen of each scene, as bytes."
    hidden = ~scenes.present
    seen = [np.where(hidden, -1, a) for a in (scenes.shape, scenes.colour, scenes.large)]
    return {np.concatenate([*(a[i] for a in seen), [scenes.ground[i]]]).astype(np.int8).tobytes() for i in range(len(scenes))}


def test_splits_share_no_scene():
    found = {split: visible(draw_scenes(n, seed)) for split, (n, seed) in world._SPLITS.items()}
    assert {s: len(f) for s, f in found.items()} == {'web': 40_000, 'train': 16_000, 'val': 1_000, 'test': 1_000}   # nor one scene twice
    for a in found:
        for b in found: assert a == b or not found[a] & found[b]


@pytest.mark.parametrize('split', ['web', 'train', 'val', 'test'])
@pytest.mark.parametrize('text', ['long', 'short'])
def test_records_are_whole(split, text):
    records = scene_records(split, n=30, text=text)
    assert len(records) == 30 and records.images.shape == (30, 48, 48, 3) and records.images.dtype == np.uint8
    assert all(len(c) == 1 for c in records.captions) if text == 'short' else all(len(c) >= 2 for c in records.captions)
    assert (records.short is None) == (split in ('web', 'train'))
    if records.short: assert all(len(s) == 5 for s in records.short) and any(len(set(s)) > 1 for s in records.short)
    assert split in records.name and text in records.protocol and 'own' in records.protocol


def test_captions_belong_to_their_pictures():
    records, scenes = scene_records('val', n=60), draw_scenes(60, world._SPLITS['val'][1])
    assert (records.images == render(scenes)).all()
    for i in range(60):
        for sentence in [*records.captions[i], *records.short[i]]: check_sentence(scenes, i, sentence)


@pytest.mark.parametrize('given, message', [(dict(split='tset'), "no split 'tset'; there is web, train, val, test"), (dict(author='third'), "no author 'third'; there is own, other"),
                                            (dict(text='both'), "no text 'both'; there is long, short")])
def test_unknown_names(given, message):
    with pytest.raises(ValueError, match=message): scene_records(**given)
