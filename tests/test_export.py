"""Checkpoints out: what other libraries load is compared with the model it came from, and a fault leaves nothing half-written.

Every model is a random-weight one of the real architecture at a reduced size, but for one ViT-B-16-quickgelu. Nothing is downloaded. About 40 seconds on two cores.
"""
import ast
import copy
import json
import os
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer

import debias_clip.export as E
from debias_clip.export import to_diffusers, to_hugging_face, to_open_clip
from debias_clip.models import create_model, create_model_and_transforms, encode_texts, load_checkpoint, stretch_positions
from debias_clip.tokens import ASSETS, get_tokenizer

VISION, TEXT = dict(image_size=32, layers=2, width=64, head_width=32, patch_size=8), dict(context_length=77, vocab_size=49408, width=64, heads=2, layers=3)
CLIP = dict(embed_dim=48, vision_cfg=VISION, text_cfg=TEXT)
SIGLIP = dict(embed_dim=64, init_logit_bias=-10, custom_text=True, vision_cfg=dict(image_size=32, timm_model_name='vit_export_siglip', timm_pool='map', timm_proj='none'),
              text_cfg=dict(context_length=64, vocab_size=3072, hf_tokenizer_name='scenes-siglip', tokenizer_kwargs=dict(clean='canonicalize'), width=64, heads=2, layers=2,
                            no_causal_mask=True, proj_bias=True, pool_type='last', norm_kwargs=dict(eps=1e-6)))
CONFIGS = {'export-clip': CLIP, 'export-clip-quickgelu': CLIP | dict(quick_gelu=True),
           'export-causal': CLIP | dict(custom_text=True, embed_dim=40, text_cfg=TEXT | dict(layers=1, mlp_ratio=3)),
           'export-siglip': SIGLIP,
           'export-siglip2': SIGLIP | dict(vision_cfg=SIGLIP['vision_cfg'] | dict(timm_model_name='vit_export_siglip2'),
                                           text_cfg=SIGLIP['text_cfg'] | dict(act_kwargs=dict(approximate='tanh'))),
           'export-scale': CLIP | dict(vision_cfg=VISION | dict(ls_init_value=.1)), 'export-avg': CLIP | dict(vision_cfg=VISION | dict(pool_type='avg')),
           'export-resnet': CLIP | dict(vision_cfg=dict(image_size=32, layers=[1, 1, 1, 1], width=8)), 'export-bias': CLIP | dict(init_logit_bias=-10),
           'export-timm': CLIP | dict(embed_dim=64, vision_cfg=SIGLIP['vision_cfg'])}
TEXTS = ['A small red circle.', '', ' ', 'x', "It's a red-brick house, isn't it? WE'LL see!!! 100%", 'the “quoted” text’s end', 'ﬁne ﬂow',
         'tom &amp; jerry &lt;3 &quot;x&quot; &#39;y&#39;', 'Привет, мир!', '🙂 👩🏽‍🚀',
         'a\nb\tc d', 'word ' * 400, '<|endoftext|> a <|startoftext|> <start_of_text> </s> <pad>', 'ＦＵＬＬ １２３ width', 'a' * 500,
         'é e\u0301 naïve café', 'a\u200bb\u00adc\ufeff', '你好，世界。', '__init__ a_b', '…... ½ Ⅷ']


def timm_vit(name, **own):
    def make(pretrained=False, pretrained_cfg=None, pretrained_cfg_overlay=None, cache_dir=None, **kwargs):
        return VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, class_token=False, **own, **kwargs)
    make.__name__, make.__module__ = name, __name__
    return register_model(make)


vit_export_siglip, vit_export_siglip2 = timm_vit('vit_export_siglip'), timm_vit('vit_export_siglip2', act_layer='gelu_tanh', mlp_ratio=3.7362)


@pytest.fixture(scope='module', autouse=True)
def configs(tmp_path_factory):
    from huggingface_hub import constants
    folder, hub = tmp_path_factory.mktemp('configs'), constants.HF_HUB_OFFLINE
    for name, config in CONFIGS.items(): (folder/f'{name}.json').write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    constants.HF_HUB_OFFLINE, threads = True, torch.get_num_threads()
    torch.set_num_threads(1)                                                     # the models are tiny
    yield
    torch.set_num_threads(threads)
    constants.HF_HUB_OFFLINE = hub
    for name in CONFIGS: open_clip.factory._MODEL_CONFIGS.pop(name)
    open_clip.factory._MODEL_CONFIG_PATHS.remove(folder)


@torch.no_grad()
def make(backbone, **kwargs):
    "A model in which no norm is the identity and no bias is zero."
    torch.manual_seed(0)
    model = create_model(backbone, **kwargs).eval()
    for name, p in model.named_parameters():
        if 'logit' not in name: p += torch.randn_like(p) * .05
    return model


@pytest.fixture(scope='module')
def clip(configs): return make('export-clip')

@pytest.fixture(scope='module')
def folder(clip, tmp_path_factory): return to_hugging_face(clip, tmp_path_factory.mktemp('hf')/'clip', recipe='debias', seeds=[0, 1])

@pytest.fixture(scope='module')
def siglip(configs): return make('export-siglip')

@pytest.fixture(scope='module')
def siglip_folder(siglip, tmp_path_factory): return to_hugging_face(siglip, tmp_path_factory.mktemp('hf')/'siglip')


def rows(model, texts=('a small red circle', 'x', 'two blue squares ' * 100, ''), n_pre=(0, 30, 0, 5)):
    return get_tokenizer(model.backbone, model.context_length)(texts, n_pre=n_pre)


def pixels(model, n=2): return torch.randn(n, 3, 32 if 'export' in model.backbone else 48, 32 if 'export' in model.backbone else 48, generator=torch.Generator().manual_seed(1))


def smooth(width, height, mode='RGB'):
    small = np.random.default_rng(width * 1000 + height).integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.BICUBIC).convert(mode)


def nothing_left(folder): return [f.name for f in Path(folder).iterdir()] == []


# -- open_clip ---------------------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('backbone,length', [('export-clip', None), ('export-clip-quickgelu', 100), ('export-causal', 77), ('export-siglip', None), ('scenes-siglip', 90)])
@torch.no_grad()
def test_stock_open_clip_loads_it(tmp_path, backbone, length):
    model = make(backbone, context_length=length, keep=8)
    out = to_open_clip(model, tmp_path/'new'/'out', recipe='debias')
    stock = open_clip.create_model(f'local-dir:{out}').eval()
    assert type(stock) in (open_clip.CLIP, open_clip.CustomTextCLIP) and isinstance(model, type(stock))
    assert torch.equal(stock.encode_text(rows(model)), model.encode_text(rows(model))) and torch.equal(stock.encode_image(pixels(model)), model.encode_image(pixels(model)))
    texts = [t for t in TEXTS if '_of_text' not in t]     # in which stock open_clip sees its special tokens
    assert torch.equal(open_clip.get_tokenizer(f'local-dir:{out}')(texts), get_tokenizer(backbone, model.context_length)(texts))
    for k in ('mean', 'std', 'interpolation', 'resize_mode', 'size'): assert tuple(stock.visual.preprocess_cfg[k]) == tuple(model.visual.preprocess_cfg[k])
    named = open_clip.create_model(backbone, force_context_length=model.context_length)
    named.load_state_dict(load_file(out/'open_clip_model.safetensors'), strict=True)
    again = load_checkpoint(out/'open_clip_model.safetensors')
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    for k in ('backbone', 'context_length', 'base_length', 'stretch_factor'): assert getattr(again, k) == getattr(model, k)
    assert json.loads((out/'open_clip_config.json').read_text())['debias_clip']['recipe'] == 'debias' and os.listdir(out.parent) == ['out']


# -- transformers: CLIP ------------------------------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def agree(model, theirs, text, image, atol=1e-5):
    out = theirs(input_ids=text, pixel_values=image)
    for got, want in ((out.text_embeds, model.encode_text(text, normalize=True)), (out.image_embeds, model.encode_image(image, normalize=True)),
                      (theirs.get_text_features(input_ids=text).pooler_output, encode_texts(model, text)),
                      (theirs.get_image_features(pixel_values=image).pooler_output, model.encode_image(image)),
                      (out.logits_per_image / 100, model.get_logits(image, text)[0] / 100)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=atol)


@pytest.mark.parametrize('backbone,length', [('export-clip', None), ('export-clip-quickgelu', 100), ('export-causal', 77)])
@torch.no_grad()
def test_auto_model_gives_our_features(tmp_path, backbone, length):
    from transformers import AutoModel, CLIPModel
    model = make(backbone, context_length=length)
    theirs, info = AutoModel.from_pretrained(to_hugging_face(model, tmp_path/'out'), output_loading_info=True)
    assert type(theirs) is CLIPModel and not any(info.values()) and not theirs.training
    text, config = rows(model), theirs.config.text_config
    assert (config.max_position_embeddings, config.eos_token_id, config.hidden_act) == (model.context_length, 49407, 'quick_gelu' if 'quick' in backbone else 'gelu')
    agree(model, theirs, text, pixels(model))
    padded = torch.where(text.cumsum(1).eq(text.cumsum(1)[:, -1:]), 49407, text)        # the pads behind EOT as Hugging Face's tokeniser has them
    assert (padded[:, -1] == 49407).all() and (text[1, 1:31] == 0).all() and (padded[1, 1:31] == 0).all()
    torch.testing.assert_close(theirs(input_ids=padded, pixel_values=pixels(model)).text_embeds, model.encode_text(text, normalize=True), rtol=1e-5, atol=1e-5)


def test_a_full_size_backbone(monkeypatch):
    torch.manual_seed(0)
    model, found = create_model('ViT-B-16-quickgelu').eval(), []
    own = E._differences
    monkeypatch.setattr(E, '_differences', lambda *a: found.append(own(*a)) or found[0])
    theirs = E._hf_model(model, get_tokenizer('ViT-B-16-quickgelu'))
    assert theirs.config.text_config.max_position_embeddings == 248 and theirs.config.text_config.hidden_act == 'quick_gelu'
    assert set(found[0]) == {'image', 'text'} and max(found[0].values()) < 1e-5


def test_its_folder_comes_back_whole(clip, folder):
    again = load_checkpoint(folder)
    assert type(again) is type(clip) and all(torch.equal(v, again.state_dict()[k]) for k, v in clip.state_dict().items())
    facts = dict(backbone='export-clip', context_length=248, base_length=77, keep=20, stretch_factor=3.0 + 1)
    assert {k: getattr(again, k) for k in facts} == facts
    assert json.loads((folder/'config.json').read_text())['debias_clip'] == facts | dict(recipe='debias', seeds=[0, 1])
    with safe_open(folder/'model.safetensors', 'pt') as f: kept = f.metadata()
    assert kept == dict(format='pt', recipe='debias', seeds='[0, 1]') | {k: str(v) for k, v in facts.items()}
    for length in (77, 196):
        with pytest.raises(ValueError, match=f'77 to 248 .*{length}'): create_model('export-clip', folder, length)
    with pytest.raises(ValueError, match='export-clip, not export-clip-quickgelu'): load_checkpoint(folder, 'export-clip-quickgelu')


def test_a_stretch_of_any_kind_comes_back(tmp_path):
    model = make('export-clip', context_length=100, keep=30)
    again = load_checkpoint(to_hugging_face(model, tmp_path/'out'))
    assert (again.context_length, again.base_length, again.keep) == (100, 77, 30) and again.stretch_factor == model.stretch_factor
    with pytest.raises(ValueError, match='77 to 100'): create_model('export-clip', tmp_path/'out', 248)


@torch.no_grad()
def test_the_text_tower_alone_loads_from_it(clip, folder):
    from transformers import CLIPTextModelWithProjection, CLIPVisionModelWithProjection
    text = CLIPTextModelWithProjection.from_pretrained(folder)(input_ids=rows(clip)).text_embeds
    torch.testing.assert_close(text, clip.encode_text(rows(clip)), rtol=1e-5, atol=1e-5)
    image = CLIPVisionModelWithProjection.from_pretrained(folder)(pixel_values=pixels(clip)).image_embeds
    torch.testing.assert_close(image, clip.encode_image(pixels(clip)), rtol=1e-5, atol=1e-5)


def ids_like_ours(hf, texts):
    got = hf(texts, padding='max_length', truncation=True, return_tensors='pt')
    assert (got.input_ids[got.attention_mask == 0] == 49407).all()
    return got.input_ids.masked_fill(got.attention_mask == 0, 0)


@pytest.fixture(scope='module')
def hf_tokenizer(folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder)


def test_its_tokeniser_is_ours(clip, hf_tokenizer, tmp_path):
    from transformers import AutoTokenizer
    tok = get_tokenizer('export-clip', 248)
    assert hf_tokenizer.model_max_length == 248 and len(hf_tokenizer) == 49408
    for text in TEXTS: assert torch.equal(ids_like_ours(hf_tokenizer, [text]), tok([text])), text
    assert torch.equal(ids_like_ours(hf_tokenizer, TEXTS), tok(TEXTS))
    hf_tokenizer.save_pretrained(tmp_path)
    assert torch.equal(ids_like_ours(AutoTokenizer.from_pretrained(tmp_path), TEXTS), tok(TEXTS))
    assert hf_tokenizer.decode(hf_tokenizer('A “red” circle, naïve!').input_ids, skip_special_tokens=True) == 'a " red " circle , naïve !'


def test_what_pads_are_in_it(hf_tokenizer):
    "Named as a pad, the letter of id 0 would be one in a text too; and the spelling of EOT in a text must not end it."
    assert hf_tokenizer.pad_token_id == hf_tokenizer.eos_token_id == 49407 and hf_tokenizer.bos_token_id == 49406
    assert 0 not in hf_tokenizer('wow! !! ! a!').input_ids
    assert hf_tokenizer('<|endoftext|> a dog').input_ids.count(49407) == 1


CHARS = st.one_of(st.sampled_from("abcdefghij XYZ019 .,;:!?'\"-_/()<>|#\n\t"),
                  st.sampled_from('“”‘’‚„–—…ﬁﬂéüñçßœ你好，。！１Ａ🙂€°½\u00a0\u3000\u200b\ufeff'))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.text(CHARS, max_size=40), st.sampled_from(["it's", "DON'T", '&amp;', '<|endoftext|>', 'a red circle', '!', '...', "'s"])), max_size=8).map(' '.join))
def test_any_text_gives_our_ids(hf_tokenizer, text):
    if repairs(text): return
    assert torch.equal(ids_like_ours(hf_tokenizer, [text]), get_tokenizer('export-clip', 248)([text]))


def repairs(text):
    "Texts that ftfy takes for wrongly decoded ones, which no table of characters can do."
    import ftfy
    return ftfy.fix_text(text) != ftfy.fix_text(text, fix_encoding=False)


@pytest.mark.parametrize('kind', ['clip', 'siglip'])
@pytest.mark.parametrize('size', [(32, 32), (200, 300), (301, 200), (30, 60)])
def test_its_pixels_are_open_clips(clip, folder, siglip, siglip_folder, kind, size):
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from transformers import AutoImageProcessor
    model, where = (clip, folder) if kind == 'clip' else (siglip, siglip_folder)
    ours, picture = image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False), smooth(*size)
    same = AutoImageProcessor.from_pretrained(where, backend='pil')(images=picture, return_tensors='pt').pixel_values[0]
    near = AutoImageProcessor.from_pretrained(where)(images=picture, return_tensors='pt').pixel_values[0]
    torch.testing.assert_close(same, ours(picture), rtol=0, atol=1e-5)
    assert (near - ours(picture)).abs().max() <= 1.001 / 255 / .26


def test_an_odd_overhang_is_cropped_one_pixel_aside(clip, folder):
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from transformers import AutoImageProcessor
    picture = smooth(35, 32)                                                       # three columns too many
    ours = image_transform_v2(PreprocessCfg(**clip.visual.preprocess_cfg), is_train=False)(picture)
    theirs = AutoImageProcessor.from_pretrained(folder, backend='pil')(images=picture, return_tensors='pt').pixel_values[0]
    torch.testing.assert_close(theirs[..., 1:], ours[..., :-1], rtol=0, atol=1e-5)


def test_squashed_pictures_stay_squashed(tmp_path):
    from transformers import AutoImageProcessor
    model, _, transform = create_model_and_transforms('export-siglip')
    model.visual.preprocess_cfg |= dict(mean=(.5, .5, .5), std=(.5, .5, .5), resize_mode='squash')
    from open_clip.transform import PreprocessCfg, image_transform_v2
    got = AutoImageProcessor.from_pretrained(to_hugging_face(model, tmp_path/'out'), backend='pil')(images=smooth(90, 40), return_tensors='pt').pixel_values[0]
    torch.testing.assert_close(got, image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)(smooth(90, 40)), rtol=0, atol=1e-5)
    model.visual.preprocess_cfg |= dict(resize_mode='longest')
    with pytest.raises(ValueError, match='longest.*to_open_clip'): to_hugging_face(model, tmp_path/'two')
    assert os.listdir(tmp_path) == ['out']


@torch.no_grad()
def test_half_precision_and_wrappers(clip, tmp_path):
    half = copy.deepcopy(clip).half()
    for name, wrapped, plain in (('half', half, half), ('compiled', torch.compile(clip, backend='eager'), clip)):
        got = load_file(to_hugging_face(wrapped, tmp_path/name)/'model.safetensors')
        assert all(v.dtype == torch.float32 for v in got.values())
        assert all(torch.equal(v, p.float()) for v, p in zip(load_checkpoint(tmp_path/name).state_dict().values(), plain.state_dict().values()))
    assert next(half.parameters()).dtype == torch.float16                           # the caller's own stays as it was
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/group', rank=0, world_size=1)
    try: assert (to_open_clip(torch.nn.parallel.DistributedDataParallel(clip), tmp_path/'ddp')/'open_clip_config.json').exists()
    finally: torch.distributed.destroy_process_group()


# -- transformers: what is refused -------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('backbone,reason', [
    ('export-scale', '4 tensors do not fit CLIPModel: .*ls_1.gamma has no place'), ('export-avg', 'image features differ'), ('export-bias', 'logit_bias has no place'),
    ('export-resnet', "plain ViT, and this one is open_clip's ModifiedResNet"), ('export-timm', "plain ViT, and this one is timm's VisionTransformer"),
    ('scenes-siglip', "attention pool, and this one is open_clip's VisionTransformer")])
def test_what_transformers_cannot_compute_is_refused_with_the_reason(tmp_path, backbone, reason):
    model = make(backbone, keep=8)
    with pytest.raises(ValueError, match=f'{backbone} cannot be written.*{reason}.*to_open_clip'): to_hugging_face(model, tmp_path/'out')
    assert nothing_left(tmp_path)
    stock = open_clip.create_model(f"local-dir:{to_open_clip(model, tmp_path/'out')}").eval()
    with torch.no_grad(): assert torch.equal(stock.encode_image(pixels(model)), model.encode_image(pixels(model)))


def test_a_model_that_is_not_its_backbones_is_refused(clip, tmp_path):
    broken = copy.deepcopy(clip)
    with torch.no_grad(): broken.ln_final.weight[3] = float('nan')
    with pytest.raises(ValueError, match='text features differ by nan'): to_hugging_face(broken, tmp_path/'out')
    more = copy.deepcopy(clip)
    more.adapter = torch.nn.Linear(2, 2)
    for write in (to_hugging_face, to_open_clip):
        with pytest.raises(ValueError, match='2 unexpected: adapter.weight'): write(more, tmp_path/'out')
        with pytest.raises(ValueError, match='does not say which backbone'): write(open_clip.CLIP(**copy.deepcopy(CLIP)), tmp_path/'out')
    assert nothing_left(tmp_path)


@pytest.mark.parametrize('backbone', ['ViT-B-16', 'ViT-L-14-quickgelu', 'ViT-L-14-336-quickgelu', 'ViT-H-14', 'ViT-B-16-SigLIP', 'ViT-B-16-SigLIP2', 'ViT-SO400M-14-SigLIP-384'])
def test_every_tensor_of_real_backbones_has_a_place(backbone, tmp_path):
    with torch.device('meta'): model = create_model(backbone)
    tok = get_tokenizer(backbone, path=pieces(tmp_path/'pieces') if 'SigLIP' in backbone else None)
    kind, config, state = E._converted(model, tok)
    assert kind.__name__ == ('SiglipModel' if 'SigLIP' in backbone else 'CLIPModel') and config.text_config.max_position_embeddings == model.context_length
    assert sum(v.numel() for v in state.values()) == sum(v.numel() for v in model.state_dict().values())


# -- transformers: SigLIP ----------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('backbone,act', [('export-siglip', 'gelu'), ('export-siglip2', 'gelu_pytorch_tanh')])
def test_auto_model_gives_siglips_features(tmp_path, backbone, act):
    from transformers import AutoModel, SiglipModel
    model = make(backbone)
    theirs, info = AutoModel.from_pretrained(to_hugging_face(model, tmp_path/'out', recipe='debias'), output_loading_info=True)
    assert type(theirs) is SiglipModel and not any(info.values()) and theirs.config.debias_clip['context_length'] == theirs.config.text_config.max_position_embeddings == 196
    assert theirs.config.text_config.hidden_act == theirs.config.vision_config.hidden_act == act
    agree(model, theirs, rows(model), pixels(model))
    with torch.no_grad(): bias = theirs(input_ids=rows(model), pixel_values=pixels(model)).logits_per_text
    assert torch.allclose(theirs.logit_bias, torch.tensor(-10.)) and bias.max() < 5


def pieces(folder):
    "A tokeniser of T5's kind, as SigLIP's own: unigram pieces, every word behind ▁."
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    vocab = [('<pad>', 0.), ('</s>', 0.), ('<unk>', 0.)] + [(c, -9.) for c in '▁abcdefghijklmnopqrstuvwxyz0123456789'] + [(f'▁{w}', -3.) for w in 'a small red circle house two'.split()]
    raw = Tokenizer(models.Unigram(vocab, unk_id=2))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.post_processor = processors.TemplateProcessing(single='$A </s>', special_tokens=[('</s>', 1)])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token='</s>', pad_token='</s>', unk_token='<unk>').save_pretrained(folder)
    return folder


@pytest.mark.parametrize('kind', ['bytes', 'pieces'])
def test_siglips_tokeniser_is_ours(siglip, tmp_path, kind):
    from transformers import AutoTokenizer
    path = ASSETS/'tokenizers'/'scenes-siglip' if kind == 'bytes' else pieces(tmp_path/'pieces')
    hf = AutoTokenizer.from_pretrained(to_hugging_face(siglip, tmp_path/'out', path))
    tok = get_tokenizer('export-siglip', 196, path)
    for text in TEXTS:
        got = hf([text], padding='max_length', truncation=True, return_tensors='pt')
        assert list(got) == ['input_ids'] and torch.equal(got.input_ids, tok([text])), text


def test_a_tokeniser_with_unknown_steps_is_refused(siglip, tmp_path):
    from tokenizers import normalizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    fast = AutoTokenizer.from_pretrained(pieces(tmp_path/'pieces'))
    tok = get_tokenizer('export-siglip', 196, tmp_path/'pieces')
    assert isinstance(E._check_ids(E._hf_tokenizer(tok), tok), PreTrainedTokenizerFast)
    raw = fast.backend_tokenizer
    raw.normalizer = normalizers.Replace('circle', 'house')
    with pytest.raises(ValueError, match='A small red circle'): E._check_ids(PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=196, pad_token='</s>'), tok)


def test_a_tokeniser_that_is_not_to_be_had(tmp_path, monkeypatch):
    model = create_model('export-siglip')
    for write in (to_hugging_face, to_open_clip):
        with pytest.raises(ValueError, match='no tokeniser folder'): write(model, tmp_path/'out', tmp_path/'nowhere')
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, 'export-siglip', open_clip.factory._MODEL_CONFIGS['export-siglip'])
    config = copy.deepcopy(open_clip.get_model_config('export-siglip'))
    config['text_cfg']['hf_tokenizer_name'] = 'nobody/none'
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, 'export-siglip', config)
    with pytest.raises(ValueError, match='neither in the local cache nor reachable'): to_hugging_face(model, tmp_path/'out')
    assert nothing_left(tmp_path)


# -- sentence-transformers ---------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', ['clip', 'siglip'])
@torch.no_grad()
def test_sentence_transformers(clip, folder, siglip, siglip_folder, kind, tmp_path):
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from sentence_transformers import SentenceTransformer
    model, where = (clip, folder) if kind == 'clip' else (siglip, siglip_folder)
    st_model = SentenceTransformer(str(where), device='cpu')
    texts, pictures = ['a small red circle!', 'x', 'two “blue” squares ' * 100], [smooth(32, 32), smooth(32, 32, 'L')]
    want = model.encode_text(get_tokenizer(model.backbone, model.context_length)(texts))
    transform = image_transform_v2(PreprocessCfg(**model.visual.preprocess_cfg), is_train=False)
    for again in (st_model, st_model.save(str(tmp_path/'again')) or SentenceTransformer(str(tmp_path/'again'), device='cpu')):
        np.testing.assert_allclose(again.encode(texts), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(again.encode(pictures), model.encode_image(torch.stack([transform(p) for p in pictures])), rtol=1e-5, atol=1e-5)
        assert again.max_seq_length == model.context_length
    late, long = 'two blue squares ' * 30, texts[2]                                # words after the 77th token count, those after the row do not
    a, b, c, d = st_model.encode([late + 'dog', late + 'cat', long + 'dog', long + 'cat'])
    assert np.abs(a - b).max() > 1e-3 and np.abs(c - d).max() < 1e-6


# -- diffusers ---------------------------------------------------------------------------------------------------------------------------------------------

PROMPT = 'a small red circle, and ' * 30 + 'a blue square'


@pytest.fixture(scope='module')
def words(clip):
    "CLIP's tokenisers as the published pipelines have them: SDXL's second one pads with the letter of id 0."
    from transformers import CLIPTokenizer
    bpe = get_tokenizer('export-clip')._words.bpe
    vocab = {dict(zip((49406, 49407), ('<|startoftext|>', '<|endoftext|>'))).get(v, k): v for k, v in bpe.encoder.items()}
    return [CLIPTokenizer(vocab=vocab, merges=list(bpe.bpe_ranks), pad_token=pad) for pad in ('<|endoftext|>', '!')]


def encoder(kind, width, **more):
    import transformers
    torch.manual_seed(2)
    return getattr(transformers, kind)(transformers.CLIPTextConfig(hidden_size=width, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, projection_dim=width, **more)).eval()


def pipeline(words, kind='sd', width=64, **more):
    import diffusers
    torch.manual_seed(1)
    for t in words: t.model_max_length = 77
    unet = lambda dim, **k: diffusers.UNet2DConditionModel(sample_size=8, block_out_channels=(32,), layers_per_block=1, down_block_types=('CrossAttnDownBlock2D',),
        up_block_types=('CrossAttnUpBlock2D',), cross_attention_dim=dim, attention_head_dim=8, norm_num_groups=8, **k)
    parts = dict(vae=diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8), scheduler=diffusers.EulerDiscreteScheduler(steps_offset=1),
                 tokenizer=words[0], text_encoder=encoder('CLIPTextModel', width))
    if kind == 'sd': out = diffusers.StableDiffusionPipeline(**parts | dict(unet=unet(width), safety_checker=None, feature_extractor=None, requires_safety_checker=False) | more)
    else: out = diffusers.StableDiffusionXLPipeline(**parts | dict(text_encoder_2=encoder('CLIPTextModelWithProjection', 48), tokenizer_2=words[1], add_watermarker=False,
        unet=unet(width + 48, addition_embed_type='text_time', addition_time_embed_dim=8, projection_class_embeddings_input_dim=96)) | more)
    out.set_progress_bar_config(disable=True)
    return out


def draw(pipe, prompt=PROMPT, **more):
    return torch.from_numpy(pipe(prompt, num_inference_steps=2, height=8, width=8, output_type='np', generator=torch.Generator().manual_seed(0), **more).images)


@torch.no_grad()
def layers(model, tokens):
    "Our text tower's states: after the last layer and its norm, and before the last layer."
    x = model.token_embedding(tokens) + model.positional_embedding
    for block in model.transformer.resblocks[:-1]: x = block(x, attn_mask=model.attn_mask)
    return model.ln_final(model.transformer.resblocks[-1](x, attn_mask=model.attn_mask)), x


def ids(tokenizer, prompt, length): return tokenizer([prompt], padding='max_length', truncation=True, max_length=length, return_tensors='pt').input_ids


@torch.no_grad()
def test_stable_diffusion_reads_long_prompts(clip, words, tmp_path):
    import diffusers
    pipe = pipeline(words)
    assert to_diffusers(clip, pipe) is pipe
    assert pipe.tokenizer.model_max_length == pipe.text_encoder.config.max_position_embeddings == 248 and pipe.text_encoder.config.debias_clip['base_length'] == 77
    states = pipe.encode_prompt(PROMPT, 'cpu', 1, False)[0]
    tokens = ids(pipe.tokenizer, PROMPT, 248)
    assert states.shape == (1, 248, 64) and 77 < int((tokens[0] == 49407).nonzero()[0]) < 248
    torch.testing.assert_close(states, layers(clip, tokens)[0], rtol=1e-5, atol=1e-5)
    picture = draw(pipe)
    assert picture.shape == (1, 8, 8, 3) and torch.equal(draw(pipe), picture)
    for change in ('blue', 'square'): assert (draw(pipe, PROMPT.replace(change, 'dog')) - picture).abs().max() > 1e-4    # the last words are read
    assert not torch.equal(draw(pipe, negative_prompt=PROMPT), picture)
    pipe.save_pretrained(tmp_path)
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert again.tokenizer.model_max_length == 248 and torch.equal(draw(again), picture) and again.text_encoder.config.debias_clip['backbone'] == 'export-clip'


@torch.no_grad()
def test_sdxl_reads_long_prompts(clip, words, tmp_path):
    import diffusers
    pipe, short = pipeline(words, 'xl'), 'a small red circle'
    rows77, old = ids(pipe.tokenizer_2, PROMPT, 77), copy.deepcopy(pipe.text_encoder_2)
    to_diffusers(clip, pipe)
    second = pipe.text_encoder_2
    assert [t.model_max_length for t in (pipe.tokenizer, pipe.tokenizer_2)] == [248, 248] == [e.config.max_position_embeddings for e in (pipe.text_encoder, second)]
    assert torch.equal(second.text_model.embeddings.position_embedding.weight, stretch_positions(old.text_model.embeddings.position_embedding.weight))
    states, _, pooled, _ = pipe.encode_prompt(PROMPT, device='cpu', do_classifier_free_guidance=False)
    tokens = [ids(t, PROMPT, 248) for t in (pipe.tokenizer, pipe.tokenizer_2)]
    assert states.shape == (1, 248, 64 + 48) and pooled.shape == (1, 48)
    torch.testing.assert_close(states[..., :64], layers(clip, tokens[0])[1], rtol=1e-5, atol=1e-5)                        # the last layer but one
    assert torch.equal(pooled, second(tokens[1]).text_embeds) and torch.equal(states[..., 64:], second(tokens[1], output_hidden_states=True).hidden_states[-2])
    before, after = (e(rows77, output_hidden_states=True).hidden_states[-2][0] for e in (old, second))                    # what is equal after the stretch: up to position keep
    assert torch.equal(before[:21], after[:21]) and not torch.isclose(before[21:], after[21:]).all(1).any()
    pooled = [e(ids(pipe.tokenizer_2, short, 77)).text_embeds for e in (old, second)]
    assert torch.equal(*pooled)
    picture = draw(pipe)
    assert picture.shape == (1, 8, 8, 3) and (draw(pipe, PROMPT.replace('square', 'dog')) - picture).abs().max() > 1e-4
    pipe.save_pretrained(tmp_path)
    again = diffusers.StableDiffusionXLPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(draw(again), picture)
    to_diffusers(clip, pipe)                                                                                               # a second time changes nothing
    assert torch.equal(draw(pipe), picture)


@torch.no_grad()
def test_the_second_encoder_is_stretched_as_the_model_was(words):
    model, pipe = make('export-clip', context_length=120, keep=30), pipeline(words, 'xl').to(torch.float16)
    table = pipe.text_encoder_2.text_model.embeddings.position_embedding.weight.clone()
    to_diffusers(model, pipe)
    assert torch.equal(pipe.text_encoder_2.text_model.embeddings.position_embedding.weight, stretch_positions(table, 90 / 47, 30))
    assert pipe.text_encoder.dtype == pipe.text_encoder_2.dtype == torch.float16 and pipe.tokenizer_2.model_max_length == 120


def test_pipelines_that_do_not_fit(clip, siglip, words):
    def refused(model, pipe, *says):
        modules = {k: v for k, v in pipe.components.items() if k.startswith('t')}
        with pytest.raises(ValueError, match='.*'.join(says)): to_diffusers(model, pipe)
        assert all(pipe.components[k] is v for k, v in modules.items()) and all(t.model_max_length == 77 for k, t in modules.items() if k.startswith('tokenizer') and t is not None)
    refused(clip, pipeline(words, width=32), '64 wide', 'takes 32')
    refused(clip, pipeline(words, 'xl', width=32), '64 wide', 'takes 32 beside the 48')
    refused(siglip, pipeline(words), 'siglip family')
    refused(clip, pipeline(words, 'xl', text_encoder=None, tokenizer=None), 'StableDiffusionXLPipeline is not', 'NoneType and CLIPTextModelWithProjection')
    refused(clip, pipeline(words, text_encoder=encoder('CLIPTextModelWithProjection', 64)), 'is not Stable Diffusion')
    refused(clip, pipeline(words, 'xl', text_encoder_2=encoder('CLIPTextModelWithProjection', 48, max_position_embeddings=96)), '96 positions', 'from 77', '248 already')
    learnt = pipeline([copy.deepcopy(words[0])])
    learnt.tokenizer.add_tokens(['<my-cat>'])
    refused(clip, learnt, '49409 tokens', 'textual inversion')


# -- faults of the disk and of the surroundings ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('write', [to_open_clip, to_hugging_face])
def test_a_folder_that_holds_something_is_left_alone(clip, tmp_path, write, monkeypatch):
    out = tmp_path/'out'
    out.mkdir()
    (out/'notes.txt').write_text('mine')
    monkeypatch.setattr(E, '_plain', lambda *_: pytest.fail('worked before it looked'))
    for path in (out, out/'notes.txt', tmp_path, '.'):
        with pytest.raises(ValueError, match='holds something'): write(clip, path)
    assert (out/'notes.txt').read_text() == 'mine' and os.listdir(tmp_path) == ['out'] and os.listdir(out) == ['notes.txt']
    monkeypatch.undo()
    (out/'notes.txt').unlink()
    assert len(os.listdir(write(clip, str(out)))) > 1 and os.listdir(tmp_path) == ['out']


@pytest.mark.parametrize('write', [to_open_clip, to_hugging_face])
@pytest.mark.parametrize('fault', [OSError(28, 'No space left on device'), SafetensorError('I/O error: No space left on device'), KeyboardInterrupt('No space left')])
def test_a_write_that_fails_leaves_nothing(clip, tmp_path, write, fault, monkeypatch):
    def dies(tensors, path, metadata):
        Path(path).write_bytes(b'half')
        raise fault
    monkeypatch.setattr(E, 'save_file', dies)
    with pytest.raises(KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else OSError, match='No space left'): write(clip, tmp_path/'out')
    assert nothing_left(tmp_path)


def test_a_place_that_cannot_be_written(clip, tmp_path):
    (tmp_path/'file').write_text('')
    with pytest.raises(OSError, match='out could not be written.*name another folder'): to_open_clip(clip, tmp_path/'file'/'out')
    assert os.listdir(tmp_path) == ['file']


def test_a_folder_cut_short_is_refused(clip, folder, tmp_path):
    for name in ('config.json', 'model.safetensors'): (tmp_path/name).write_bytes((folder/name).read_bytes())
    data = (tmp_path/'model.safetensors').read_bytes()
    (tmp_path/'model.safetensors').write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match='cannot be read'): load_checkpoint(tmp_path)
    (tmp_path/'model.safetensors').unlink()
    with pytest.raises(ValueError, match='model.safetensors'): load_checkpoint(tmp_path)


def test_without_the_extra(clip, words, tmp_path, monkeypatch):
    pipe = pipeline(words)
    monkeypatch.setitem(sys.modules, 'transformers', None)
    for call in (lambda: to_hugging_face(clip, tmp_path/'out'), lambda: to_diffusers(clip, pipe)):
        with pytest.raises(ImportError, match=r"transformers.*pip install 'debias_clip\[hf\]'"): call()
    assert nothing_left(tmp_path) and pipe.tokenizer.model_max_length == 77
    to_open_clip(clip, tmp_path/'out')
    top = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split('.')[0] for n in ast.parse(Path(E.__file__).read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))}
    assert not top & {'transformers', 'tokenizers', 'diffusers', 'sentence_transformers', 'timm'}


def test_a_folder_that_transformers_saved_again_keeps_its_stretch(tmp_path):
    "Fine-tuned with transformers, the file's metadata are gone; config.json still tells keep and factor."
    import transformers
    model = create_model('export-clip', keep=30, context_length=124)
    to_hugging_face(model, tmp_path/'first', recipe='debias')
    transformers.CLIPModel.from_pretrained(tmp_path/'first').save_pretrained(tmp_path/'again')
    back = load_checkpoint(tmp_path/'again', model.backbone)
    assert (back.keep, back.base_length, back.stretch_factor, back.context_length) == (30, 77, 2, 124)
