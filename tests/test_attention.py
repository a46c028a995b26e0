"""Attention is that of the very computation that ends in the features; averages are of what they say."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from debias_clip.attention import (
    END,
    PAD,
    START,
    Reading,
    by_layer,
    by_position,
    by_sentence,
    heat_strip,
    pooled_attention,
    read_captions,
    token_strip,
)
from debias_clip.authors import scene_records
from debias_clip.captions import split_sentences
from debias_clip.models import create_model, encode_texts
from debias_clip.tokens import get_tokenizer

@pytest.fixture(scope="module", params=["scenes-clip", "scenes-gelu", "scenes-siglip"])
def tower(request):
    torch.manual_seed(0)
    model = create_model(request.param, context_length=88, keep=8)
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)  # biases too, which start at zero
    return model.eval(), get_tokenizer(request.param, 88)


@pytest.fixture(scope="module")
def captions():
    return [list(c) for c in scene_records("val", n=12).captions]


def rows(tok, captions):
    "As written, pushed back by pads, cut by the context, of one word, and full to the last position."
    texts = [" ".join(c) for c in captions]
    full = " ".join(["red"] * tok.room)
    return torch.cat([tok(texts), tok(texts[:3], n_pre=5), tok([" ".join(texts), "red", full])])


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_features_are_the_models_own(tower, captions, batch_size):
    model, tok = tower
    tokens = rows(tok, captions)
    weights, features = pooled_attention(model, tokens, batch_size)
    with torch.inference_mode():
        own = model.encode_text(tokens)
    assert (features - own).abs().max() < 1e-5 and (features - encode_texts(model, tokens)).abs().max() < 1e-5
    assert weights.shape == (len(tokens), 3, 88) and (weights >= 0).all() and (weights.sum(-1) - 1).abs().max() < 1e-5


def test_weights_are_those_of_pytorchs_attention(tower, captions):
    "The last block's weights, from `nn.MultiheadAttention` itself, on what reaches it."
    model, tok = tower
    tokens, seen = rows(tok, captions), {}
    text = getattr(model, "text", model)
    block = text.transformer.resblocks[-1]
    hook = block.ln_1.register_forward_hook(lambda _, __, out: seen.update(h=out))
    try:
        with torch.inference_mode():
            model.encode_text(tokens)
    finally:
        hook.remove()
    with torch.inference_mode():
        _, want = block.attn(
            seen["h"], seen["h"], seen["h"], attn_mask=text.attn_mask, need_weights=True, average_attn_weights=False
        )
    at = tokens.argmax(-1) if tok.family.name == "clip" else torch.full((len(tokens),), 87)
    weights, _ = pooled_attention(model, tokens)
    assert (weights[:, -1] - want[torch.arange(len(tokens)), :, at].mean(1)).abs().max() < 1e-5


def test_nothing_after_the_pooled_token_of_a_causal_tower(tower, captions):
    model, tok = tower
    tokens = rows(tok, captions)
    weights, _ = pooled_attention(model, tokens)
    after = torch.arange(88) > tokens.argmax(-1)[:, None]
    if tok.family.name == "clip":
        assert (weights * after[:, None]).sum() == 0
    else:
        assert (weights > 0).all()  # bidirectional: the pads are read


def test_the_mode_stays(tower, captions):
    model, tok = tower
    model.train()
    pooled_attention(model, tok(["A red ring."]))
    assert model.training
    model.eval()


def test_parts_of_captions(tower, captions):
    model, tok = tower
    cut = tok.truncated
    read = read_captions(model, tok, captions + [captions[0] * 9], batch_size=4)
    lengths = [len(tok.encode(" ".join(c))) for c in captions + [captions[0] * 9]]
    assert read.truncated == tok.truncated - cut == sum(n > tok.room for n in lengths) >= 1 and len(read.part) == 13
    for part, caption, length in zip(read.part, captions + [captions[0] * 9], lengths, strict=False):
        n = min(length, tok.room)
        lead = 0 if tok.sot is None else 1
        assert (
            (part[:lead] == START).all()
            and (part[lead : lead + n] >= 0).all()
            and part[lead + n] == END
            and (part[lead + n + 1 :] == PAD).all()
        )
        words = part[lead : lead + n]
        assert (np.diff(words) >= 0).all() and words[0] == 0
        for s in range(len(caption)):
            want = len(tok.encode(" ".join(caption[: s + 1])))
            assert (words <= s).sum() == min(want, n)


def test_sentences_of_the_period_splitter(tower, captions):
    "They are joined by '. ', whose stop belongs to one of the two."
    model, tok = tower
    text = " ".join(captions[0])
    pieces = split_sentences(text, "period")
    read = read_captions(model, tok, [pieces], ". ")
    assert (read.part >= 0).sum() == len(tok.encode(text)) and set(read.part[read.part >= 0]) == set(range(len(pieces)))


def test_an_exclamation_mark_is_no_pad():
    "CLIP's pad has the id of '!'."
    model, tok = create_model("scenes-clip", context_length=88, keep=8), get_tokenizer("scenes-clip", 88)
    assert 0 == tok.pad and tok.words.bpe.encoder["!"] == tok.pad
    read = read_captions(model, tok, [["Look! A ring!", "Red!"]])
    assert (read.part >= 0).sum() == len(tok.encode("Look! A ring! Red!"))


def reading(*weights, part):
    return Reading(
        torch.tensor(weights)[:, None], np.array([part] * len(weights), np.int16), torch.zeros(len(weights), 1), 0
    )


def test_averages_by_hand():
    made = reading(
        [0.4, 0.1, 0.1, 0.1, 0.1, 0.2, 0.0], [0.4, 0.4, 0.0, 0.0, 0.0, 0.2, 0.0], part=[START, 0, 0, 0, 1, END, PAD]
    )
    position, sentence, layer = by_position(made), by_sentence(made), by_layer(made)
    assert (
        position.position.tolist() == [1, 2, 3, 4]
        and np.allclose(position.value, [2.5, 0.5, 0.5, 0.5])
    )
    assert (
        sentence.sentence.tolist() == [1, 2]
        and np.allclose(sentence.value, [7 / 6, 0.5])
        and (sentence.n == 2).all()
    )
    assert np.allclose(layer[["start", "words", "end", "pads"]], [[40, 40, 20, 0]]) and np.allclose(
        layer.centre, [0.25]
    )


def slowly(read, layer):
    "The averages caption by caption: {position: values}, {sentence: values}, centres, {kind: percent}."
    positions, sentences, centres, kinds = {}, {}, [], {k: [] for k in ("start", "words", "end", "pads")}
    for w, part in zip(read.weights[:, layer].double().tolist(), read.part.tolist(), strict=False):
        words = [(x, s) for x, s in zip(w, part, strict=False) if s >= 0]
        total = sum(x for x, _ in words)
        for k, (x, _) in enumerate(words):
            positions.setdefault(k + 1, []).append(x * len(words) / total)
        for s in {s for _, s in words}:
            mine = [x for x, t in words if t == s]
            sentences.setdefault(s + 1, []).append(sum(mine) / len(mine) * len(words) / total)
        if len(words) > 1:
            centres.append(sum(x * k for k, (x, _) in enumerate(words)) / total / (len(words) - 1))
        for name, code in (("start", START), ("end", END), ("pads", PAD)):
            kinds[name].append(100 * sum(x for x, s in zip(w, part, strict=False) if s == code))
        kinds["words"].append(100 * total)
    return positions, sentences, centres, kinds


@pytest.mark.parametrize("layer", [0, -1])
def test_averages_are_those_of_a_loop(tower, layer):
    model, tok = tower
    texts = [list(c[: 1 + i % 4]) for i, c in enumerate(scene_records("val", n=14).captions)]
    read = read_captions(model, tok, texts + [["Red."], [" ".join(texts[3])]])
    positions, sentences, centres, kinds = slowly(read, layer)
    position, sentence, layers = (
        by_position(read, layer, least=3),
        by_sentence(read, layer, least=3),
        by_layer(read).iloc[layer],
    )
    assert dict(zip(position.position, position.n, strict=False)) == {
        p: len(v) for p, v in positions.items() if len(v) >= 3
    } and np.allclose(position.value, [np.mean(positions[p]) for p in position.position])
    often = {s: len(v) for s, v in sentences.items() if len(v) >= 3}
    assert dict(zip(sentence.sentence, sentence.n, strict=False)) == often
    assert np.allclose(sentence.value, [np.mean(sentences[s]) for s in sentence.sentence])
    assert np.isclose(layers.centre, np.mean(centres)) and all(
        np.isclose(layers[k], np.mean(v), atol=1e-4) for k, v in kinds.items()
    )


@pytest.mark.filterwarnings("error")
def test_a_caption_of_no_words_counts_nowhere():
    "SigLIP's cleaning leaves nothing of a caption of punctuation."
    made = reading([0.5, 0.2, 0.1, 0.2], [0.5, 0.2, 0.1, 0.2], part=[START, 0, 0, END])
    bare = Reading(made.weights, np.array([[START, 0, 0, END], [START, END, PAD, PAD]], np.int16), made.features, 0)
    for f in (by_position, by_sentence):
        assert f(bare).n.tolist() == [1] * len(f(bare)) and np.allclose(
            f(bare).value, f(Reading(made.weights[:1], made.part[:1], made.features[:1], 0)).value
        )
    assert by_layer(bare).centre.tolist() == pytest.approx([1 / 3])


def test_positions_that_few_reach_are_left_out():
    long, short = [START, 0, 0, 0, END, PAD], [START, 0, END, PAD, PAD, PAD]
    made = Reading(torch.full((12, 1, 6), 1 / 6), np.array([long] * 3 + [short] * 9, np.int16), torch.zeros(12, 1), 0)
    assert by_position(made).position.tolist() == [1] and by_position(made, least=3).position.tolist() == [1, 2, 3]
    assert by_layer(made).centre.tolist() == [0.5]  # a caption of one word has no centre


def test_strip(tower, captions):
    model, tok = tower
    text = 'A $5 "red" ring! ' + " ".join(captions[0])
    strip = token_strip(model, tok, text)
    assert abs(sum(w for _, w, _ in strip) - 1) < 1e-5
    words = [t for t, _, kind in strip if kind == "word"]
    assert len(words) == len(tok.encode(text))
    if tok.family.name == "clip":
        assert "".join(words).replace(" ", "") == text.lower().replace(" ", "")
    else:
        assert (
            "".join(words).replace("·", "").split() == tok.words.hf.clean_fn(text).split()
        )  # a dot: a piece of a space alone
    assert [k for _, _, k in strip if k != "word"] == (["start"] if tok.sot is not None else []) + ["end", "pads"]
    import matplotlib.pyplot as plt

    fig = heat_strip({"a": strip, "b": strip}, columns=60)
    shown = [t.get_text() for t in fig.axes[0].texts]
    assert shown[0] == "a" and "b" in shown and len(shown) == 2 * len(strip) + 2
    fig.canvas.draw()  # a lone $ would be read as mathematics
    plt.close(fig)


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace()])
def test_sentence_pieces_are_readable(tmp_path, decoder):
    "Words stand behind ▁, as T5's and SigLIP's tokenisers write; a piece inside a word has none; a lone ▁ is a dot."
    raw = Raw(
        models.Unigram(
            [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁red", -1.0), ("▁brick", -1.0), ("s", -2.0), ("▁", -5.0)],
            unk_id=2,
        )
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    if decoder:
        raw.decoder = decoder
    PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    tok = get_tokenizer("ViT-B-16-SigLIP", 24, tmp_path)
    assert [tok.words.readable(i) for i in tok.encode("red bricks")] == [
        ("red", "before"),
        ("brick", "before"),
        ("s", ""),
    ] and tok.words.readable(6) == ("·", "before")


def test_errors(tower):
    model, tok = tower
    with pytest.raises(ValueError, match="no captions"):
        pooled_attention(model, tok(["a"])[:0])
    with pytest.raises(ValueError, match=r"reads \[n, 88\]"):
        pooled_attention(model, tok(["a"])[:, :40])
    text = getattr(model, "text", model)
    name = "pool_type" if hasattr(text, "pool_type") else "text_pool_type"
    kept = getattr(text, name)
    try:
        setattr(text, name, "first")
        with pytest.raises(ValueError, match="pools by 'first'"):
            pooled_attention(model, tok(["a"]))
    finally:
        setattr(text, name, kept)
    block = text.transformer.resblocks[0]
    text.transformer.resblocks[0] = torch.nn.Identity()
    try:
        with pytest.raises(ValueError, match="other blocks than CLIP's"):
            pooled_attention(model, tok(["a"]))
    finally:
        text.transformer.resblocks[0] = block
