"""What a row of tokens must be in each family, against open_clip's own tokenisers and tiny stand-ins of SigLIP's."""
import json
import pickle
import sys
import time

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_clip.captions import split_sentences
from debias_clip.families import ASSETS, FAMILIES
from debias_clip.models import create_model
from debias_clip.records import Column, Records, write_samples
from debias_clip.store import TextStore, text_store
from debias_clip.tokens import Tokenizer, get_tokenizer, tokenizer_of

TEXTS = ["A small red circle.", "", " ", "x", "It's a red-brick house, isn't it?", "two “blue” squares &amp; a dog",
         "赤い円と青い四角。", "Привет, мир!", "🙂 emoji", "a\nb\tc", "word "*300, "ＦＵＬＬ width", "a"*500,
         "<|endoftext|> <start> </s> <pad> <eos>"]


@pytest.fixture(scope="session", params=["clip", "scenes-siglip", "siglip", "siglip2"])
def pair(request, siglip_pieces, siglip2_pieces):
    "(our tokeniser at 24 tokens, open_clip's own)"
    if request.param == "clip":
        theirs = open_clip.get_tokenizer("ViT-B-16-quickgelu", context_length=24)
        return get_tokenizer("ViT-B-16-quickgelu", 24), theirs
    backbone, folder = {
        "scenes-siglip": ("scenes-siglip", ASSETS/"tokenizers"/"scenes-siglip"),
        "siglip": ("ViT-B-16-SigLIP", siglip_pieces),
        "siglip2": ("ViT-B-16-SigLIP2", siglip2_pieces),
    }[request.param]
    theirs = open_clip.tokenizer.HFTokenizer(str(folder), context_length=24, clean="canonicalize")
    return get_tokenizer(backbone, 24, folder), theirs


# rows

def test_rows_are_open_clips_own(pair):
    ours, theirs = pair
    rows = ours(TEXTS)
    assert rows.dtype == torch.int64 and torch.equal(rows, theirs(TEXTS))
    assert torch.equal(ours(TEXTS[0]), theirs(TEXTS[0]))   # one string is one row


@pytest.fixture(scope="module")
def clip_pair(): return get_tokenizer("ViT-B-16", 32), open_clip.get_tokenizer("ViT-B-16", context_length=32)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_gives_open_clips_row(clip_pair, text):
    ours, theirs = clip_pair
    if "<end_of_text>" in theirs.clean_fn(text) or "<start_of_text>" in theirs.clean_fn(text): return
    assert torch.equal(ours(text), theirs(text))


def test_marks(siglip_pieces, siglip2_pieces):
    def marks(tok): return tok.sot, tok.eot, tok.pad, tok.family.name
    assert marks(get_tokenizer("ViT-L-14-336-quickgelu")) == (49406, 49407, 0, "clip")
    assert marks(get_tokenizer("ViT-B-16-SigLIP", path=siglip_pieces)) == (None, 1, 1, "siglip")
    assert marks(get_tokenizer("ViT-B-16-SigLIP2", path=siglip2_pieces)) == (None, 1, 0, "siglip")
    assert marks(get_tokenizer("scenes-siglip")) == (None, 1, 1, "siglip")


def test_default_length_is_the_stretched_one(siglip_pieces):
    assert get_tokenizer("ViT-B-16")("x").shape == (1, 248)
    assert get_tokenizer("ViT-B-16-SigLIP", path=siglip_pieces)("x").shape == (1, 196)
    with torch.device("meta"): model = create_model("scenes-siglip", context_length=50, keep=8)
    tok = tokenizer_of(model)
    assert tok("x").shape == (1, 50) and tok.family == model.family


@pytest.mark.parametrize("n_pre", [0, 1, 5, "all"])
def test_prefix_pads_move_the_words_and_nothing_else(pair, n_pre):
    tok = pair[0]
    ids = tok.encode("a small red circle")
    n_pre = int(tok.free(len(ids))) if n_pre == "all" else n_pre
    row, start = tok.assemble([ids], n_pre)[0].tolist(), [] if tok.sot is None else [tok.sot]
    behind = tok.context_length - len(start) - n_pre - len(ids) - 1
    assert row == start + [tok.pad]*n_pre + ids + [tok.eot] + [tok.pad]*behind
    if tok.family.pooling == "argmax": assert int(np.argmax(row)) == 1 + n_pre + len(ids)


def test_one_n_pre_a_caption_and_too_many_refused(pair):
    tok, texts = pair[0], ["a small red circle", "", "a dog"]
    free = [int(tok.free(len(tok.encode(t)))) for t in texts]
    rows = tok(texts, n_pre=free)
    for row, text, n in zip(rows, texts, free, strict=True): assert torch.equal(row, tok(text, n_pre=n)[0])
    for bad in (-1, [0, 0, free[2] + 1], max(free) + 1):
        with pytest.raises(ValueError, match="free pads"): tok(texts, n_pre=bad)
    with pytest.raises(ValueError): tok(texts, n_pre=[1, 2])


@pytest.mark.parametrize("text", ["<end_of_text>", "a sign <end_of_text> here", "A <START_OF_TEXT> b",
                                  "&lt;end_of_text&gt; x", "x<end_of_text>y"])
def test_a_literal_end_mark_is_only_text(text):
    tok = get_tokenizer("ViT-B-16-quickgelu", 32)
    ids, row = tok.encode(text), tok(text)[0]
    assert ids and not {tok.sot, tok.eot} & set(ids)
    assert (row == tok.eot).sum() == 1 and row.argmax() == len(ids) + 1
    one_by_one = text.replace("<", "< ").replace("&lt;", "< ")
    assert torch.equal(row, tok(one_by_one)[0])


def test_truncation_keeps_the_end_mark_and_is_counted(pair):
    tok, room = pair[0], pair[0].room
    tok.reset()
    rows = tok.assemble([list(range(5, 5 + n)) for n in (3, room, room + 1, room + 40)])
    assert (rows[1:, -1] == tok.eot).all()
    assert (tok.seen, tok.truncated, tok.lost, tok.longest) == (4, 2, 41, room + 40)
    assert "2 of 4 captions" in tok.report() and "41 tokens" in tok.report()
    tok.reset()
    assert tok.truncated == 0 and "0 of 0" in tok.report()


def test_ten_thousand_words(pair):
    tok = pair[0]
    row = tok(" ".join(["red"]*10_000))
    assert row.shape == (1, 24) and row[0, -1] == tok.eot and tok.truncated


def test_empty_caption():
    tok = get_tokenizer("ViT-B-16")
    assert tok("")[0, :3].tolist() == [tok.sot, tok.eot, 0] and tok([]).shape == (0, 248)
    assert tok("", n_pre=246)[0, -1] == tok.eot
    with pytest.raises(ValueError, match="room"): Tokenizer(tok.words, 2, FAMILIES["clip"])


def test_a_tokeniser_travels_to_a_worker(pair):
    again = pickle.loads(pickle.dumps(pair[0]))
    assert torch.equal(again(TEXTS), pair[0](TEXTS)) and again.family == pair[0].family


def test_readable_tokens_spell_the_text(pair):
    tok, text = pair[0], "a small red circle"
    spelt = ""
    for token, space in map(tok.words.readable, tok.encode(text)):
        spelt += {"before": f" {token}", "after": f"{token} ", "": token}[space]
    assert spelt.replace("·", "").split() == text.split()   # "·" is a space that stands alone


# sentences and the text made of them

ODD = ["A “red” dog", 'left of it "here"', "It is 2.5", "12", "etc..", "...", "dog.", ".", "!", "why?", "🙂", "a 🙂",
       "'", '"', "–", "赤い円。", "&amp", "&", "R&amp;D", "<end_of_text>", "A", "a", " dog", "dog ", "\tred", "x_y",
       "(a)", "it's", "Straße", "ΟΔΟΣ", "\u200b dog", "no.", "1.", "a . b", "’", "¾", "￥", "·"]
# no é: beside a curly mark, ftfy takes it for text in the wrong encoding or not by looking at the whole text
CHARACTERS = st.text("ab .,!?\"'“”()12🙂円-_&;\t", min_size=1, max_size=8).filter(str.strip)
PIECES = st.lists(st.one_of(st.sampled_from(ODD), CHARACTERS), min_size=1, max_size=5)


@pytest.mark.parametrize("joiner", [" ", ". "])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(pieces=PIECES, data=st.data())
def test_a_store_reads_any_pieces_as_their_text(pair, joiner, pieces, data):
    tok = pair[0]
    store = TextStore([["dog"], pieces, ["dog"]], tok, joiner)
    whole = tok.encode(joiner.join(pieces))
    assert store.whole(1).tolist() == whole == np.concatenate(store.ids(1)).tolist()
    order = data.draw(st.permutations(range(len(pieces))))
    some = order[:data.draw(st.integers(1, len(pieces)))]
    assert store.join(1, some).tolist() == tok.encode(joiner.join(pieces[k] for k in some))


@pytest.mark.parametrize("splitter", ["default", "period"])
def test_every_pair_of_odd_pieces(pair, tmp_path, splitter):
    tok, captions = pair[0], [[a, b] for a in ODD for b in ODD]
    write_samples(tmp_path, ((f"{i}.png", caption, []) for i, caption in enumerate(captions)))
    records = Records("x", Column(tmp_path, "image", root=tmp_path), Column(tmp_path, "caption"), splitter=splitter)
    held, at_rest = TextStore(captions, tok, records.joiner), text_store(records, tok, workers=1)
    for i, (a, b) in enumerate(captions):
        as_written, turned = tok.encode(records.joiner.join((a, b))), tok.encode(records.joiner.join((b, a)))
        for store in (held, at_rest):
            assert store.whole(i).tolist() == as_written, (a, b)
            assert store.join(i, [1, 0]).tolist() == turned, (a, b)


BITS = ["A dog", ". ", ".", " ", "\n", "two", "!", '"', "2.5", "🙂", ".. "]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from(BITS), min_size=1, max_size=12).map("".join))
def test_the_period_splitter_gives_the_caption_back(pair, text):
    text = text.strip().replace("\n", " ")
    pieces = split_sentences(text, "period")
    if not all(p.strip() for p in text.split(". ")): return   # a blank piece is dropped with its stop
    records = Records("x", ["x.jpg"], [pieces], splitter="period")
    assert records.text(pieces) == text
    assert TextStore(records.captions, pair[0], records.joiner).whole(0).tolist() == pair[0].encode(text)


def test_ways_of_reading_that_agree_are_kept_once(pair):
    tok = pair[0]
    two_ways = tok.encode("a b") != tok.encode_sentence("a b")
    stops = tok.encode("a.") != tok.encode("a")
    assert stops == (tok.family.name == "clip")               # SigLIP's cleaning takes full stops away
    tables = [len(TextStore([["a", "b"]], tok, joiner).tables) for joiner in (" ", ". ")]
    assert tables == [1 + two_ways, (1 + two_ways)*(1 + stops)]


# where tokenisers come from

@pytest.mark.parametrize("damage", [{"model": {}}, {"added_tokens": None}, None])
def test_a_damaged_cache_is_named(monkeypatch, tmp_path, damage):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    whole = open_clip.tokenizer.HFTokenizer
    def cached(source, **options):                            # the hub's cache of this name is this folder
        return whole(str(tmp_path) if source == "timm/ViT-B-16-SigLIP2" else source, **options)
    monkeypatch.setattr(open_clip.tokenizer, "HFTokenizer", cached)
    for file in (ASSETS/"tokenizers"/"scenes-siglip").iterdir(): (tmp_path/file.name).write_bytes(file.read_bytes())
    raw = (tmp_path/"tokenizer.json").read_text()
    (tmp_path/"tokenizer.json").write_text(raw[:500] if damage is None else json.dumps(json.loads(raw) | damage))
    with pytest.raises(ValueError, match="(?s)ViT-B-16-SigLIP2.*neither in the local cache.*path=FOLDER"):
        get_tokenizer("ViT-B-16-SigLIP2")
    (tmp_path/"tokenizer.json").write_text(raw)
    assert get_tokenizer("ViT-B-16-SigLIP2", 16)("a").shape == (1, 16)


def test_offline_is_said_soon_and_names_both_ways(monkeypatch, tmp_path):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    with pytest.raises(ValueError, match="timm/ViT-B-16-SigLIP2.*(?s:.)*path=FOLDER"): get_tokenizer("ViT-B-16-SigLIP2")
    assert time.perf_counter() - start < 20
    for folder in (tmp_path/"none", tmp_path):
        with pytest.raises(ValueError, match="tokenizer.json"): get_tokenizer("ViT-B-16-SigLIP2", path=folder)
    with pytest.raises(ValueError, match="byte-pair"): get_tokenizer("ViT-B-16", path=tmp_path)


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"debias_clip\[hf\]"): get_tokenizer("scenes-siglip")
    assert get_tokenizer("scenes-clip", 16)("a").shape == (1, 16)


def test_bytes_write_any_text():
    tok = get_tokenizer("scenes-siglip", 64)
    raw = tok.words.hf.tokenizer
    for text in ("赤い円", "🙂", "ñandú"):
        ids = tok.encode(text)
        assert raw.decode(ids).strip() == text and raw.unk_token_id not in ids
