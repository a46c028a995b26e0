"""What the store puts together are the ids of the text, in memory and at rest."""
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from files import rgb

from debias_clip import store as store_module
from debias_clip.captions import split_sentences
from debias_clip.readers import read_records
from debias_clip.records import Column, Records, select, write_samples
from debias_clip.store import TextStore, caption_statistics, text_store, ways_to_read
from debias_clip.tokens import get_tokenizer

SHARED = Path(__file__).parents[2]/"shared"
TEXTS = [["A red box.", "It is on a table.", "The light is dim.", "A cat sleeps behind it."], ["One sentence only."],
         ["A blue ball.", "It rolls."],
         ["Five birds.", "One sings.", "Two fly.", "One is red.", "The last one is asleep, 2.5 m away."]]*4


@pytest.fixture(scope="module")
def tok(): return get_tokenizer("ViT-B-16-quickgelu")


class TwoWays:
    "A tokeniser that reads the first word of a text in its own way, as SigLIP2's does."
    sot, eot = None, 1
    def encode(self, text): return [ord(c) for c in text.strip(".")]
    def encode_sentence(self, text): return [1000 + i if k == 0 else i for k, i in enumerate(self.encode(text))]


def same(a, b):
    "Whether two stores hold the same ids."
    if len(a) != len(b): return False
    rows = [(s.whole(i), s.join(i, [0]), *s.ids(i)) for s in (a, b) for i in range(len(s))]
    return all(np.array_equal(x, y) for x, y in zip(sum(rows[:len(a)], ()), sum(rows[len(a):], ()), strict=True))


def test_the_store_gives_the_ids_of_the_text(tok):
    store = TextStore(TEXTS, tok)
    for i, text in enumerate(TEXTS):
        assert store.sentences(i) == len(text)
        assert store.whole(i).tolist() == tok.encode(" ".join(text))
        assert [ids.tolist() for ids in store.ids(i)] == [tok.encode(s) for s in text]
        assert store.join(i, range(len(text))[::-1]).tolist() == tok.encode(" ".join(text[::-1]))
    assert len(store.tables) == 1 and store.join(0, []).tolist() == []


def test_the_first_sentence_is_written_as_a_beginning():
    store = TextStore([["...", "ab", "c"]], TwoWays())
    assert store.whole(0).tolist() == [97, 98, 1099]          # the first has no ids: the second begins the text
    assert store.join(0, [2, 1]).tolist() == [99, 1097, 98]
    assert store.join(0, [0]).tolist() == []


def test_ways_that_agree_are_one(tok):
    assert [len(ways_to_read(t, j)[0]) for t in (tok, TwoWays()) for j in (" ", ". ")] == [1, 2, 2, 2]


def test_a_store_pickles_small(tok):
    store = TextStore(TEXTS*50, tok)
    again = pickle.loads(pickle.dumps(store))
    assert again.whole(3).tolist() == store.whole(3).tolist()
    ids, _ = store.tables[0]
    assert ids.dtype == np.int32 and len(ids) == 50*sum(len(tok.encode(" ".join(t))) for t in TEXTS)


# captions cut at ". "

def test_period_captions_are_read_as_they_were(tok):
    text = "A dog. It has 2.5 legs. “No.” it says..  It\nleft!\n"
    pieces = split_sentences(text.strip(), "period")
    r = Records("x", np.zeros((1, 2, 2, 3), np.uint8), [pieces], splitter="period")
    assert r.text(pieces) == "A dog. It has 2.5 legs. “No.” it says..  It left!"
    store = text_store(r, tok)
    assert store.whole(0).tolist() == tok.encode(text)
    assert store.join(0, [0]).tolist() == tok.encode("A dog")              # Long-CLIP's short caption has no full stop
    found, first = caption_statistics(store), len(tok.encode("A dog."))
    assert found["tokens"] == len(tok.encode(text)) + 2
    assert found["in sentence 1 %"] == pytest.approx(100*first/len(tok.encode(text)))


def test_period_captions_at_rest_keep_their_white_space(tmp_path, tok):
    texts = [f"{t} {i}" for i, t in enumerate(["A dog. It runs", "One! . Two .  3.\tFour", "A line\n. Another. \n"]*3)]
    rows = [json.dumps(dict(image=f"{i}.png", caption=text)) for i, text in enumerate(texts)]
    (tmp_path/"captions.jsonl").write_text("\n".join(rows))
    for i in range(len(texts)): rgb().save(tmp_path/f"{i}.png")
    r = read_records(tmp_path, splitter="period", cache=tmp_path/"cache")
    store = text_store(r, tok)
    for i, text in enumerate(texts):
        assert r.text(r.captions[i]) == text.strip().replace("\n", " ") and store.whole(i).tolist() == tok.encode(text)
    assert same(store, TextStore(list(r.captions), tok, ". ")) and same(pickle.loads(pickle.dumps(store)), store)
    as_words = Records("x", r.images, r.captions)                          # the same pieces, joined by spaces
    assert not same(text_store(as_words, tok), store)
    assert len(list(r.captions.folder.glob("tokens-*"))) == 2


# at rest

@pytest.fixture
def at_rest(tmp_path):
    write_samples(tmp_path, ((f"{i}.png", text, []) for i, text in enumerate(TEXTS)))
    return Records("x", Column(tmp_path, "image", root=tmp_path), Column(tmp_path, "caption"))


@pytest.mark.parametrize("make,kind", [(lambda tok: tok, np.uint16), (lambda tok: TwoWays(), np.uint16)])
def test_ids_in_files_are_those_in_memory(at_rest, tok, make, kind, monkeypatch):
    tokenizer = make(tok)
    store = text_store(at_rest, tokenizer, workers=2)
    assert same(store, TextStore(TEXTS, tokenizer)) and store.tables[0][0].dtype == kind
    monkeypatch.setattr(store_module, "write_store", lambda *_: pytest.fail("tokenised again"))
    assert same(pickle.loads(pickle.dumps(store)), store) and same(text_store(at_rest, tokenizer), store)
    some = text_store(select(at_rest, [5, 3, 3]), tokenizer)
    assert same(some, TextStore([TEXTS[i] for i in (5, 3, 3)], tokenizer))
    assert len(list(at_rest.captions.folder.glob("tokens-*"))) == 1
    assert len(pickle.dumps(store)) < len(pickle.dumps(tokenizer)) + 2000


def test_large_ids_are_kept_whole(at_rest):
    class Large(TwoWays):
        def encode(self, text): return [70_000 + i for i in super().encode(text)]
    store = text_store(at_rest, Large())
    assert store.tables[0][0].dtype == np.int32 and same(store, TextStore(TEXTS, Large()))


def test_other_tokenisers_have_other_files(at_rest, tok):
    stores = [text_store(at_rest, t) for t in (tok, TwoWays(), get_tokenizer("scenes-clip"), tok)]
    assert same(stores[0], stores[-1]) and not same(stores[0], stores[1])
    assert len(list(at_rest.captions.folder.glob("tokens-*"))) >= 2


def test_a_stopped_build_leaves_nothing_that_looks_whole(at_rest, tok, monkeypatch):
    def stop(*_): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(store_module, "narrow", stop)
        with pytest.raises(KeyboardInterrupt): text_store(at_rest, tok)
    assert not list(at_rest.captions.folder.glob("tokens-*"))
    assert same(text_store(at_rest, tok), TextStore(TEXTS, tok))


def test_builds_at_the_same_time_do_no_harm(at_rest, tok, monkeypatch):
    builds, write = [], store_module.write_store
    monkeypatch.setattr(store_module, "write_store", lambda *args: builds.append(1) or write(*args))
    with ThreadPoolExecutor(4) as pool: stores = list(pool.map(lambda _: text_store(at_rest, tok), range(4)))
    assert all(same(s, TextStore(TEXTS, tok)) for s in stores) and len(builds) == 1


@pytest.mark.skipif(not (SHARED/"data"/"docci").is_dir(), reason="../shared/data is not beside this checkout")
def test_docci_statistics_are_the_published_ones(tok):
    rows = map(json.loads, (SHARED/"data/docci/captions.jsonl").read_text().splitlines())
    texts = [row["caption"] for row in rows if row["id"].startswith("test_")]
    found = caption_statistics(TextStore([split_sentences(text) for text in texts], tok))
    assert found["captions"] == 5000 and found["median"] == 132 and found["tokens"] == pytest.approx(141.5, abs=.1)
    assert found["> 77 %"] == pytest.approx(94.4, abs=.05) and found["> 248 %"] == pytest.approx(3.76, abs=.005)
    assert 15 < found["in sentence 1 %"] < 22 and found["one sentence"] <= 2
