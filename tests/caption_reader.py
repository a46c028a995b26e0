"A slow reader of the offline world's captions: everything that is said is looked up in its scene."
import re

from debias_clip.scenes import COLOURS, GROUNDS, PLACES, SHAPES, SIZES

def number(table): return {word: k for k, pair in enumerate(table.items()) for word in pair}


SIZE, COLOUR, SHAPE, GROUND, PLACE = map(number, (SIZES, COLOURS, SHAPES, GROUNDS, PLACES))
AT = '|'.join(sorted(PLACE, key=len, reverse=True))


def one(table): return '|'.join(table)

NOUN = rf'\b(an?) (?:({one(SIZE)}) )?(?:({one(COLOUR)}) )?({one(SHAPE)}|shape)\b'
PHRASE = re.compile(rf'{NOUN}(?: (?:is |sits |can be found )?({AT})\b(?! side))?', re.I)
FRONT = re.compile(rf"({AT})(?: is|,) ", re.I)   # "At the top is ", "In the upper left, "


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
    assert sentence.endswith('.') and sentence[0].isupper(), sentence
    assert '  ' not in sentence and sentence.count('.') == 1, sentence
    assert not re.search(r'[{}]', sentence)
    for said in told(sentence): assert matching(scenes, i, said), (sentence, said)
    for ground in re.findall(rf'\b({one(GROUND)})\b', sentence.lower()):
        assert GROUND[ground] == scenes.ground[i], sentence
    return told(sentence)


def units(sentences):
    "The details, the two sentences of a split one put together: 'I notice a shape at the top.' 'It is a red disc.'"
    for k, s in enumerate(sentences):
        if s.startswith('It is a'):
            ((*_, at),), ((size, colour, shape, _),) = told(sentences[k - 1]), told(s)
            yield size, colour, shape, at
        elif k + 1 == len(sentences) or not sentences[k + 1].startswith('It is a'):
            yield from told(s)
