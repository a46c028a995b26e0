"""Checkpoints out: what other libraries load is compared with the model it came from; a fault leaves nothing behind.

Every model is a random-weight one of the real architecture at a reduced size, but for one ViT-B-16-quickgelu.
Nothing is downloaded.
"""
import ast
import copy
import json
import os
import sys
from pathlib import Path

import ftfy
import numpy as np
import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from tiny import registered

from debias_clip import checkpoints, conversion, export, pipelines
from debias_clip.conversion import convert, differences, hugging_face_tokenizer
from debias_clip.export import to_diffusers, to_hugging_face, to_open_clip
from debias_clip.families import ASSETS
from debias_clip.models import (
    create_model,
    encode_texts,
    load_checkpoint,
    stretch_positions,
)
from debias_clip.tokens import get_tokenizer, tokenizer_of

VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 3}
CLIP = {"embed_dim": 48, "vision_cfg": VISION, "text_cfg": TEXT}
TIMM = {"image_size": 32, "timm_model_name": "vit_export_siglip", "timm_pool": "map", "timm_proj": "none"}
PIECES = {"context_length": 64, "vocab_size": 3072, "hf_tokenizer_name": "scenes-siglip",
          "tokenizer_kwargs": {"clean": "canonicalize"}, "width": 64, "heads": 2, "layers": 2, "no_causal_mask": True,
          "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
SIGLIP = {"embed_dim": 64, "init_logit_bias": -10, "custom_text": True, "vision_cfg": TIMM, "text_cfg": PIECES}
CONFIGS = {
    "export-clip": CLIP,
    "export-clip-quickgelu": CLIP | {"quick_gelu": True},
    "export-causal": CLIP | {"custom_text": True, "embed_dim": 40, "text_cfg": TEXT | {"layers": 1, "mlp_ratio": 3}},
    "export-siglip": SIGLIP,
    "export-siglip2": SIGLIP | {"vision_cfg": TIMM | {"timm_model_name": "vit_export_siglip2"},
                                "text_cfg": PIECES | {"act_kwargs": {"approximate": "tanh"}}},
    "export-scale": CLIP | {"vision_cfg": VISION | {"ls_init_value": .1}},
    "export-avg": CLIP | {"vision_cfg": VISION | {"pool_type": "avg"}},
    "export-resnet": CLIP | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}},
    "export-bias": CLIP | {"init_logit_bias": -10},
    "export-timm": CLIP | {"embed_dim": 64, "vision_cfg": TIMM},
}
TEXTS = ["A small red circle.", "", " ", "x", "It's a red-brick house, isn't it? WE'LL see!!! 100%",
         "the “quoted” text’s end", "ﬁne ﬂow", "tom &amp; jerry &lt;3 &quot;x&quot; &#39;y&#39;", "Привет, мир!",
         "🙂 👩🏽‍🚀", "a\nb\tc d", "word "*400, "ＦＵＬＬ １２３ width", "a"*500, "é e\u0301 naïve café",
         "a\u200bb\u00adc\ufeff", "你好，世界。", "__init__ a_b", "…... ½ Ⅷ",
         "<|endoftext|> a <|startoftext|> <start_of_text> </s> <pad>"]


def timm_vit(name, **own):
    def make(pretrained=False, pretrained_cfg=None, pretrained_cfg_overlay=None, cache_dir=None, **more):
        return VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, class_token=False,
                                 **own, **more)
    make.__name__, make.__module__ = name, __name__
    return register_model(make)


vit_export_siglip = timm_vit("vit_export_siglip")
vit_export_siglip2 = timm_vit("vit_export_siglip2", act_layer="gelu_tanh", mlp_ratio=3.7362)


@pytest.fixture(scope="module", autouse=True)
def configs(tmp_path_factory):
    from huggingface_hub import constants
    hub, threads = constants.HF_HUB_OFFLINE, torch.get_num_threads()
    constants.HF_HUB_OFFLINE = True
    torch.set_num_threads(1)                          # the models are tiny
    with registered(CONFIGS, tmp_path_factory.mktemp("configs")): yield
    torch.set_num_threads(threads)
    constants.HF_HUB_OFFLINE = hub


@torch.no_grad()
def make(backbone, **kwargs):
    "A model in which no norm is the identity and no bias is zero."
    torch.manual_seed(0)
    model = create_model(backbone, **kwargs).eval()
    for name, p in model.named_parameters():
        if "logit" not in name: p += torch.randn_like(p)*.05
    return model


@pytest.fixture(scope="module")
def clip(configs): return make("export-clip")


@pytest.fixture(scope="module")
def folder(clip, tmp_path_factory):
    return to_hugging_face(clip, tmp_path_factory.mktemp("hf")/"clip", recipe="debias", seeds=[0, 1])


@pytest.fixture(scope="module")
def siglip(configs): return make("export-siglip")


@pytest.fixture(scope="module")
def siglip_folder(siglip, tmp_path_factory): return to_hugging_face(siglip, tmp_path_factory.mktemp("hf")/"siglip")


@pytest.fixture(params=["clip", "siglip"])
def exported(request, clip, folder, siglip, siglip_folder):
    "(model, its transformers folder)"
    return (clip, folder) if request.param == "clip" else (siglip, siglip_folder)


CAPTIONS, PADS = ("a small red circle", "x", "two blue squares "*100, ""), (0, 30, 0, 5)


def rows(model): return tokenizer_of(model)(CAPTIONS, n_pre=PADS)


def pixels(model):
    height, width = model.visual.preprocess_cfg["size"] if "resnet" not in model.backbone else (32, 32)
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def smooth(width, height, mode="RGB"):
    "A picture without hard edges."
    size = (height//8 + 2, width//8 + 2, 3)
    small = np.random.default_rng(width*1000 + height).integers(0, 256, size, np.uint8)
    return Image.fromarray(small).resize((width, height), Image.BICUBIC).convert(mode)


def transform_of(model): return image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)


def is_empty(folder): return not any(Path(folder).iterdir())


def same_state(model, other):
    state = other.state_dict()
    return all(torch.equal(v, state[name]) for name, v in model.state_dict().items())


# open_clip

@pytest.mark.parametrize("backbone,length", [
    ("export-clip", None), ("export-clip-quickgelu", 100), ("export-causal", 77), ("export-siglip", None),
    ("scenes-siglip", 90)])
@torch.no_grad()
def test_stock_open_clip_loads_it(tmp_path, backbone, length):
    model = make(backbone, context_length=length, keep=8)
    out = to_open_clip(model, tmp_path/"new"/"out", recipe="debias")
    stock = open_clip.create_model(f"local-dir:{out}").eval()
    assert type(stock) in (open_clip.CLIP, open_clip.CustomTextCLIP) and isinstance(model, type(stock))
    assert torch.equal(stock.encode_text(rows(model)), model.encode_text(rows(model)))
    assert torch.equal(stock.encode_image(pixels(model)), model.encode_image(pixels(model)))
    texts = [t for t in TEXTS if "_of_text" not in t]     # in which stock open_clip sees its special tokens
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{out}")(texts), tokenizer_of(model)(texts))
    for name in ("mean", "std", "interpolation", "resize_mode", "size"):
        assert tuple(stock.visual.preprocess_cfg[name]) == tuple(model.visual.preprocess_cfg[name])
    assert json.loads((out/"open_clip_config.json").read_text())["debias_clip"]["recipe"] == "debias"
    assert os.listdir(out.parent) == ["out"]


def test_its_weights_load_by_name_and_come_back(tmp_path):
    model = make("export-clip", context_length=100, keep=8)
    weights = to_open_clip(model, tmp_path/"out")/"open_clip_model.safetensors"
    named = open_clip.create_model("export-clip", force_context_length=100)
    named.load_state_dict(load_file(weights), strict=True)
    again = load_checkpoint(weights)
    assert same_state(model, again)
    for name in checkpoints.FACTS: assert getattr(again, name) == getattr(model, name)


# transformers: CLIP

@torch.no_grad()
def agree(model, theirs, text, image):
    "Asserts equal features, normalised and not, and equal logits."
    out = theirs(input_ids=text, pixel_values=image)
    pairs = [
        (out.text_embeds, model.encode_text(text, normalize=True)),
        (out.image_embeds, model.encode_image(image, normalize=True)),
        (theirs.get_text_features(input_ids=text).pooler_output, encode_texts(model, text)),
        (theirs.get_image_features(pixel_values=image).pooler_output, model.encode_image(image)),
        (out.logits_per_image/100, model.get_logits(image, text)[0]/100),
    ]
    for got, want in pairs: torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backbone,length", [
    ("export-clip", None), ("export-clip-quickgelu", 100), ("export-causal", 77)])
@torch.no_grad()
def test_auto_model_gives_our_features(tmp_path, backbone, length):
    from transformers import AutoModel, CLIPModel
    model = make(backbone, context_length=length)
    theirs, info = AutoModel.from_pretrained(to_hugging_face(model, tmp_path/"out"), output_loading_info=True)
    assert type(theirs) is CLIPModel and not any(info.values()) and not theirs.training
    text, config = rows(model), theirs.config.text_config
    assert (config.max_position_embeddings, config.eos_token_id) == (model.context_length, 49407)
    assert config.hidden_act == ("quick_gelu" if "quick" in backbone else "gelu")
    agree(model, theirs, text, pixels(model))


@torch.no_grad()
def test_pads_behind_the_end_may_be_ends(clip, folder):
    "As Hugging Face's tokeniser has them; those before the words stay pads."
    from transformers import AutoModel
    text = rows(clip)
    behind = torch.arange(text.shape[1]) >= text.argmax(1, keepdim=True)
    padded = text.masked_fill(behind, 49407)
    assert (padded[:, -1] == 49407).all() and (padded[1, 1:31] == 0).all()
    features = AutoModel.from_pretrained(folder)(input_ids=padded, pixel_values=pixels(clip)).text_embeds
    torch.testing.assert_close(features, clip.encode_text(text, normalize=True), rtol=1e-5, atol=1e-5)


def test_a_full_size_backbone():
    torch.manual_seed(0)
    model = create_model("ViT-B-16-quickgelu").eval()
    tok = tokenizer_of(model)
    theirs = convert(model, tok)
    text = theirs.config.text_config
    assert (text.max_position_embeddings, text.hidden_act) == (248, "quick_gelu")
    off = differences(model, theirs, tok)
    assert set(off) == {"image", "text"} and max(off.values()) < 1e-5


def test_its_folder_comes_back_whole(clip, folder):
    again = load_checkpoint(folder)
    assert type(again) is type(clip) and same_state(clip, again)
    facts = {"backbone": "export-clip", "context_length": 248, "base_length": 77, "keep": 20, "stretch_factor": 4.}
    assert {name: getattr(again, name) for name in facts} == facts
    noted = json.loads((folder/"config.json").read_text())["debias_clip"]
    assert noted == facts | {"recipe": "debias", "seeds": [0, 1]}
    with safe_open(folder/"model.safetensors", "pt") as f: metadata = f.metadata()
    as_text = {name: str(value) for name, value in facts.items()}
    assert metadata == as_text | {"format": "pt", "recipe": "debias", "seeds": "[0, 1]"}
    for length in (77, 196):
        with pytest.raises(ValueError, match=f"77 to 248 .*{length}"): create_model("export-clip", folder, length)
    with pytest.raises(ValueError, match="export-clip, not export-clip-quickgelu"):
        load_checkpoint(folder, "export-clip-quickgelu")


def test_a_stretch_of_any_kind_comes_back(tmp_path):
    model = make("export-clip", context_length=100, keep=30)
    again = load_checkpoint(to_hugging_face(model, tmp_path/"out"))
    assert (again.context_length, again.base_length, again.keep) == (100, 77, 30)
    assert again.stretch_factor == model.stretch_factor
    with pytest.raises(ValueError, match="77 to 100"): create_model("export-clip", tmp_path/"out", 248)


def test_a_folder_that_transformers_saved_again_keeps_its_stretch(tmp_path):
    "Fine-tuned with transformers, the file's metadata are gone; config.json still tells keep and factor."
    from transformers import CLIPModel
    to_hugging_face(create_model("export-clip", keep=30, context_length=124), tmp_path/"first", recipe="debias")
    CLIPModel.from_pretrained(tmp_path/"first").save_pretrained(tmp_path/"again")
    back = load_checkpoint(tmp_path/"again", "export-clip")
    assert (back.keep, back.base_length, back.stretch_factor, back.context_length) == (30, 77, 2, 124)


@torch.no_grad()
def test_the_towers_alone_load_from_it(clip, folder):
    from transformers import CLIPTextModelWithProjection, CLIPVisionModelWithProjection
    text = CLIPTextModelWithProjection.from_pretrained(folder)(input_ids=rows(clip)).text_embeds
    image = CLIPVisionModelWithProjection.from_pretrained(folder)(pixel_values=pixels(clip)).image_embeds
    torch.testing.assert_close(text, clip.encode_text(rows(clip)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(image, clip.encode_image(pixels(clip)), rtol=1e-5, atol=1e-5)


# transformers: CLIP's tokeniser

def ids_like_ours(hf, texts):
    "Ids of transformers' tokeniser, with our pads where it has its own."
    rows = hf(texts, padding="max_length", truncation=True, return_tensors="pt")
    assert (rows.input_ids[rows.attention_mask == 0] == 49407).all()
    return rows.input_ids.masked_fill(rows.attention_mask == 0, 0)


@pytest.fixture(scope="module")
def hf_tokenizer(folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)


def test_its_tokeniser_is_ours(clip, hf_tokenizer, tmp_path):
    from transformers import AutoTokenizer
    tok = tokenizer_of(clip)
    assert hf_tokenizer.model_max_length == 248 and len(hf_tokenizer) == 49408
    for text in TEXTS: assert torch.equal(ids_like_ours(hf_tokenizer, [text]), tok([text])), text
    hf_tokenizer.save_pretrained(tmp_path)
    for hf in (hf_tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert torch.equal(ids_like_ours(hf, TEXTS), tok(TEXTS))
    spelt = hf_tokenizer.decode(hf_tokenizer("A “red” circle, naïve!").input_ids, skip_special_tokens=True)
    assert spelt == 'a " red " circle , naïve !'


def test_what_pads_are_in_it(hf_tokenizer):
    "Named as a pad, the letter of id 0 would be one in a text too; and the spelling of EOT in a text must not end it."
    assert hf_tokenizer.pad_token_id == hf_tokenizer.eos_token_id == 49407 and hf_tokenizer.bos_token_id == 49406
    assert 0 not in hf_tokenizer("wow! !! ! a!").input_ids
    assert hf_tokenizer("<|endoftext|> a dog").input_ids.count(49407) == 1


CHARACTERS = st.one_of(
    st.sampled_from("abcdefghij XYZ019 .,;:!?'\"-_/()<>|#\n\t"),
    st.sampled_from("“”‘’‚„–—…ﬁﬂéüñçßœ你好，。！１Ａ🙂€°½\u00a0\u3000\u200b\ufeff"))
BITS = st.sampled_from(["it's", "DON'T", "&amp;", "<|endoftext|>", "a red circle", "!", "...", "'s"])


def repairs(text):
    "Whether ftfy takes a text for a wrongly decoded one, which no table of characters can do."
    return ftfy.fix_text(text) != ftfy.fix_text(text, fix_encoding=False)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.text(CHARACTERS, max_size=40), BITS), max_size=8).map(" ".join))
def test_any_text_gives_our_ids(clip, hf_tokenizer, text):
    if repairs(text): return
    assert torch.equal(ids_like_ours(hf_tokenizer, [text]), tokenizer_of(clip)([text]))


# transformers: pictures

@pytest.mark.parametrize("size", [(32, 32), (200, 300), (301, 200), (30, 60)])
def test_its_pixels_are_open_clips(exported, size):
    from transformers import AutoImageProcessor
    model, folder = exported
    ours, picture = transform_of(model)(smooth(*size)), smooth(*size)
    def theirs(**how):
        return AutoImageProcessor.from_pretrained(folder, **how)(images=picture, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(theirs(backend="pil"), ours, rtol=0, atol=1e-5)
    assert (theirs() - ours).abs().max() <= 1.001/255/.26


def test_an_odd_overhang_is_cropped_one_pixel_aside(clip, folder):
    from transformers import AutoImageProcessor
    picture = smooth(35, 32)                          # three columns too many
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    ours, theirs = transform_of(clip)(picture), processor(images=picture, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(theirs[..., 1:], ours[..., :-1], rtol=0, atol=1e-5)


def test_squashed_pictures_stay_squashed(tmp_path):
    from transformers import AutoImageProcessor
    model, picture = create_model("export-siglip"), smooth(90, 40)
    model.visual.preprocess_cfg |= {"mean": (.5, .5, .5), "std": (.5, .5, .5), "resize_mode": "squash"}
    processor = AutoImageProcessor.from_pretrained(to_hugging_face(model, tmp_path/"out"), backend="pil")
    theirs = processor(images=picture, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(theirs, transform_of(model)(picture), rtol=0, atol=1e-5)
    model.visual.preprocess_cfg |= {"resize_mode": "longest"}
    with pytest.raises(ValueError, match="longest.*to_open_clip"): to_hugging_face(model, tmp_path/"two")
    assert os.listdir(tmp_path) == ["out"]


@torch.no_grad()
def test_half_precision_and_wrappers(clip, tmp_path):
    half = copy.deepcopy(clip).half()
    compiled = torch.compile(clip, backend="eager")
    for name, wrapped, plain in (("half", half, half), ("compiled", compiled, clip)):
        weights = load_file(to_hugging_face(wrapped, tmp_path/name)/"model.safetensors")
        assert all(v.dtype == torch.float32 for v in weights.values())
        again = load_checkpoint(tmp_path/name).state_dict()
        assert all(torch.equal(again[name], v.float()) for name, v in plain.state_dict().items())
    assert next(half.parameters()).dtype == torch.float16                # the caller's own stays as it was
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try: to_open_clip(torch.nn.parallel.DistributedDataParallel(clip), tmp_path/"ddp")
    finally: torch.distributed.destroy_process_group()
    assert (tmp_path/"ddp"/"open_clip_config.json").exists()


# transformers: what is refused

@pytest.mark.parametrize("backbone,reason", [
    ("export-scale", "does not match CLIPModel.*4 unexpected: .*ls_1.gamma"),
    ("export-avg", "image features differ"),
    ("export-bias", "does not match CLIPModel.*1 unexpected: logit_bias"),
    ("export-resnet", "plain ViT, and this one is open_clip's ModifiedResNet"),
    ("export-timm", "plain ViT, and this one is timm's VisionTransformer"),
    ("scenes-siglip", "attention pool, and this one is open_clip's VisionTransformer"),
])
@torch.no_grad()
def test_what_transformers_cannot_compute_is_refused_with_the_reason(tmp_path, backbone, reason):
    model = make(backbone, keep=8)
    with pytest.raises(ValueError, match=f"(?s){backbone} cannot be written.*{reason}.*to_open_clip"):
        to_hugging_face(model, tmp_path/"out")
    assert is_empty(tmp_path)
    stock = open_clip.create_model(f"local-dir:{to_open_clip(model, tmp_path/'out')}").eval()
    assert torch.equal(stock.encode_image(pixels(model)), model.encode_image(pixels(model)))


def test_a_model_that_is_not_its_backbones_is_refused(clip, tmp_path):
    broken, more, stock = copy.deepcopy(clip), copy.deepcopy(clip), open_clip.CLIP(**copy.deepcopy(CLIP))
    with torch.no_grad(): broken.ln_final.weight[3] = float("nan")
    with pytest.raises(ValueError, match="text features differ by nan"): to_hugging_face(broken, tmp_path/"out")
    more.adapter = torch.nn.Linear(2, 2)
    for write in (to_hugging_face, to_open_clip):
        with pytest.raises(ValueError, match="2 unexpected: adapter.weight"): write(more, tmp_path/"out")
        with pytest.raises(ValueError, match="does not say which backbone"): write(stock, tmp_path/"out")
    assert is_empty(tmp_path)


@pytest.mark.parametrize("backbone", ["ViT-B-16", "ViT-L-14-quickgelu", "ViT-L-14-336-quickgelu", "ViT-H-14",
                                      "ViT-B-16-SigLIP", "ViT-B-16-SigLIP2", "ViT-SO400M-14-SigLIP-384"])
@pytest.mark.filterwarnings("ignore:.*non-meta parameter.*", "ignore:.*no-op")
def test_every_tensor_of_real_backbones_has_a_place(backbone, siglip_pieces):
    with torch.device("meta"): model = create_model(backbone)
    theirs = convert(model, get_tokenizer(backbone, path=siglip_pieces if "SigLIP" in backbone else None))
    assert type(theirs).__name__ == model.family.hugging_face
    assert theirs.config.text_config.max_position_embeddings == model.context_length
    def numbers(module): return sum(v.numel() for v in module.state_dict().values())
    assert numbers(theirs) == numbers(model)


# transformers: SigLIP

@pytest.mark.parametrize("backbone,activation", [("export-siglip", "gelu"), ("export-siglip2", "gelu_pytorch_tanh")])
@torch.no_grad()
def test_auto_model_gives_siglips_features(tmp_path, backbone, activation):
    from transformers import AutoModel, SiglipModel
    model = make(backbone)
    theirs, info = AutoModel.from_pretrained(to_hugging_face(model, tmp_path/"out"), output_loading_info=True)
    text, vision = theirs.config.text_config, theirs.config.vision_config
    assert type(theirs) is SiglipModel and not any(info.values())
    assert theirs.config.debias_clip["context_length"] == text.max_position_embeddings == 196
    assert text.hidden_act == vision.hidden_act == activation
    agree(model, theirs, rows(model), pixels(model))
    logits = theirs(input_ids=rows(model), pixel_values=pixels(model)).logits_per_text
    assert torch.allclose(theirs.logit_bias, torch.tensor(-10.)) and logits.max() < 5


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_siglips_tokeniser_is_ours(siglip, siglip_pieces, tmp_path, kind):
    from transformers import AutoTokenizer
    path = ASSETS/"tokenizers"/"scenes-siglip" if kind == "bytes" else siglip_pieces
    hf, tok = AutoTokenizer.from_pretrained(to_hugging_face(siglip, tmp_path/"out", path)), tokenizer_of(siglip, path)
    for text in TEXTS:
        row = hf([text], padding="max_length", truncation=True, return_tensors="pt")
        assert list(row) == ["input_ids"] and torch.equal(row.input_ids, tok([text])), text


def test_a_tokeniser_with_unknown_steps_is_refused(siglip, siglip_pieces, monkeypatch):
    from tokenizers import normalizers
    from transformers import PreTrainedTokenizerFast
    tok = tokenizer_of(siglip, siglip_pieces)
    fast = hugging_face_tokenizer(tok)
    assert isinstance(fast, PreTrainedTokenizerFast)
    fast.backend_tokenizer.normalizer = normalizers.Replace("circle", "house")
    monkeypatch.setattr(conversion, "fast_tokenizer", lambda words, **options: fast)
    with pytest.raises(ValueError, match="A small red circle"): hugging_face_tokenizer(tok)


def test_a_tokeniser_that_is_not_to_be_had(tmp_path, monkeypatch):
    model, known = create_model("export-siglip"), open_clip.factory._MODEL_CONFIGS
    for write in (to_hugging_face, to_open_clip):
        with pytest.raises(ValueError, match="no tokeniser folder"): write(model, tmp_path/"out", tmp_path/"nowhere")
    elsewhere = SIGLIP | {"text_cfg": PIECES | {"hf_tokenizer_name": "nobody/none"}}
    monkeypatch.setitem(known, "export-siglip", elsewhere)
    with pytest.raises(ValueError, match="neither in the local cache.*nor reachable"):
        to_hugging_face(model, tmp_path/"out")
    assert is_empty(tmp_path)


# sentence-transformers

@torch.no_grad()
def test_sentence_transformers(exported, tmp_path):
    from sentence_transformers import SentenceTransformer
    model, folder = exported
    first = SentenceTransformer(str(folder), device="cpu")
    first.save(str(tmp_path/"again"))
    texts, pictures = ["a small red circle!", "x", "two “blue” squares "*100], [smooth(32, 32), smooth(32, 32, "L")]
    want = model.encode_text(tokenizer_of(model)(texts))
    images = model.encode_image(torch.stack([transform_of(model)(picture) for picture in pictures]))
    for theirs in (first, SentenceTransformer(str(tmp_path/"again"), device="cpu")):
        np.testing.assert_allclose(theirs.encode(texts), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(theirs.encode(pictures), images, rtol=1e-5, atol=1e-5)
        assert theirs.max_seq_length == model.context_length
    late, long = "two blue squares "*30, texts[2]     # words after the 77th token count, those after the row do not
    read_dog, read_cat, cut_dog, cut_cat = first.encode([late + "dog", late + "cat", long + "dog", long + "cat"])
    assert np.abs(read_dog - read_cat).max() > 1e-3 and np.abs(cut_dog - cut_cat).max() < 1e-6


# diffusers

PROMPT = "a small red circle, and "*30 + "a blue square"
EOT, SOT = "<|endoftext|>", "<|startoftext|>"


@pytest.fixture(scope="module")
def words(clip):
    "CLIP's tokenisers as the published pipelines have them: SDXL's second one pads with the letter of id 0."
    from transformers import CLIPTokenizer
    bpe = tokenizer_of(clip).words.bpe
    spelt = {49406: SOT, 49407: EOT}
    vocab = {spelt.get(i, piece): i for piece, i in bpe.encoder.items()}
    return [CLIPTokenizer(vocab=vocab, merges=list(bpe.bpe_ranks), pad_token=pad) for pad in (EOT, "!")]


def text_encoder(kind, width, **more):
    import transformers
    torch.manual_seed(2)
    config = transformers.CLIPTextConfig(hidden_size=width, intermediate_size=64, num_hidden_layers=3,
                                         num_attention_heads=2, projection_dim=width, **more)
    return getattr(transformers, kind)(config).eval()


def unet(width, **more):
    import diffusers
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32,), layers_per_block=1, down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=width, attention_head_dim=8, norm_num_groups=8,
        **more)


def parts(words, width):
    import diffusers
    torch.manual_seed(1)
    for tokenizer in words: tokenizer.model_max_length = 77
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8)
    scheduler = diffusers.EulerDiscreteScheduler(steps_offset=1)
    encoder = text_encoder("CLIPTextModel", width)
    return {"vae": vae, "scheduler": scheduler, "tokenizer": words[0], "text_encoder": encoder}


def stable_diffusion(words, width=64, **more):
    import diffusers
    safety = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipe = diffusers.StableDiffusionPipeline(**parts(words, width) | {"unet": unet(width)} | safety | more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sdxl(words, width=64, **more):
    import diffusers
    second = {"text_encoder_2": text_encoder("CLIPTextModelWithProjection", 48), "tokenizer_2": words[1]}
    both = unet(width + 48, addition_embed_type="text_time", addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=96)
    every = parts(words, width) | second | {"unet": both, "add_watermarker": False} | more
    pipe = diffusers.StableDiffusionXLPipeline(**every)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, prompt=PROMPT, **more):
    seed = torch.Generator().manual_seed(0)
    return torch.from_numpy(
        pipe(prompt, num_inference_steps=2, height=8, width=8, output_type="np", generator=seed, **more).images)


@torch.no_grad()
def layers(model, tokens):
    "Our text tower's states: after the last layer and its norm, and before the last layer."
    x, (*blocks, last) = model.token_embedding(tokens) + model.positional_embedding, model.transformer.resblocks
    for block in blocks: x = block(x, attn_mask=model.attn_mask)
    return model.ln_final(last(x, attn_mask=model.attn_mask)), x


def ids(tokenizer, prompt, length):
    return tokenizer([prompt], padding="max_length", truncation=True, max_length=length, return_tensors="pt").input_ids


def position_table(encoder): return encoder.text_model.embeddings.position_embedding.weight


@torch.no_grad()
def test_stable_diffusion_reads_long_prompts(clip, words, tmp_path):
    import diffusers
    pipe = stable_diffusion(words)
    assert to_diffusers(clip, pipe) is pipe
    assert pipe.tokenizer.model_max_length == pipe.text_encoder.config.max_position_embeddings == 248
    assert pipe.text_encoder.config.debias_clip["base_length"] == 77
    states, tokens = pipe.encode_prompt(PROMPT, "cpu", 1, False)[0], ids(pipe.tokenizer, PROMPT, 248)
    assert states.shape == (1, 248, 64) and 77 < int((tokens[0] == 49407).nonzero()[0]) < 248
    torch.testing.assert_close(states, layers(clip, tokens)[0], rtol=1e-5, atol=1e-5)
    picture = draw(pipe)
    assert picture.shape == (1, 8, 8, 3) and torch.equal(draw(pipe), picture)
    for change in ("blue", "square"):                 # the last words are read
        assert (draw(pipe, PROMPT.replace(change, "dog")) - picture).abs().max() > 1e-4
    assert not torch.equal(draw(pipe, negative_prompt=PROMPT), picture)
    pipe.save_pretrained(tmp_path)
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert again.tokenizer.model_max_length == 248 and torch.equal(draw(again), picture)
    assert again.text_encoder.config.debias_clip["backbone"] == "export-clip"


@torch.no_grad()
def test_sdxl_reads_long_prompts(clip, words, tmp_path):
    import diffusers
    pipe = to_diffusers(clip, sdxl(words))
    second = pipe.text_encoder_2
    assert [t.model_max_length for t in (pipe.tokenizer, pipe.tokenizer_2)] == [248, 248]
    assert [e.config.max_position_embeddings for e in (pipe.text_encoder, second)] == [248, 248]
    states, _, pooled, _ = pipe.encode_prompt(PROMPT, device="cpu", do_classifier_free_guidance=False)
    tokens = [ids(t, PROMPT, 248) for t in (pipe.tokenizer, pipe.tokenizer_2)]
    assert states.shape == (1, 248, 64 + 48) and pooled.shape == (1, 48)
    before_last = layers(clip, tokens[0])[1]
    torch.testing.assert_close(states[..., :64], before_last, rtol=1e-5, atol=1e-5)
    out = second(tokens[1], output_hidden_states=True)
    assert torch.equal(pooled, out.text_embeds) and torch.equal(states[..., 64:], out.hidden_states[-2])
    picture = draw(pipe)
    changed = draw(pipe, PROMPT.replace("square", "dog"))
    assert picture.shape == (1, 8, 8, 3) and (changed - picture).abs().max() > 1e-4
    pipe.save_pretrained(tmp_path)
    again = diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(draw(again), picture)
    assert torch.equal(draw(to_diffusers(clip, pipe)), picture)          # a second time changes nothing


@torch.no_grad()
def test_what_is_equal_in_sdxls_second_encoder(clip, words):
    pipe, short = sdxl(words), "a small red circle"
    tokens, old = ids(pipe.tokenizer_2, PROMPT, 77), copy.deepcopy(pipe.text_encoder_2)
    new = to_diffusers(clip, pipe).text_encoder_2
    assert torch.equal(position_table(new), stretch_positions(position_table(old)))
    before, after = (encoder(tokens, output_hidden_states=True).hidden_states[-2][0] for encoder in (old, new))
    assert torch.equal(before[:21], after[:21])       # up to position keep
    assert not torch.isclose(before[21:], after[21:]).all(1).any()
    tokens = ids(pipe.tokenizer_2, short, 77)
    assert torch.equal(old(tokens).text_embeds, new(tokens).text_embeds)


@torch.no_grad()
def test_the_second_encoder_is_stretched_as_the_model_was(words):
    model, pipe = make("export-clip", context_length=120, keep=30), sdxl(words).to(torch.float16)
    table = position_table(pipe.text_encoder_2).clone()
    to_diffusers(model, pipe)
    assert torch.equal(position_table(pipe.text_encoder_2), stretch_positions(table, 90/47, 30))
    assert pipe.text_encoder.dtype == pipe.text_encoder_2.dtype == torch.float16
    assert pipe.tokenizer_2.model_max_length == 120


def refused(model, pipe, *says):
    "Asserts that a pipeline is refused for a reason, and left as it was."
    modules = {name: module for name, module in pipe.components.items() if name.startswith("t")}
    with pytest.raises(ValueError, match=".*".join(says)): to_diffusers(model, pipe)
    for name, module in modules.items():
        assert pipe.components[name] is module
        if name.startswith("tokenizer") and module is not None: assert module.model_max_length == 77


def test_pipelines_that_do_not_fit(clip, siglip, words):
    refused(clip, stable_diffusion(words, width=32), "64 wide", "takes 32")
    refused(clip, sdxl(words, width=32), "64 wide", "takes 32 beside the 48")
    refused(siglip, stable_diffusion(words), "siglip family")
    refused(clip, sdxl(words, text_encoder=None, tokenizer=None), "StableDiffusionXLPipeline is not",
            "NoneType and CLIPTextModelWithProjection")
    projected = text_encoder("CLIPTextModelWithProjection", 64)
    refused(clip, stable_diffusion(words, text_encoder=projected), "is not Stable Diffusion")
    other = text_encoder("CLIPTextModelWithProjection", 48, max_position_embeddings=96)
    refused(clip, sdxl(words, text_encoder_2=other), "96 positions", "from 77", "248 already")
    learnt = stable_diffusion([copy.deepcopy(words[0])])
    learnt.tokenizer.add_tokens(["<my-cat>"])
    refused(clip, learnt, "49409 tokens", "textual inversion")


# faults of the disk and of the surroundings

WRITERS = pytest.mark.parametrize("write", [to_open_clip, to_hugging_face])


@WRITERS
def test_a_folder_that_holds_something_is_left_alone(clip, tmp_path, write, monkeypatch):
    out = tmp_path/"out"
    out.mkdir()
    (out/"notes.txt").write_text("mine")
    monkeypatch.setattr(export, "plain_copy", lambda *_: pytest.fail("worked before it looked"))
    for path in (out, out/"notes.txt", tmp_path, "."):
        with pytest.raises(ValueError, match="holds something"): write(clip, path)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(out) == ["notes.txt"]
    assert (out/"notes.txt").read_text() == "mine"
    monkeypatch.undo()
    (out/"notes.txt").unlink()
    assert len(os.listdir(write(clip, str(out)))) > 1 and os.listdir(tmp_path) == ["out"]


FULL = "No space left on device"


@WRITERS
@pytest.mark.parametrize("fault", [OSError(28, FULL), SafetensorError(f"I/O error: {FULL}"), KeyboardInterrupt(FULL)])
def test_a_write_that_fails_leaves_nothing(clip, tmp_path, write, fault, monkeypatch):
    def dies(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise fault
    monkeypatch.setattr(checkpoints, "save_file", dies)
    kind = KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else OSError
    with pytest.raises(kind, match="No space left"): write(clip, tmp_path/"out")
    assert is_empty(tmp_path)


def test_a_place_that_cannot_be_written(clip, tmp_path):
    (tmp_path/"file").write_text("")
    with pytest.raises(OSError, match="out could not be written.*name another folder"):
        to_open_clip(clip, tmp_path/"file"/"out")
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_cut_short_is_refused(folder, tmp_path):
    weights = (folder/"model.safetensors").read_bytes()
    (tmp_path/"config.json").write_bytes((folder/"config.json").read_bytes())
    (tmp_path/"model.safetensors").write_bytes(weights[:len(weights)//2])
    with pytest.raises(ValueError, match="cannot be read"): load_checkpoint(tmp_path)
    (tmp_path/"model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"): load_checkpoint(tmp_path)


def imported(file):
    "Top-level packages that a module imports as it is imported."
    nodes = ast.parse(Path(file).read_text()).body
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in whole + parts}


def test_without_the_extra(clip, words, tmp_path, monkeypatch):
    pipe = stable_diffusion(words)
    monkeypatch.setitem(sys.modules, "transformers", None)
    extra = r"transformers.*pip install 'debias_clip\[hf\]'"
    with pytest.raises(ImportError, match=extra): to_hugging_face(clip, tmp_path/"out")
    with pytest.raises(ImportError, match=extra): to_diffusers(clip, pipe)
    assert is_empty(tmp_path) and pipe.tokenizer.model_max_length == 77
    to_open_clip(clip, tmp_path/"out")
    of_the_extra = {"transformers", "tokenizers", "diffusers", "sentence_transformers", "timm"}
    for module in (conversion, export, pipelines): assert not imported(module.__file__) & of_the_extra
