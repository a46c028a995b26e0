"""What a row of tokens must be in each family, against open_clip's own tokenisers and tiny stand-ins of SigLIP's and SigLIP2's."""
import pickle
import random
import sys
import time

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Raw, decoders, models, normalizers, pre_tokenizers, processors

from debias_clip.captions import split_sentences
from debias_clip.data import Records, TextStore, TextTable, text_store, write_tables
from debias_clip.tokens import ASSETS, Tokenizer, get_tokenizer, model_config, stretched_length, text_family

WORDS = 'a an the small large red green blue circle square is at in on top of left right there with and two dog redbrick house'.split()
TEXTS = ['A small red circle.', '', ' ', 'x', "It's a red-brick house, isn't it?", 'two “blue” squares &amp; a dog', '赤い円と青い四角。', 'Привет, мир!', '🙂 emoji',
         'a\nb\tc', 'word ' * 300, '<|endoftext|> <start> </s> <pad> <eos>', 'ＦＵＬＬ width', 'a' * 500]


def save(raw, folder, **config):
    from transformers import PreTrainedTokenizerFast
    PreTrainedTokenizerFast(tokenizer_object=raw, **config).save_pretrained(folder)
    return folder


@pytest.fixture(scope='session')
def siglip_folder(tmp_path_factory):
    "SigLIP's kind (T5): unigram pieces, every word behind ▁, pad = eos = 1."
    letters = [(c, -9.) for c in '▁abcdefghijklmnopqrstuvwxyz']
    vocab = [('<pad>', 0.), ('</s>', 0.), ('<unk>', 0.)] + letters + [('▁' + w, -3.) for w in WORDS if w != 'a'] + [('▁a', -2.)]
    raw = Raw(models.Unigram(vocab, unk_id=2))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.post_processor = processors.TemplateProcessing(single='$A </s>', special_tokens=[('</s>', 1)])
    return save(raw, tmp_path_factory.mktemp('siglip'), eos_token='</s>', pad_token='</s>', unk_token='<unk>')


@pytest.fixture(scope='session')
def siglip2_folder(tmp_path_factory):
    "SigLIP2's kind (Gemma): byte-pair pieces, spaces become ▁ and the first word has none, pad 0, eos 1."
    vocab, merges = {'<pad>': 0, '<eos>': 1, '<bos>': 2, '<unk>': 3}, []
    for c in '▁abcdefghijklmnopqrstuvwxyz': vocab.setdefault(c, len(vocab))
    for word in [p + w for w in WORDS for p in ('', '▁')]:
        for k in range(2, len(word) + 1):
            if word[:k] not in vocab: vocab[word[:k]] = len(vocab); merges.append((word[:k - 1], word[k - 1]))
    raw = Raw(models.BPE(vocab, merges, unk_token='<unk>', fuse_unk=True))
    raw.normalizer = normalizers.Replace(' ', '▁')
    raw.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()])
    raw.post_processor = processors.TemplateProcessing(single='$A <eos>', special_tokens=[('<eos>', 1)])
    return save(raw, tmp_path_factory.mktemp('siglip2'), eos_token='<eos>', pad_token='<pad>', unk_token='<unk>', bos_token='<bos>')


@pytest.fixture(scope='session', params=['clip', 'scenes-siglip', 'siglip', 'siglip2'])
def pair(request, siglip_folder, siglip2_folder):
    "(our tokeniser at 24 tokens, open_clip's own)"
    hf = lambda folder: open_clip.tokenizer.HFTokenizer(str(folder), context_length=24, clean='canonicalize')
    if request.param == 'clip': return get_tokenizer('ViT-B-16-quickgelu', 24), open_clip.get_tokenizer('ViT-B-16-quickgelu', context_length=24)
    if request.param == 'scenes-siglip': return get_tokenizer('scenes-siglip', 24), hf(ASSETS/'tokenizers'/'scenes-siglip')
    if request.param == 'siglip': return get_tokenizer('ViT-B-16-SigLIP', 24, siglip_folder), hf(siglip_folder)
    return get_tokenizer('ViT-B-16-SigLIP2', 24, siglip2_folder), hf(siglip2_folder)


def test_rows_are_open_clips_own(pair):
    ours, theirs = pair
    got = ours(TEXTS)
    assert got.dtype == torch.int64 and torch.equal(got, theirs(TEXTS))
    assert torch.equal(ours(TEXTS[0]), theirs(TEXTS[0]))  # one string is one row


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_gives_open_clips_row(text):
    ours, theirs = get_clip()
    if '<end_of_text>' in theirs.clean_fn(text) or '<start_of_text>' in theirs.clean_fn(text): return
    assert torch.equal(ours(text), theirs(text))


def get_clip(cache=[]):
    if not cache: cache[:] = get_tokenizer('ViT-B-16', 32), open_clip.get_tokenizer('ViT-B-16', context_length=32)
    return cache


def test_joined_sentences_are_the_text(pair):
    tok, rng = pair[0], random.Random(0)
    sentences = ['A small red circle is at the top.', "There isn't a red-brick house!", 'Below: two “blue” squares &amp; a dog.', '赤い円。', '', '...', 'dog', 'a']
    for _ in range(60):
        part = rng.sample(sentences, rng.randint(0, 6))
        assert list(tok.join([np.array(tok.encode_sentence(s), np.int32) for s in part])) == tok.encode(' '.join(part)), part


ODD = ["A “red” dog", 'left of it "here"', 'It is 2.5', '12', 'etc..', '...', 'dog.', '.', '!', 'why?', '🙂', 'a 🙂', "'", '"', '–', '赤い円。', '&amp', '&', 'R&amp;D', '<end_of_text>', 'A', 'a',
       ' dog', 'dog ', '\tred', 'x_y', '(a)', "it's", 'Straße', 'ΟΔΟΣ', '\u200b dog', 'no.', '1.', 'a . b', '’', '¾', '￥', '·']
PIECES = st.lists(st.one_of(st.sampled_from(ODD), st.text("ab .,!?\"'“”()12🙂円-_&;\t", min_size=1, max_size=8).filter(str.strip)), min_size=1, max_size=5)                # no é: ftfy takes it, beside a curly mark, for text in the wrong encoding or not by looking at the whole text


@pytest.mark.parametrize('joiner', [' ', '. '])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(pieces=PIECES, data=st.data())
def test_a_store_reads_any_pieces_as_their_text(pair, joiner, pieces, data):
    tok = pair[0]
    store = TextStore([['dog'], pieces, ['dog']], tok, joiner)
    assert store.whole(1).tolist() == tok.encode(joiner.join(pieces)) == np.concatenate(store.ids(1)).tolist()
    picks = data.draw(st.permutations(range(len(pieces))))[:data.draw(st.integers(1, len(pieces)))]
    assert store.join(1, picks).tolist() == tok.encode(joiner.join(pieces[k] for k in picks))


def test_every_pair_of_odd_pieces(pair, tmp_path):
    tok = pair[0]
    write_tables(tmp_path, (([a, b],) for a in ODD for b in ODD), ['caption'])
    for joiner in (' ', '. '):
        held = TextStore([[a, b] for a in ODD for b in ODD], tok, joiner)
        filed = text_store(TextTable(tmp_path, 'caption'), tok, workers=1, joiner=joiner)
        for i, text in enumerate(joiner.join((a, b)) for a in ODD for b in ODD):
            assert held.whole(i).tolist() == filed.whole(i).tolist() == tok.encode(text), text
            assert held.join(i, [1, 0]).tolist() == filed.join(i, [1, 0]).tolist() == tok.encode(joiner.join((ODD[i % len(ODD)], ODD[i//len(ODD)])))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from(['A dog', '. ', '.', ' ', '\n', 'two', '!', '"', '2.5', '🙂', '.. ']), min_size=1, max_size=12).map(''.join))
def test_the_period_splitter_gives_the_caption_back(pair, text):
    pieces = split_sentences(text.strip(), 'period')
    if not all(p.strip() for p in text.strip().replace('\n', ' ').split('. ')): return   # a blank piece is dropped: nothing stands between two of its stops
    tok, r = pair[0], Records('x', ['x.jpg'], [pieces], splitter='period')
    assert r.text(pieces) == text.strip().replace('\n', ' ')
    assert TextStore(r.captions, tok, r.joiner).whole(0).tolist() == tok.encode(text)


def test_forms_that_agree_are_kept_once(pair):
    tok = pair[0]
    two = tok.encode('a b') != tok.encode_sentence('a b')
    stops = tok.encode('a.') != tok.encode('a')
    assert stops == (tok.family == 'clip')                                # SigLIP's cleaning takes full stops away
    assert [len(TextStore([['a', 'b']], tok, joiner).tables) for joiner in (' ', '. ')] == [1 + two, (1 + two)*(1 + stops)]


def test_special_ids(siglip_folder, siglip2_folder):
    special = lambda t: (t.sot, t.eot, t.pad, t.family)
    assert special(get_tokenizer('ViT-L-14-336-quickgelu')) == (49406, 49407, 0, 'clip')
    assert special(get_tokenizer('ViT-B-16-SigLIP', path=siglip_folder)) == (None, 1, 1, 'siglip')
    assert special(get_tokenizer('ViT-B-16-SigLIP2', path=siglip2_folder)) == (None, 1, 0, 'siglip')
    assert special(get_tokenizer('scenes-siglip')) == (None, 1, 1, 'siglip')


def test_default_length_is_the_stretched_one(siglip_folder):
    assert get_tokenizer('ViT-B-16')('x').shape == (1, 248)
    assert get_tokenizer('ViT-B-16-SigLIP', path=siglip_folder)('x').shape == (1, 196)
    assert stretched_length(32, 8) == 104
    for keep in (77, 100, -1):
        with pytest.raises(ValueError, match='keep'): stretched_length(77, keep)


@pytest.mark.parametrize('n_pre', [0, 1, 5, 'all'])
def test_prefix_pads_move_the_words_and_nothing_else(pair, n_pre):
    tok = pair[0]
    ids = tok.encode('a small red circle')
    n = int(tok.free(len(ids))) if n_pre == 'all' else n_pre
    row, lead = tok.assemble([ids], n)[0].tolist(), [] if tok.sot is None else [tok.sot]
    assert row == lead + [tok.pad] * n + ids + [tok.eot] + [tok.pad] * (tok.context_length - len(lead) - n - len(ids) - 1)
    if tok.family == 'clip': assert int(np.argmax(row)) == 1 + n + len(ids)  # where the tower pools


def test_one_n_pre_a_caption_and_too_many_refused(pair):
    tok = pair[0]
    texts, ids = ['a small red circle', '', 'a dog'], None
    ids = [tok.encode(t) for t in texts]
    free = [int(tok.free(len(i))) for i in ids]
    rows = tok(texts, n_pre=free)
    assert all(torch.equal(rows[i], tok(t, n_pre=free[i])[0]) for i, t in enumerate(texts))
    for bad in (-1, [0, 0, free[2] + 1], max(free) + 1):
        with pytest.raises(ValueError, match='free pads'): tok(texts, n_pre=bad)
    with pytest.raises(ValueError): tok(texts, n_pre=[1, 2])


@pytest.mark.parametrize('text', ['<end_of_text>', 'a sign <end_of_text> here', 'A <START_OF_TEXT> b', '&lt;end_of_text&gt; x', 'x<end_of_text>y'])
def test_a_literal_end_mark_is_only_text(text):
    tok = get_tokenizer('ViT-B-16-quickgelu', 32)
    ids = tok.encode(text)
    assert ids and not {tok.sot, tok.eot} & set(ids)
    row = tok(text)[0]
    assert (row == tok.eot).sum() == 1 and row.argmax() == len(ids) + 1
    assert torch.equal(row, tok(text.replace('<', '< ').replace('&lt;', '< '))[0])  # the characters as they are, one by one


def test_truncation_keeps_the_end_mark_and_is_counted(pair):
    tok, room = pair[0], pair[0].room
    tok.reset()
    rows = tok.assemble([list(range(5, 5 + n)) for n in (3, room, room + 1, room + 40)])
    assert (rows[1:, -1] == tok.eot).all() and (tok.seen, tok.truncated, tok.lost, tok.longest) == (4, 2, 41, room + 40)
    assert '2 of 4 captions' in tok.report() and '41 tokens' in tok.report()
    tok.reset()
    assert tok.truncated == 0 and '0 of 0' in tok.report()


def test_ten_thousand_words(pair):
    row = pair[0](' '.join(['red'] * 10_000))
    assert row.shape == (1, 24) and row[0, -1] == pair[0].eot and pair[0].truncated


def test_empty_caption():
    tok = get_tokenizer('ViT-B-16')
    assert tok('')[0, :3].tolist() == [tok.sot, tok.eot, 0] and tok([]).shape == (0, 248)
    assert tok('', n_pre=246)[0, -1] == tok.eot
    with pytest.raises(ValueError, match='room'): Tokenizer(None, 1, 2, 0, 2, 'clip')


def test_a_tokeniser_travels_to_a_worker(pair):
    again = pickle.loads(pickle.dumps(pair[0]))
    assert torch.equal(again(TEXTS), pair[0](TEXTS))


def test_unknown_backbones_and_towers_are_named():
    with pytest.raises(ValueError, match='scenes-clip'): model_config('scene-clip')
    for name in ('roberta-ViT-B-32', 'coca_ViT-B-32', 'ViT-H-14-CLIPA'):
        with pytest.raises(ValueError, match=name): text_family(name)
    assert text_family('ViT-SO400M-16-SigLIP2-256') == 'siglip' and text_family('RN50-quickgelu') == 'clip'


@pytest.mark.parametrize('damage', [dict(model={}), dict(added_tokens=None), None])
def test_a_damaged_cache_is_named(monkeypatch, tmp_path, damage):
    import json
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    whole = open_clip.tokenizer.HFTokenizer
    def cached(source, **kwargs):                                         # the hub's cache of this name is this folder
        return whole(str(tmp_path) if source == 'timm/ViT-B-16-SigLIP2' else source, **kwargs)
    monkeypatch.setattr(open_clip.tokenizer, 'HFTokenizer', cached)
    for file in (ASSETS/'tokenizers'/'scenes-siglip').iterdir(): (tmp_path/file.name).write_bytes(file.read_bytes())
    raw = (tmp_path/'tokenizer.json').read_text()
    (tmp_path/'tokenizer.json').write_text(raw[:500] if damage is None else json.dumps(json.loads(raw) | damage))
    with pytest.raises(ValueError, match='(?s)ViT-B-16-SigLIP2.*neither in the local cache.*cache: .*path=FOLDER'): get_tokenizer('ViT-B-16-SigLIP2')
    (tmp_path/'tokenizer.json').write_text(raw)
    assert get_tokenizer('ViT-B-16-SigLIP2', 16)('a').shape == (1, 16)


def test_offline_is_said_soon_and_names_both_ways(monkeypatch, tmp_path):
    from huggingface_hub import constants
    for key, value in dict(HF_HUB_OFFLINE=False, ENDPOINT='http://127.0.0.1:9').items(): monkeypatch.setattr(constants, key, value)
    start = time.perf_counter()
    with pytest.raises(ValueError, match='timm/ViT-B-16-SigLIP2.*(?s:.)*path=FOLDER'): get_tokenizer('ViT-B-16-SigLIP2')
    assert time.perf_counter() - start < 20
    with pytest.raises(ValueError, match='tokenizer.json'): get_tokenizer('ViT-B-16-SigLIP2', path=tmp_path/'none')
    with pytest.raises(ValueError, match='tokenizer.json'): get_tokenizer('ViT-B-16-SigLIP2', path=tmp_path)
    with pytest.raises(ValueError, match='byte-pair'): get_tokenizer('ViT-B-16', path=tmp_path)


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    with pytest.raises(ImportError, match=r'debias_clip\[hf\]'): get_tokenizer('scenes-siglip')
    assert get_tokenizer('scenes-clip', 16)('a').shape == (1, 16)


def test_bytes_write_any_text():
    tok = get_tokenizer('scenes-siglip', 64)
    raw = tok._words.hf.tokenizer
    for text in ('赤い円', '🙂', 'ñandú'): assert raw.decode(tok.encode(text)).strip() == text and raw.unk_token_id not in tok.encode(text)
