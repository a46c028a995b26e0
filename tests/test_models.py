"""Models: the stretch, the refusal of wrong lengths, the one place that encodes text, frozen rows, and checkpoints of every layout.

The checkpoint fixtures are written from the published key lists, not by `save_checkpoint`, and checked against plain open_clip models.
"""
import copy
import json
import os
import pickle
import warnings
import zipfile

import open_clip
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import debias_clip.models as M
from debias_clip.models import (create_model, create_model_and_transforms, encode_texts, extend_positions, freeze_positions, load_checkpoint, save_checkpoint,
                                stretch_positions)
from debias_clip.tokens import get_tokenizer, model_config

TINY = dict(embed_dim=16, vision_cfg=dict(image_size=16, layers=1, width=64, patch_size=8), text_cfg=dict(context_length=77, vocab_size=49408, width=64, heads=1, layers=2))
CONFIGS = {'tiny-clip': TINY, 'tiny-clip-quickgelu': TINY | dict(quick_gelu=True),
           'tiny-causal': TINY | dict(custom_text=True, embed_dim=24),   # argmax pooling in .text, as EVA's and the release's
           'tiny-siglip': TINY | dict(custom_text=True, init_logit_bias=-10, text_cfg=TINY['text_cfg'] | dict(
               context_length=64, vocab_size=3072, hf_tokenizer_name='scenes-siglip', tokenizer_kwargs=dict(clean='canonicalize'), no_causal_mask=True, proj_bias=True, pool_type='last'))}


@pytest.fixture(scope='module', autouse=True)
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp('configs')
    for name, config in CONFIGS.items(): (folder/f'{name}.json').write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    yield
    for name in CONFIGS: open_clip.factory._MODEL_CONFIGS.pop(name)
    open_clip.factory._MODEL_CONFIG_PATHS.remove(folder)


def rows(length, n=5, vocab=49406):
    "Random captions of different lengths, prefix pads in front of some, one as long as can be."
    out = torch.zeros(n, length, dtype=torch.long)
    for i, k in enumerate([1, 7, 3, length - 2, 12][:n]):
        pre = min(4 * (i % 2), length - 2 - k)
        out[i, 0], out[i, 1 + pre:1 + pre + k], out[i, 1 + pre + k] = 49406, torch.randint(1, vocab, (k,)), 49407
    return out


# -- the stretch -------------------------------------------------------------------------------------------------------------------------------------------

def stretch_by_hand(table, factor, keep):
    "Long-CLIP's rule, row by row, for whole factors."
    out = [table[i] for i in range(keep)]
    for i in range(keep, len(table) - 1): out += [table[i] * (1 - k / factor) + table[i + 1] * k / factor for k in range(factor)]
    return torch.stack(out + [table[-1] + (table[-1] - table[-2]) * k / factor for k in range(factor)])


@pytest.mark.parametrize('base,keep,factor', [(77, 20, 4), (64, 20, 4), (32, 8, 4), (16, 0, 3), (77, 20, 1), (77, 76, 4), (40, 10, 7)])
def test_stretch_is_long_clips(base, keep, factor):
    table = torch.randn(base, 6)
    got = stretch_positions(table, factor, keep)
    assert got.shape == (keep + factor * (base - keep), 6) and torch.equal(got[:keep], table[:keep])
    torch.testing.assert_close(got, stretch_by_hand(table, factor, keep))


def test_stretch_to_any_length_keeps_order_and_dtype():
    line = torch.arange(77.).unsqueeze(1)
    for length in (78, 100, 128, 247, 512):
        got = stretch_positions(line, (length - 20) / 57, 20)
        assert len(got) == length and torch.equal(got[:20], line[:20]) and (got.diff(dim=0) > 0).all() and got.max() < 77
    assert stretch_positions(line.half()).dtype == torch.float16 and stretch_positions(line.bfloat16()).dtype == torch.bfloat16
    for bad in (dict(keep=77), dict(keep=-1), dict(factor=.5)):
        with pytest.raises(ValueError): stretch_positions(line, **bad)


REAL = ['ViT-B-16-quickgelu', 'ViT-L-14-quickgelu', 'ViT-L-14-336-quickgelu', 'ViT-B-16', 'ViT-B-16-SigLIP', 'ViT-B-16-SigLIP2']


@pytest.mark.parametrize('backbone', REAL + ['scenes-clip', 'scenes-gelu', 'scenes-siglip'])
def test_stretch_of_each_backbone(backbone):
    base = model_config(backbone)['text_cfg']['context_length']
    keep = 8 if base < 64 else 20
    assert base == (64 if 'SigLIP' in backbone else 77) or 'scenes' in backbone
    for length in (None, base, base + 33):
        with torch.device('meta'): model = create_model(backbone, context_length=length, keep=keep)
        tower, want = getattr(model, 'text', model), length or keep + 4 * (base - keep)
        assert isinstance(model, open_clip.CustomTextCLIP if 'siglip' in backbone.lower() else open_clip.CLIP)
        assert model.context_length == tower.context_length == len(tower.positional_embedding) == want
        assert tower.attn_mask is None or tower.attn_mask.shape == (want, want)
        assert (model.base_length, model.keep, model.backbone) == (base, keep, backbone)
        assert isinstance(tower.positional_embedding, nn.Parameter) and 'positional_embedding' in dict(tower.named_parameters())


def test_the_causal_mask_is_causal():
    mask = create_model('tiny-clip').attn_mask
    assert torch.equal(mask, torch.full((248, 248), float('-inf')).triu(1))
    assert 'attn_mask' not in create_model('tiny-clip').state_dict()


def test_lengths_that_cannot_be():
    for keep in (77, 90):
        with pytest.raises(ValueError, match='keep'): create_model('tiny-clip', keep=keep)
    with pytest.raises(ValueError, match='shorter'): create_model('tiny-clip', context_length=76)
    with pytest.raises(ValueError, match='already'): extend_positions(create_model('tiny-clip'), 300)


@torch.no_grad()
def test_random_weights_are_stretched_not_drawn_anew():
    torch.manual_seed(3); base = create_model('tiny-clip', context_length=77)
    torch.manual_seed(3); long = create_model('tiny-clip')
    assert torch.equal(long.positional_embedding, stretch_positions(base.positional_embedding))


# -- encoding ----------------------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('backbone', ['tiny-clip', 'tiny-causal', 'tiny-siglip'])
def test_a_wrong_length_is_refused(backbone):
    model, image = create_model(backbone), torch.zeros(1, 3, 16, 16)
    for n in (64, 77, model.context_length - 1, model.context_length + 1):
        text = torch.ones(1, n, dtype=torch.long)
        for call in (model.encode_text, lambda t: model(image, t), lambda t: model.get_logits(image, t), lambda t: encode_texts(model, t),
                     lambda t: model.forward_intermediates(text=t, text_output_fmt='NLC')):
            with pytest.raises(ValueError, match=f'context_length={model.context_length}'): call(text)
    with pytest.raises(ValueError): model.encode_text(torch.ones(model.context_length, dtype=torch.long))
    assert len(model(image, torch.ones(1, model.context_length, dtype=torch.long))) in (3, 4)


@pytest.mark.parametrize('backbone', ['tiny-clip', 'tiny-clip-quickgelu', 'tiny-causal', 'tiny-siglip', 'scenes-clip'])
@pytest.mark.parametrize('longest', [True, False])
def test_encode_texts_is_encode_text(backbone, longest):
    model = create_model(backbone)
    text = rows(model.context_length) if longest else rows(model.context_length, 3)
    if backbone == 'tiny-siglip': text = text.clamp(max=3071)
    a, b = (f(text, normalize=True) for f in (model.encode_text, lambda *k, **w: encode_texts(model, *k, **w)))
    assert (a - b).abs().max() < 1e-6
    torch.testing.assert_close(encode_texts(model, text), model.encode_text(text), rtol=1e-5, atol=1e-5)
    weights, names = torch.randn_like(a), [n for n, p in model.named_parameters() if not n.startswith(('visual', 'logit'))]
    grads = [torch.autograd.grad((f * weights).sum(), [model.get_parameter(n) for n in names]) for f in (a, b)]
    for name, x, y in zip(names, *grads): assert (x - y).abs().max() <= 1e-6 * max(1, x.abs().max()), name
    assert encode_texts(model, text[:0]).shape == (0, a.shape[1])


def pairs(lengths, pads, length=248, vocab=49406):
    "Token rows of captions of so many words behind so many pads, cut to what fits; words may be 0, which is the pad's id."
    out = torch.zeros(len(lengths), length, dtype=torch.long)
    for row, k, pre in zip(out, lengths, pads):
        pre = min(pre, length - 2)
        k = min(k, length - 2 - pre)
        row[0], row[1 + pre:1 + pre + k], row[1 + pre + k] = 49406, torch.randint(0, vocab, (k,)), 49407
    return out


def text_names(model): return [n for n, p in model.named_parameters() if not n.startswith(('visual', 'logit'))]

def agree(model, text):
    "Features and the gradient of every text parameter, fast and slow."
    a, b = model.encode_text(text), encode_texts(model, text)
    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    weights, names = torch.randn_like(a), text_names(model)
    grads = [torch.autograd.grad((f*weights).sum(), [model.get_parameter(n) for n in names]) for f in (a, b)]
    for name, x, y in zip(names, *grads): assert (x - y).abs().max() <= 1e-5*max(1, x.abs().max()), name


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.sampled_from(['tiny-clip', 'tiny-causal', 'tiny-clip-quickgelu']), st.lists(st.tuples(st.integers(0, 250), st.sampled_from([0, 0, 1, 2, 3, 20, 100, 246, 250])), min_size=1, max_size=20))
def test_each_token_once_gives_the_same_features_and_gradients(backbone, captions):
    agree(create_model(backbone), pairs(*zip(*captions)))


def test_rows_that_no_tokenizer_makes():
    model = create_model('tiny-clip')
    text = pairs([5, 0, 30, 2, 9], [0, 246, 7, 3, 60])
    text[0] = 0                                      # no mark at all: argmax is position 0
    text[1, 0] = 7                                   # another first token: nothing is shared with it
    text[2, 3] = 49407                               # an EOT among the pads
    text[3, 1:] = torch.randint(1, 49406, (247,))    # no EOT
    for rows in (text, text[1:], text.flip(0), text[[4, 4, 4]]): agree(model, rows)
    torch.testing.assert_close(encode_texts(model, text[[4, 2, 4]])[0], encode_texts(model, text[[4]])[0], rtol=1e-5, atol=1e-5)


def test_shared_pads_are_computed_once():
    model, seen = create_model('tiny-clip'), []
    model.token_embedding.register_forward_pre_hook(lambda m, args: seen.append(args[0].numel()))
    tok, texts = get_tokenizer('tiny-clip'), ['a red circle', 'a', 'two squares and']
    encode_texts(model, tok(texts, n_pre=[0, 9, 200]))
    assert seen.pop() == (1 + 3 + 1) + (1 + 200) + (1 + 1) + (3 + 1)      # SOT, words, EOT; SOT and the longest prefix; words and EOT of the padded
    encode_texts(model, tok(texts))
    assert seen.pop() == 5 + 3 + 5 and not seen


@pytest.mark.parametrize('backbone', ['tiny-clip', 'tiny-causal'])
def test_layer_scale_frozen_rows_and_locked_weights(backbone):
    model = create_model(backbone)
    tower = getattr(model, 'text', model)
    for block in tower.transformer.resblocks: block.ls_1, block.ls_2 = (open_clip.transformer.LayerScale(64, .3) for _ in 'ab')
    for p in tower.transformer.resblocks[0].parameters(): p.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=.1)
    freeze_positions(model, optimizer)
    text, grads = pairs([30, 5, 60, 3], [0, 40, 0, 100]), []
    for encode in (lambda t: model.encode_text(t), lambda t: encode_texts(model, t)):
        optimizer.zero_grad()
        encode(text).square().sum().backward()
        assert tower.positional_embedding.grad[:20].abs().max() == 0 < tower.positional_embedding.grad[20:].abs().max()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for n, g in grads[0].items(): assert (g - grads[1][n]).abs().max() <= 1e-5*max(1, g.abs().max()), n


@pytest.mark.parametrize('change', ['hook', 'block', 'attention'])
def test_a_tower_of_another_kind_encodes_as_open_clip_does(change):
    model, text, seen = create_model('tiny-clip'), pairs([30, 5], [0, 40]), []
    blocks = model.transformer.resblocks
    want = model.encode_text(text)
    if change == 'hook': blocks[0].mlp.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    if change == 'block': blocks[1].__class__ = type('Other', (type(blocks[1]),), dict(forward=lambda self, x, attn_mask=None: x))
    if change == 'attention': blocks[1].attn.__class__ = type('Other', (nn.MultiheadAttention,), dict(forward=lambda self, q, *a, **k: (0*q, None)))
    assert torch.equal(encode_texts(model, text), model.encode_text(text))
    if change == 'hook': assert torch.equal(encode_texts(model, text), want) and seen and seen[0][1] == 248
    else: assert not torch.allclose(encode_texts(model, text), want, atol=1e-3)


def test_grad_checkpointing_keeps_less_and_changes_nothing():
    model, text, kept, grads = create_model('tiny-clip'), pairs([60]*8 + [20]*8, [0]*8 + list(range(5, 165, 20))), [], []
    for on in (False, True):
        model.set_grad_checkpointing(on)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()*(t.dtype == torch.float32)), t)[1], lambda t: t): out = encode_texts(model, text)
        grads.append(torch.autograd.grad(out.square().sum(), [model.get_parameter(n) for n in text_names(model)]))
        kept.append(sum(saved))
    assert kept[1] < kept[0]/3 and all(map(torch.equal, *grads))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_stays_as_near_as_the_plain_way(dtype):
    model, text = create_model('tiny-clip'), pairs([60, 9, 30, 4], [0, 0, 50, 120])
    exact = model.encode_text(text, normalize=True)
    with torch.autocast('cpu', dtype): plain, ours = model.encode_text(text, normalize=True), encode_texts(model, text, normalize=True)
    assert (ours - exact).abs().max() < max(2*(plain - exact).abs().max(), 1e-2)
    ours.float().square().sum().backward()
    assert all(model.get_parameter(n).grad.isfinite().all() for n in text_names(model))


@torch.no_grad()
def test_what_pads_mean_in_clip():
    model, tok = create_model('tiny-clip').eval(), get_tokenizer('tiny-clip')
    a, moved = model.encode_text(tok(['a red circle'] * 2, n_pre=[0, 30]))
    assert (a - moved).abs().max() > 1e-3                       # pads before the words are attended, and the words sit elsewhere
    text = tok(['a red circle'])
    text[0, 5:] = 7                                             # whatever stands behind EOT is never seen …
    assert torch.allclose(model.encode_text(text)[0], a, atol=1e-5)
    first = tok(['a red circle'], n_pre=4); first[0, 1:5] = 7   # … whatever stands before it is
    assert not torch.allclose(model.encode_text(first), model.encode_text(tok(['a red circle'], n_pre=4)), atol=1e-3)


@torch.no_grad()
def test_what_pads_mean_in_siglip():
    model, tok = create_model('scenes-siglip', context_length=90, keep=8).eval(), get_tokenizer('scenes-siglip', 90)
    for n_pre in (0, 30):
        text = tok(['a red circle'], n_pre=n_pre)
        a = model.encode_text(text)
        for at in (0, n_pre, 50, 89):                          # every position is attended, pads on both sides included
            other = text.clone(); other[0, at] = 300
            assert (model.encode_text(other) - a).abs().max() > 1e-5, at
    full = model.text.transformer(*model.text._embeds(text))
    want = model.text.text_projection(model.text.ln_final(full)[:, -1])
    assert torch.allclose(a, want, atol=1e-6)                   # pooled at the last position of the full row


def test_models_copy_pickle_and_wrap(tmp_path):
    model = create_model('tiny-clip')
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again.encode_text(text := rows(248)), model.encode_text(text))
        assert (again.context_length, again.keep, again.backbone) == (248, 20, 'tiny-clip') and isinstance(again, open_clip.CLIP)
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/group', rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        freeze_positions(wrapped, optimizer := torch.optim.AdamW(wrapped.parameters(), lr=.1))
        before = model.positional_embedding.detach().clone()
        image, text, scale = wrapped(torch.randn(5, 3, 16, 16), rows(248))
        (scale * image @ text.T).sum().backward()
        optimizer.step()
        assert torch.equal(model.positional_embedding[:20], before[:20]) and not torch.equal(model.positional_embedding[20:], before[20:])
        with pytest.raises(ValueError, match='248'): wrapped(torch.randn(1, 3, 16, 16), torch.ones(1, 77, dtype=torch.long))
        assert save_checkpoint(wrapped, tmp_path/'m.safetensors').exists()
    finally: torch.distributed.destroy_process_group()


@pytest.mark.parametrize('make', [lambda p: torch.optim.AdamW(p, lr=.1, weight_decay=.5), lambda p: torch.optim.SGD(p, lr=1e-4, momentum=.9, weight_decay=.5),
                                  lambda p: torch.optim.AdamW(p, lr=.1, weight_decay=.5, foreach=True)])
@pytest.mark.parametrize('backbone', ['tiny-clip', 'tiny-siglip'])
def test_kept_rows_stay_bit_equal(make, backbone):
    model = create_model(backbone, keep=10)
    table, optimizer = getattr(model, 'text', model).positional_embedding, make(model.parameters())
    hooks, text = freeze_positions(model, optimizer), rows(model.context_length)
    if backbone == 'tiny-siglip': text = text.clamp(max=3071)
    def steps(n):
        for _ in range(n):
            optimizer.zero_grad()
            encode_texts(model, text).square().sum().backward()
            assert model.keep != 10 or table.grad[:10].abs().max() == 0 and table.grad[10:].abs().max() > 0
            optimizer.step()
    before = table.detach().clone()
    steps(3)
    assert torch.equal(table[:10], before[:10]) and (table[10:] != before[10:]).any(1).float().mean() > .9
    state = model.state_dict() | {n: torch.randn_like(v) for n, v in model.state_dict().items() if n.endswith('positional_embedding') and 'visual' not in n}
    model.load_state_dict(state)                       # a resumed run holds what it resumed with
    before = table.detach().clone()
    steps(1)
    assert torch.equal(table[:10], before[:10])
    for h in hooks: h.remove()
    model.keep = None
    steps(1)
    assert not torch.equal(table[:10], before[:10])


# -- checkpoints in ----------------------------------------------------------------------------------------------------------------------------------------

def openai_keys(length=77, width=64, layers=2, v_width=64, v_layers=1, embed=16, vocab=49408, grid=2, patch=8):
    "OpenAI's key names with random tensors, as listed for CLIP's released archives."
    shapes = {'positional_embedding': (length, width), 'text_projection': (width, embed), 'logit_scale': (), 'token_embedding.weight': (vocab, width),
              'ln_final.weight': (width,), 'ln_final.bias': (width,), 'visual.class_embedding': (v_width,), 'visual.positional_embedding': (grid ** 2 + 1, v_width),
              'visual.proj': (v_width, embed), 'visual.conv1.weight': (v_width, 3, patch, patch)}
    for part in ('ln_pre', 'ln_post'): shapes |= {f'visual.{part}.weight': (v_width,), f'visual.{part}.bias': (v_width,)}
    for pre, w, n in (('transformer', width, layers), ('visual.transformer', v_width, v_layers)):
        for i in range(n):
            block = {'attn.in_proj_weight': (3 * w, w), 'attn.in_proj_bias': (3 * w,), 'attn.out_proj.weight': (w, w), 'attn.out_proj.bias': (w,), 'ln_1.weight': (w,),
                     'ln_1.bias': (w,), 'ln_2.weight': (w,), 'ln_2.bias': (w,), 'mlp.c_fc.weight': (4 * w, w), 'mlp.c_fc.bias': (4 * w,), 'mlp.c_proj.weight': (w, 4 * w),
                     'mlp.c_proj.bias': (w,)}
            shapes |= {f'{pre}.resblocks.{i}.{k}': v for k, v in block.items()}
    return {k: torch.randn(v) * .1 for k, v in shapes.items()}


def reference(state, quick=True, length=None):
    "open_clip's own model with these tensors."
    config = copy.deepcopy(TINY)
    config['text_cfg']['context_length'] = length or len(state['positional_embedding'])
    model = open_clip.CLIP(**config, quick_gelu=quick)
    model.load_state_dict({k: v.float() for k, v in state.items()})
    return model.eval()


@torch.no_grad()
def same(model, other, n=2):
    image, text = torch.randn(n, 3, 16, 16), rows(model.context_length, 4)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(model.eval().encode_image(image), other.encode_image(image), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(encode_texts(model, text), other.encode_text(text), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.logit_scale, other.logit_scale)


def save(tree, path, how):
    if how == 'safetensors': save_file(tree, path.with_suffix('.safetensors')); return path.with_suffix('.safetensors')
    torch.save(tree, path.with_suffix('.pt')); return path.with_suffix('.pt')


@pytest.mark.parametrize('how', ['pt', 'safetensors'])
@pytest.mark.parametrize('half', [False, True])
def test_openai_and_open_clip_state_dicts(tmp_path, how, half):
    state = openai_keys()
    state = {k: v.half() for k, v in state.items()} if half else state
    extra = dict(input_resolution=torch.tensor(16), context_length=torch.tensor(77), vocab_size=torch.tensor(49408)) if half else {}
    file = save(state | extra, tmp_path/'m', how)
    for name in ('tiny-clip', 'tiny-clip-quickgelu'): same(load_checkpoint(file, name), reference(state, 'quick' in name))
    with pytest.raises(ValueError, match='tiny-clip and tiny-clip-quickgelu.*activation'): load_checkpoint(file)
    long = create_model('tiny-clip-quickgelu', file)
    assert long.context_length == 248 and torch.equal(long.positional_embedding, stretch_positions(state['positional_embedding'].float()))


@pytest.mark.parametrize('wrap', [lambda s: dict(state_dict=s, epoch=3, name='x', optimizer=dict(state={}), scaler={}), lambda s: dict(model=s), lambda s: dict(state_dict=dict(model=s)),
                                  lambda s: {'module.' + k: v for k, v in s.items()}, lambda s: dict(state_dict={'module.' + k: v for k, v in s.items()}),
                                  lambda s: {'module._orig_mod.' + k: v for k, v in s.items()}])
def test_wrappers_and_prefixes(tmp_path, wrap):
    state = openai_keys()
    same(load_checkpoint(save(wrap(state), tmp_path/'m', 'pt'), 'tiny-clip'), reference(state, False))


@pytest.mark.parametrize('quick', [True, False])
@pytest.mark.filterwarnings('ignore:.torch.jit.load. is deprecated')
def test_a_torchscript_archive_gives_its_tensors(tmp_path, quick):
    state = openai_keys()
    model = reference(state, quick)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        traced = torch.jit.trace(model, (torch.randn(1, 3, 16, 16), rows(77, 1)))
        for p in traced.parameters(): p.data = p.data.half()
        traced.save(str(tmp_path/'ViT.pt'))
    got = load_checkpoint(tmp_path/'ViT.pt')
    assert got.backbone == ('tiny-clip-quickgelu' if quick else 'tiny-clip')
    same(got, reference({k: v.half() for k, v in state.items()}, quick))
    with pytest.raises(ValueError, match='name tiny-clip.* instead'): create_model('tiny-clip' if quick else 'tiny-clip-quickgelu', tmp_path/'ViT.pt')


def long_clip_keys(**how):
    state = openai_keys(248)
    return state | dict(positional_embedding_res=torch.randn(248, 64) * .1)


def one_table(state, official=False):
    state = dict(state)
    rest = state.pop('positional_embedding_res')
    if not official: state['positional_embedding'] = torch.cat([state['positional_embedding'][:20], rest[20:]])
    return state


@pytest.mark.parametrize('how', ['pt', 'safetensors'])
def test_long_clip(tmp_path, how):
    state = {k: v.half() for k, v in long_clip_keys().items()}
    model = load_checkpoint(save(state, tmp_path/'m', how))
    assert (model.backbone, model.context_length, model.base_length, model.keep) == ('tiny-clip-quickgelu', 248, 77, 20)
    same(model, reference(one_table(state)))
    with pytest.raises(ValueError, match='QuickGELU.*tiny-clip-quickgelu'): load_checkpoint(tmp_path/f'm.{how}', 'tiny-clip')


@pytest.mark.parametrize('wrapped', [False, True])
def test_smartclip_sets_its_mask_network_aside(tmp_path, wrapped):
    state = long_clip_keys()
    mask = {'mask_net.attn_pool.in_proj_weight': torch.randn(12, 4), 'mask_net.block.ln_1.weight': torch.ones(4), 'mask_net.proj': torch.randn(4, 16)}
    file = save(dict(model=state | mask, epoch=2) if wrapped else state | mask, tmp_path/'m', 'pt')
    same(load_checkpoint(file), reference(one_table(state)))


def test_the_papers_release(tmp_path):
    state = long_clip_keys()
    tower = lambda k: not k.startswith(('visual', 'logit'))
    named = {'module.' + ('text.' + k if tower(k) else k): v for k, v in state.items()}
    file = save(dict(epoch=3, name='debias', state_dict=named, optimizer=dict(state={}, param_groups=[dict(lr=1e-6)]), scaler=dict(scale=65536.)), tmp_path/'epoch_3', 'pt')
    same(load_checkpoint(file), reference(one_table(state)))
    same(load_checkpoint(file, positions='official'), reference(one_table(state, official=True)))
    with pytest.raises(ValueError, match='saved'): load_checkpoint(file, positions='base')
    one = save(one_table(state), tmp_path/'one', 'pt')
    with pytest.raises(ValueError, match='one'): load_checkpoint(one, 'tiny-clip', positions='official')


@pytest.mark.parametrize('length', [77, 248])
@pytest.mark.parametrize('act', ['quick_gelu', 'gelu'])
def test_hugging_face_folder(tmp_path, length, act):
    from transformers import CLIPConfig, CLIPModel
    part = dict(hidden_size=64, intermediate_size=256, num_attention_heads=1, hidden_act=act)
    theirs = CLIPModel(CLIPConfig(projection_dim=16, text_config=part | dict(num_hidden_layers=2, max_position_embeddings=length, vocab_size=49408, eos_token_id=49407),
                                  vision_config=part | dict(num_hidden_layers=1, image_size=16, patch_size=8))).eval()
    theirs.save_pretrained(tmp_path)
    model, image, text = load_checkpoint(tmp_path).eval(), torch.randn(2, 3, 16, 16), rows(length, 3)
    assert model.backbone == ('tiny-clip-quickgelu' if act == 'quick_gelu' else 'tiny-clip') and model.context_length == length and model.base_length == 77
    with torch.no_grad():
        out = theirs(input_ids=text, pixel_values=image)
        torch.testing.assert_close(model.encode_image(image, normalize=True), out.image_embeds, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.encode_text(text, normalize=True), out.text_embeds, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path/'config.json').read_text())
    config['text_config']['num_attention_heads'] = 2
    (tmp_path/'config.json').write_text(json.dumps(config))
    with pytest.raises(ValueError, match='heads'): load_checkpoint(tmp_path)
    (tmp_path/'model.safetensors').unlink()
    with pytest.raises(ValueError, match='model.safetensors'): load_checkpoint(tmp_path)


def hf_keys(state):
    "Hugging Face's names of the same tensors."
    out = {}
    for k, v in state.items():
        side = 'vision_model.' if k.startswith('visual.') else 'text_model.'
        k = k.removeprefix('visual.')
        if 'resblocks' in k:
            _, _, i, rest = k.split('.', 3)
            pre = f'{side}encoder.layers.{i}.'
            if 'in_proj' in rest:
                for x, part in zip('qkv', v.chunk(3)): out[f"{pre}self_attn.{x}_proj.{rest.rsplit('_', 1)[1]}"] = part.clone()
            else:
                for a, b in dict(attn='self_attn', ln_1='layer_norm1', ln_2='layer_norm2', c_fc='fc1', c_proj='fc2').items(): rest = rest.replace(a, b)
                out[pre + rest] = v
        elif k in ('text_projection', 'proj'): out['text_projection.weight' if k[0] == 't' else 'visual_projection.weight'] = v.T.contiguous()
        elif k == 'logit_scale': out[k] = v
        else:
            for a, b in {'ln_pre': 'pre_layrnorm', 'ln_post': 'post_layernorm', 'ln_final': 'final_layer_norm', 'class_embedding': 'embeddings.class_embedding',
                         'conv1': 'embeddings.patch_embedding', 'positional_embedding': 'embeddings.position_embedding.weight', 'token_embedding': 'embeddings.token_embedding'}.items():
                if k.startswith(a): k = k.replace(a, b)
            out[side + k] = v
    return out


def test_fg_clip_is_read_as_its_long_path(tmp_path):
    state = openai_keys(248)
    rest, short = torch.randn(248, 64) * .1, torch.randn(77, 64)
    named = hf_keys(state)
    pre = 'text_model.embeddings.position_embedding'
    named |= {f'{pre}_ori.weight': named.pop(f'{pre}.weight'), f'{pre}_res.weight': rest, f'{pre}.weight': short, 'logit_scale_finegraind': torch.tensor(1.),
              'logit_scale_hardneg': torch.tensor(1.), 'text_filip_projection.weight': named.pop('text_projection.weight'), 'text_projection.weight': torch.randn(16, 64)}
    save_file(named, tmp_path/'model.safetensors')
    part = dict(num_attention_heads=1, hidden_act='quick_gelu')
    (tmp_path/'config.json').write_text(json.dumps(dict(text_config=part, vision_config=part)))
    same(load_checkpoint(tmp_path), reference(one_table(state | dict(positional_embedding_res=rest))))


def test_siglip_state_dict(tmp_path):
    torch.manual_seed(1)
    config = copy.deepcopy(CONFIGS['tiny-siglip']); config.pop('custom_text')
    theirs = open_clip.CustomTextCLIP(**config)
    file = save({k: v.clone() for k, v in theirs.state_dict().items()}, tmp_path/'m', 'safetensors')
    model, text = load_checkpoint(file), torch.randint(0, 3000, (3, 64))
    assert model.backbone == 'tiny-siglip' and model.context_length == 64 and model.logit_bias.item() == -10
    assert torch.equal(model.encode_text(text), theirs.encode_text(text))
    long = create_model('tiny-siglip', file)
    assert long.context_length == 196 and torch.equal(long.text.positional_embedding, stretch_positions(theirs.text.positional_embedding))


def test_every_tensor_must_match(tmp_path):
    state = openai_keys()
    state['visual.proj'] = torch.randn(64, 17)
    state['extra.weight'] = torch.ones(1)
    del state['ln_final.bias'], state['transformer.resblocks.1.ln_2.weight']
    with pytest.raises(ValueError) as e: load_checkpoint(save(state, tmp_path/'m', 'pt'), 'tiny-clip')
    for part in ('2 missing: ', 'ln_final.bias', 'transformer.resblocks.1.ln_2.weight', '1 unexpected: extra.weight', '1 misshaped: visual.proj [64, 17], not [64, 16]', 'nothing was loaded'):
        assert part in str(e.value)
    with pytest.raises(ValueError, match='No backbone'): load_checkpoint(tmp_path/'m.pt')
    wrong = {'clip.' + k: v for k, v in openai_keys().items()}       # the prefix that once made a loader match nothing, silently
    with pytest.raises(ValueError, match='missing'): load_checkpoint(save(wrong, tmp_path/'w', 'pt'), 'tiny-clip')
    with pytest.raises(ValueError, match='known'): load_checkpoint(tmp_path/'w.pt')
    for tree, says in (([1, 2], 'list'), (dict(epoch=1), 'epoch'), ({}, 'state dict')):
        with pytest.raises(ValueError, match=says): load_checkpoint(save(tree, tmp_path/'t', 'pt'), 'tiny-clip')


def test_real_architectures_are_found_by_their_shapes():
    for name in ('ViT-L-14-336-quickgelu', 'ViT-B-16-SigLIP2'):
        with torch.device('meta'): state = create_model(name).state_dict()
        quick = name.endswith('quickgelu')
        assert M._find_backbone(state, quick, 'file') == name
        if 'SigLIP' not in name:
            with pytest.raises(ValueError, match=name): M._find_backbone(state, None, 'file')


# -- files that are not what they should be ----------------------------------------------------------------------------------------------------------------

class Bomb:
    def __init__(self, target): self.target = str(target)
    def __reduce__(self): return os.mkdir, (self.target,)


@pytest.mark.filterwarnings('ignore:.torch.jit.load. is deprecated', 'ignore:Detected pickle protocol')
def test_a_malicious_pickle_is_refused(tmp_path):
    mark = tmp_path/'code-ran'
    file = save(openai_keys() | dict(bomb=Bomb(mark)), tmp_path/'m', 'pt')
    with pytest.raises(ValueError, match='refused.*safetensors'): load_checkpoint(file, 'tiny-clip')
    legacy = tmp_path/'legacy.pt'
    torch.save(dict(state_dict=Bomb(mark)), legacy, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match='refused'): load_checkpoint(legacy, 'tiny-clip')
    with zipfile.ZipFile(file, 'a') as z: z.writestr('archive/code/__torch__.py', 'x = 1.702')    # dressed up as a TorchScript archive
    with pytest.raises(ValueError, match='cannot be read|refused'): load_checkpoint(file, 'tiny-clip')
    plain = tmp_path/'plain.pt'
    plain.write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError): load_checkpoint(plain, 'tiny-clip')
    assert not mark.exists()
    pickle.loads(plain.read_bytes())
    assert mark.exists()                                             # it would have worked


@pytest.mark.parametrize('how', ['pt', 'safetensors'])
@pytest.mark.parametrize('part', [.5, .999, 0])
def test_a_checkpoint_cut_in_half(tmp_path, how, part):
    file = save(openai_keys(vocab=100), tmp_path/'m', how)
    data = file.read_bytes()
    file.write_bytes(data[:int(len(data) * part)])
    with pytest.raises(ValueError, match=file.name): load_checkpoint(file, 'tiny-clip')
    with pytest.raises(ValueError, match='no checkpoint file'): load_checkpoint(tmp_path/'none.pt', 'tiny-clip')


# -- checkpoints out ---------------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('backbone,length,keep', [('tiny-clip', None, 20), ('tiny-siglip', 100, 12), ('scenes-gelu', 96, 8), ('tiny-causal', 77, 20)])
def test_saved_models_come_back_whole(tmp_path, backbone, length, keep):
    model = create_model(backbone, context_length=length, keep=keep)
    file = save_checkpoint(model, tmp_path/'new'/'m.safetensors', recipe='debias', steps=3)
    again = load_checkpoint(file)
    assert type(again) is type(model) and all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    for k in ('backbone', 'context_length', 'base_length', 'keep', 'stretch_factor'): assert getattr(again, k) == getattr(model, k) or k == 'keep' and length == 77
    with safe_open(file, 'pt') as f: assert f.metadata() | dict(recipe='debias', steps='3', backbone=backbone, context_length=str(model.context_length)) == f.metadata()
    assert [p.name for p in file.parent.iterdir()] == ['m.safetensors']


def test_a_wrong_length_or_backbone_on_reload_is_said(tmp_path):
    file = save_checkpoint(create_model('tiny-clip'), tmp_path/'m.safetensors')
    assert create_model('tiny-clip', file).context_length == create_model('tiny-clip', file, 248).context_length == 248
    for length in (77, 256):
        with pytest.raises(ValueError, match=f'77 to 248 .*{length}'): create_model('tiny-clip', file, length)
    with pytest.raises(ValueError, match='tiny-clip, not tiny-clip-quickgelu'): load_checkpoint(file, 'tiny-clip-quickgelu')
    with safe_open(file, 'pt') as f: state, meta = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()
    save_file(state, file, meta | dict(context_length='196'))
    with pytest.raises(ValueError, match='context_length=196'): load_checkpoint(file)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    model = create_model('tiny-clip')
    file = save_checkpoint(model, tmp_path/'m.safetensors')
    data = file.read_bytes()
    def dies(tensors, path, metadata):
        open(path, 'wb').write(data[:100])
        raise OSError('No space left on device')
    monkeypatch.setattr(M, 'save_file', dies)
    with pytest.raises(OSError, match='space'): save_checkpoint(model, file)
    assert file.read_bytes() == data and [p.name for p in tmp_path.iterdir()] == ['m.safetensors']
    with pytest.raises(ValueError, match='safetensors'): save_checkpoint(model, tmp_path/'m.pt')


# -- published weights -------------------------------------------------------------------------------------------------------------------------------------

def test_openai_weights_get_quickgelu():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for name in ('ViT-B-16', 'ViT-L-14', 'ViT-L-14-336'):
            assert M._right_activation(name, 'openai') == M._right_activation(name + '-quickgelu', 'openai') == name + '-quickgelu'
    assert M._right_activation('ViT-B-16', 'laion2b_s34b_b88k') == 'ViT-B-16'
    assert M._right_activation('ViT-B-16-SigLIP', 'webli') == 'ViT-B-16-SigLIP' and M._right_activation('ViT-B-16-SigLIP2', 'webli') == 'ViT-B-16-SigLIP2'


def test_a_published_tag_goes_through_our_loader(tmp_path, monkeypatch):
    state, published = openai_keys(), open_clip.pretrained._PRETRAINED
    file = save(state, tmp_path/'m', 'pt')
    tag = dict(openai=open_clip.pretrained._pcfg(file=str(file), quick_gelu=True, mean=(.1, .2, .3)))
    monkeypatch.setitem(published, 'tiny-clip', tag), monkeypatch.setitem(published, 'tiny-clip-quickgelu', tag)
    with pytest.warns(UserWarning, match='tiny-clip-quickgelu is used'): model, train, evaluate = create_model_and_transforms('tiny-clip', 'openai')
    assert model.backbone == 'tiny-clip-quickgelu' and model.context_length == 248 and model.visual.preprocess_cfg['mean'] == (.1, .2, .3)
    state['positional_embedding'] = stretch_positions(state['positional_embedding'])
    same(model, reference(state))
    with pytest.raises(ValueError, match='Published: openai'): create_model('tiny-clip', 'laion')
    monkeypatch.delitem(published, 'tiny-clip-quickgelu'), monkeypatch.setattr(M, 'open_clip', M.open_clip)
    open_clip.factory._MODEL_CONFIGS.pop('tiny-clip-quickgelu')
    try:
        with pytest.raises(ValueError, match='no tiny-clip-quickgelu'): create_model('tiny-clip', 'openai')
    finally: open_clip.factory._MODEL_CONFIGS['tiny-clip-quickgelu'] = CONFIGS['tiny-clip-quickgelu']


def test_weights_out_of_reach_are_said_soon(monkeypatch):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
    with pytest.raises(ValueError, match='pretrained=FILE'): create_model('ViT-B-16', 'laion2b_s34b_b88k')


def test_transforms_are_the_backbones_own():
    from PIL import Image
    for name, grey in (('scenes-clip', (128 / 255 - .48145466) / .26862954), ('ViT-B-16-SigLIP', (128 / 255 - .5) / .5)):
        with torch.device('meta'): model = create_model(name)
        settings = M.PreprocessCfg(**model.visual.preprocess_cfg)
        assert abs(M.image_transform_v2(settings, is_train=False)(Image.new('RGB', (60, 30), (128,) * 3))[0, 5, 5].item() - grey) < 1e-4
    model, train, evaluate = create_model_and_transforms('scenes-siglip', keep=8)
    assert train(Image.new('L', (60, 80))).shape == evaluate(Image.new('RGBA', (60, 80))).shape == (3, 48, 48)


def test_a_text_tower_called_alone_refuses_a_wrong_length():
    model = create_model('tiny-siglip')
    with pytest.raises(ValueError, match='context_length=196'): model.text(torch.ones(2, 64, dtype=torch.long))
    assert model.text(torch.ones(2, 196, dtype=torch.long)).shape == (2, 16)
    assert copy.deepcopy(model).text(torch.ones(2, 196, dtype=torch.long)).shape == (2, 16)


def in_parts(folder, whole):
    "The weights of a Hugging Face folder in three files, as its own `save_pretrained` shards them."
    state = {}
    with safe_open(whole, 'pt') as f: state = {k: f.get_tensor(k) for k in f.keys()}
    where = {k: f'model-{i % 3 + 1:05d}-of-00003.safetensors' for i, k in enumerate(sorted(state))}
    for part in set(where.values()): save_file({k: v for k, v in state.items() if where[k] == part}, folder/part)
    (folder/'model.safetensors.index.json').write_text(json.dumps(dict(metadata=dict(total_size=1), weight_map=where)))
    whole.unlink()
    return where


def test_a_hugging_face_folder_in_parts(tmp_path):
    from transformers import CLIPConfig, CLIPModel
    part = dict(hidden_size=64, intermediate_size=256, num_attention_heads=1, hidden_act='quick_gelu')
    CLIPModel(CLIPConfig(projection_dim=16, text_config=part | dict(num_hidden_layers=2, max_position_embeddings=248, vocab_size=49408, eos_token_id=49407),
                         vision_config=part | dict(num_hidden_layers=1, image_size=16, patch_size=8))).save_pretrained(tmp_path)
    whole = load_checkpoint(tmp_path, 'tiny-clip-quickgelu').state_dict()
    where = in_parts(tmp_path, tmp_path/'model.safetensors')
    again = load_checkpoint(tmp_path, 'tiny-clip-quickgelu').state_dict()
    assert whole.keys() == again.keys() and all(torch.equal(v, again[k]) for k, v in whole.items())
    index = tmp_path/'model.safetensors.index.json'
    for bad, message in ((dict(weight_map={'a': '../../model.safetensors'}), 'must be .safetensors files beside it'), (dict(weight_map={'a': 'weights.bin'}), 'must be'), ({}, 'no index of weights'), (dict(weight_map=where | {'b': 'gone.safetensors'}), 'gone.safetensors is missing')):
        index.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=message): load_checkpoint(tmp_path, 'tiny-clip-quickgelu')


def test_a_siglip_folder_of_transformers_is_refused_with_its_reason(tmp_path):
    (tmp_path/'config.json').write_text(json.dumps(dict(model_type='siglip')))
    save_file({'logit_scale': torch.zeros(1)}, tmp_path/'model.safetensors')
    with pytest.raises(ValueError, match='siglip model of transformers, and those are not read back'): load_checkpoint(tmp_path)
