"""Which family a backbone is of, and that a new one is one object."""
import dataclasses
import pickle

import open_clip
import pytest
import torch
from tiny import CLIP, TEXT, registered

from debias_clip.families import (
    FAMILIES,
    Family,
    base_length,
    family_of,
    model_config,
    own_text,
    stretched_length,
    text_prefix,
)
from debias_clip.models import create_model, encode_texts, load_checkpoint, save_checkpoint
from debias_clip.tokens import get_tokenizer, tokenizer_of

@pytest.mark.parametrize("backbone,family", [
    ("ViT-B-16-quickgelu", "clip"), ("RN50-quickgelu", "clip"), ("EVA02-B-16", "clip"),
    ("MobileCLIP-S2", "clip_unmasked"),
    ("ViT-B-16-SigLIP", "siglip"), ("ViT-SO400M-16-SigLIP2-256", "siglip"), ("scenes-siglip", "siglip")])
def test_each_backbone_has_its_family(backbone, family):
    assert family_of(backbone) is FAMILIES[family]


def test_no_architecture_has_two():
    for name in open_clip.list_models():
        assert sum(family.owns(model_config(name)) for family in FAMILIES.values()) <= 1, name


@pytest.mark.parametrize("backbone", ["roberta-ViT-B-32", "coca_ViT-B-32", "ViT-H-14-CLIPA"])
def test_towers_of_no_family_are_refused(backbone):
    with pytest.raises(ValueError, match=f"{backbone} is of no known family.*e.g. ViT-B-16"): family_of(backbone)
    with pytest.raises(ValueError, match=backbone): create_model(backbone)


def test_unknown_backbones_are_named():
    with pytest.raises(ValueError, match="did you mean.*scenes-clip"): model_config("scene-clip")
    with pytest.raises(ValueError, match="list_models"): model_config("☃")
    changed = model_config("scenes-clip")
    changed["text_cfg"].clear()
    assert model_config("scenes-clip")["text_cfg"]        # each caller has its own


def test_what_the_family_tells():
    told = {name: (f.ends_at_mark, f.uses_bias, f.loss, f.hugging_face) for name, f in FAMILIES.items()}
    assert told == {
        "clip": (True, False, "softmax", "CLIPModel"),
        "clip_unmasked": (False, False, "softmax", None),
        "siglip": (False, True, "sigmoid", "SiglipModel"),
    }
    assert pickle.loads(pickle.dumps(FAMILIES["clip"])) == FAMILIES["clip"]
    assert [text_prefix(name) for name in ("ViT-B-16", "EVA02-B-16", "ViT-B-16-SigLIP")] == ["", "text.", "text."]


def test_lengths():
    assert [base_length(name) for name in ("ViT-B-16", "ViT-B-16-SigLIP", "scenes-clip")] == [77, 64, 28]
    assert [stretched_length(*row) for row in ((77,), (64,), (32, 8), (16, 0, 3))] == [248, 196, 104, 48]
    for keep in (77, 100, -1):
        with pytest.raises(ValueError, match=f"keep={keep}.*from 0 to 76, such as keep=20"): stretched_length(77, keep)


def test_fewer_positions_than_rows_kept():
    "One SigLIP has 16: the error says what to give, and that works."
    with pytest.raises(ValueError, match="keep=20.*16 positions.*such as keep=4"): create_model("ViT-SO400M-14-SigLIP")
    with torch.device("meta"): assert create_model("ViT-SO400M-14-SigLIP", keep=4).context_length == 52


def test_a_tower_without_a_mask_sees_every_pad(tmp_path):
    with registered({"open-clip": CLIP | {"custom_text": True, "text_cfg": TEXT | {"no_causal_mask": True}}}, tmp_path):
        model = create_model("open-clip").eval()
        tok = tokenizer_of(model)
        rows = tok(["a red circle"]*2)
        rows[1, -1] = 7
        with torch.no_grad(): a, b = encode_texts(model, rows)
        assert model.family.name == tok.family.name == "clip_unmasked" and not torch.allclose(a, b, atol=1e-4)


# a family of one's own

class Letters:
    "Ids of the letters of a text: 3 and up."
    sot, eot, pad = 1, 2, 0
    def __call__(self, text): return [ord(c) % 64 + 3 for c in text]
    def sentence(self, text): return self(text)
    def join(self, ids): return ids


def is_letters(config): return own_text(config).get("pool_type") == "first"


def letter_words(backbone, path=None): return Letters()


@pytest.fixture
def letters(tmp_path, monkeypatch):
    "The one object, and a backbone of it."
    family = Family("letters", is_letters, letter_words, causal=False, pooling="first")
    monkeypatch.setitem(FAMILIES, "letters", family)
    text = {"context_length": 32, "vocab_size": 68, "pool_type": "first", "no_causal_mask": True}
    with registered({"tiny-letters": CLIP | {"custom_text": True, "text_cfg": TEXT | text}}, tmp_path): yield family


@torch.no_grad()
def test_a_new_family_is_one_object(letters, tmp_path):
    tok = get_tokenizer("tiny-letters", 60)
    assert tok("ab", n_pre=2)[0, :7].tolist() == [1, 0, 0, *Letters()("ab"), 2, 0] and tok.family is letters
    model = create_model("tiny-letters", context_length=60, keep=8).eval()
    rows = tokenizer_of(model)(["a red circle", "two dogs"], n_pre=[0, 3])
    features = encode_texts(model, rows, normalize=True)
    assert torch.equal(features, model.encode_text(rows, normalize=True)) and features.shape == (2, 16)
    again = load_checkpoint(save_checkpoint(model, tmp_path/"m.safetensors"))
    assert again.family is letters and torch.equal(encode_texts(again.eval(), rows, normalize=True), features)
    with pytest.raises(ValueError, match="unread"): encode_texts(model, rows, read_pads=False)


def test_what_the_new_family_has_no_way_to_is_refused(letters, tmp_path):
    pytest.importorskip("transformers")
    from debias_clip.export import to_diffusers, to_hugging_face
    model = create_model("tiny-letters", context_length=32, keep=8)
    with pytest.raises(ValueError, match="no class for the letters family"): to_hugging_face(model, tmp_path/"out")
    with pytest.raises(ValueError, match="letters family"): to_diffusers(model, None)
    assert dataclasses.replace(letters, loss="sigmoid").uses_bias
