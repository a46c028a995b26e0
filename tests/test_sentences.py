"Sentences: properties over any text, and the hard cases of each kind."
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from debias_clip import sentences
from debias_clip.sentences import split_sentences

SHARED = Path(__file__).parents[2] / "shared"

# text made of what splitters trip over, and any text at all
BITS = [
    "a", "T", "The dog", " is ", "red", "I", "A", "3", ".", "!", "?", "...", "…", '"', "“", "”", "'", "’", "(", ")",
    "[", "「", "」", "。", "！", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\xa0", "\u2028", "\x85", "\u3000",
    "\u200b", "\ufeff", "St.", "Dr.", "U.S. ", "a.m. ", "e.g. ", "1. ", "- ", "/", "www.x.com ", "\ud800", "\0",
    "😀", "é", "中", "İ", "́", "؟", "।", ",", ":", "*", "#",
]
TEXT = st.one_of(
    st.text(max_size=80),
    st.lists(st.sampled_from(BITS), max_size=30).map("".join),
    st.text(st.characters(categories=None), max_size=40),
)


def squeeze(text): return "".join(text.split())


# ---- split_sentences

@settings(max_examples=600, deadline=None)
@given(TEXT)
@example("T.\xa0Rex. \"A.\u2028B")
@example("One.\r\n\r\nTwo.\r\nThree.")
def test_pieces_give_the_caption_back(text):
    pieces = split_sentences(text)
    assert squeeze("".join(pieces)) == squeeze(text)
    assert all(p == p.strip() and p for p in pieces)
    assert bool(pieces) == bool(text.strip())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(BITS + [" A cat. ", " It runs. ", ' "STOP." '])).map(" ".join))
def test_pieces_joined_by_a_space_give_spaced_captions_back(text):
    if any(c in text for c in "。！」؟।\u200b\ufeff"): return  # these end sentences without a space
    assert " ".join(" ".join(split_sentences(text)).split()) == " ".join(text.split())


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_period_is_long_clips_split(text):
    assert split_sentences(text, "period") == [p for p in text.replace("\n", " ").split(". ") if p.strip()]


@pytest.mark.parametrize("caption", ["", " ", "\n\t\xa0\u2028"])
@pytest.mark.parametrize("splitter", ["default", "period"])
def test_blank_captions_have_no_sentences(caption, splitter): assert split_sentences(caption, splitter) == []


@pytest.mark.parametrize("caption", [None, float("nan"), 3, b"A dog.", ["A dog."]])
def test_what_is_no_text_is_refused(caption):
    with pytest.raises(TypeError, match="must be a str"): split_sentences(caption)


def test_unknown_splitter_names_the_close_one():
    with pytest.raises(ValueError, match="did you mean period"): split_sentences("A dog.", "periods")


def test_ten_thousand_words():
    sentence = 'A sign by St. Mary reads "STOP. GO." in red.'
    assert split_sentences(" ".join([sentence] * 1000)) == [sentence] * 1000


LONG = ["\n"*100_000, "中。"*20_000, '. "'*30_000, "www.a"*20_000, "“Abc def. "*10_000, "The x "*20_000]


@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:10]))
def test_no_text_takes_the_square_of_its_length(text):  # a minute and more, if it did
    assert squeeze("".join(split_sentences(text))) == squeeze(text)


def test_a_panic_of_the_library_is_survived(monkeypatch):
    class PanicException(BaseException): pass
    def panic(*_): raise PanicException
    monkeypatch.setattr(sentences.sentencex, "get_sentence_boundaries", panic)
    assert split_sentences("A dog runs. It is red.") == ["A dog runs.", "It is red."]
    def interrupt(*_): raise KeyboardInterrupt
    monkeypatch.setattr(sentences.sentencex, "get_sentence_boundaries", interrupt)
    with pytest.raises(KeyboardInterrupt): split_sentences("A dog.")


# made for this test, a bar where a sentence starts
KINDS = {
    "abbreviation": [
        "A bronze statue of Dr. Ellen Hill stands here. |Two people pass.",
        "The bag weighs approx. five pounds. |It is brown.",
        "Lt. Col. Hill and Mrs. Hill wave.",
        "A map of the land near Lake St. Clair. |Blue marks water.",
        "The truck of Hill Mfg. Co. and a van are parked. |It rains.",
        "The letter came on Oct. 5 by train.",
        "The cover of Vol. II is red. |It is worn.",
        "A plaque for Wm. Penn and Geo. Hill. |It is bronze.",
        "Spices (salt, etc.) stand in jars. |They are full.",
    ],
    "initials": [
        "A bust of Robert E. Lee in marble. |It stands on a plinth.",
        "The book is by J. R. R. Hill and lies open.",
        "The U.S. Open logo is on the fence. |A man serves.",
        "The sticker says S. F. Giants in orange. |It peels.",
        "A poster of E.T. and a boy. |It is torn.",
        'The word "F. B. I." is on the coat. |It is blue.',
    ],
    "letter": [
        "The road forms the letter T. |Cars wait.",
        "The beam is shaped like an upside-down U. |Birds sit on it.",
        "Dents are left of the B. |Small cracks run up.",
        "He takes vitamin C. |The jar is orange.",
        'The arms form an X. |"STOP" is below.',
        "The car is a Model T. |It is black.",
    ],
    "final": [
        "The shop is on Pine Ave. |It has a green door.",
        "Boats in Portland, Ore. |Two are docked.",
        "Street in Trenton, N.J. |Women walk by.",
        "Cups, pens, etc. |A cat sleeps.",
        "The plank is 6 ft. |Near it is a hammer.",
        "He is Sammy Hill Jr. |He sings.",
        "The flag is that of the U.S. |It waves.",
    ],
    "clock": [
        "It opens at 9 a.m. on weekdays.",
        "The sign reads 8 A.M. TO 5 P.M. daily. |It is white.",
        "It was 6 a.m. Monday. |Fog lies here.",
        "The clock reads 4 p.m. |Birds sit on it.",
    ],
    "quotation": [
        'The sign reads "NO ENTRY." |The gate is shut.',
        "The word “Love.” is pink. |It is long.",
        'The bubble says "Wow!" in red. |A cat grins.',
        'The label is "Hill Inc. " |The box is red.',
        'A note reads "Keep off. / Thank you." |The grass is long.',
        'A 12" ruler lies here. |The "Bic" pen is new.',
        'They say "Hi!" "Bye!" and "Yes!" in a row. |They glow.',
    ],
    "ellipsis": [
        'The banner says "Soon..." in blue. |It hangs.',
        "The road goes on... and on. |It is grey.",
        "The man waits... |The bus is late.",
        "The man waits… |The bus is late.",
        "A view of Paris ... France?",
        "The dog looks up.. |It wants food.",
    ],
    "address": [
        'The van has "joes. com" on it. |It is red.',
        "The link is https://example.org/a/b |The page is plain.",
        "Visit example.org. |It is green.",
        'It reads "www. cars. net" in red.',
    ],
    "space": [
        "The cat sits.|It is black.",
        'The sign is left.|"EXIT" is on it.',
        "The wall is blue.|A man leans on it.",
        "The dog barks!|The cat runs.",
        "It is from Acme.com and is brown.",
        "The J.R.Hill jersey is blue.",
        "The shelf is full.|Books lie there.",
        "The file photo.JPG is here.",
    ],
    "period": [
        "A statue of Queen Hill |The statue is made of bronze.",
        "A photo of a square |There are many people.",
        "The bear Winnie The Pooh is on it.",
    ],
    "line": [
        "A red barn\n|The barn stands here.",
        "A man in a hat.\n\n|He sits.",
        "A view of the city of\nParis at night. |It is lit.",
        "A cat.\r\n|It sleeps.\r\n\r\n|A dog.",
        "A cat.\xa0\n\n|It sleeps.",
        'A busy street\n|"OPEN" hangs here.',
        "A pole\n\n|(rusty) leans.",
        "A dog runs over the green\nfield with joy. |It is fast.",
    ],
    "list": [
        "It shows:\n|- a dog\n|- a cat",
        "It shows:\n\n|1. **Dog**: It runs. |It is fast.\n|2. **Cat**: It sleeps.",
        "1. The dog is brown. |2. The cat is white.",
        "a) Open it.\n|b) Close it.",
    ],
    "number": [
        "The price is $3.50 here. |It is red.",
        "The scale shows 72.5. |A bag lies there.",
        "The sign says 2.5 miles. |3 cars wait.",
        "The house at No. 10 is red. |It is old.",
    ],
    "lower": [
        "the dog runs. |it is brown. |the sky is blue.",
        "A cup is here. |a spoon lies there.",
    ],
    "exclamation": [
        "What a view! |The sea is blue.",
        "The Yahoo! logo is purple. |It is high.",
        "Is this a lake? |Perhaps it is.",
        'The "Seated Man (?)" is old. |It is stone.',
    ],
    "brackets": [
        "The dog (it is old. It is grey.) sleeps. |The cat sits.",
        "The Church (St. Peter's) is old. |It is stone.",
    ],
    "capitals": [
        "A MAN STANDS IN THE RAIN. |HE HOLDS IT.",
        "VIEW OF ST. PAUL, MINN. FROM THE RIVER.",
        "MRS. HILL AND DR. COLE AT THE U.S. ARMY BASE. |THE TENTS ARE GREEN.",
    ],
    "cjk": [
        "一只猫坐在桌子上。|它是黑色的。",
        "这是什么？|这是一只狗！|很可爱。",
        "空は青い。|海も青い。",
        "写真には「止まれ。」と書かれている。|空は青い。",
    ],
    "odd": [
        'The sign says "GO"., the rest is hidden. |It is dim.',
        "Night. |Indoors.",
        "An old car. |Its paint is faded. |Daytime.",
        "A dog . . .",
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind):
    for marked in KINDS[kind]:
        assert split_sentences(marked.replace("|", "")) == [p.strip() for p in marked.split("|")]


def test_tricky_sentences():
    path = SHARED / "data" / "tricky_sentences.jsonl"
    if not path.exists(): pytest.skip(f"{path} is not here")
    rows = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
    assert len(rows) == 97
    for row in rows:
        pieces, expected = split_sentences(row["text"]), row["expected"]
        assert [" ".join(p.split()) for p in pieces] == [" ".join(p.split()) for p in expected]


@pytest.mark.parametrize("folder", ["docci", "iiw", "documerica"])
def test_real_captions(folder):
    files = sorted((SHARED / "data" / folder).glob("*.jsonl"))
    if not files: pytest.skip(f"{SHARED / 'data' / folder} is not here")
    texts = [json.loads(line)["caption"] for f in files for line in f.read_text(encoding="utf8").splitlines()]
    lengths = []
    for text in texts[::3]:
        pieces = split_sentences(text)
        assert squeeze("".join(pieces)) == squeeze(text)
        assert all(any(c.isalnum() for c in p) for p in pieces)
        lengths += [len(p.split()) for p in pieces]
    assert 10 < np.median(lengths) < 25
