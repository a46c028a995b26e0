"""Losses: oracles, golden values, several processes.

data/parity_small.safetensors is a part of ../shared/parity (features, PCA and losses of the reference implementation),
so that these values are tested where that folder is not.
"""
import datetime
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import load_file

from debias_clip.losses import (
    DualCaptionLoss,
    NonFiniteFeatures,
    from_all,
    info_nce,
    pca_approximation,
    sigmoid_loss,
)

SMALL = Path(__file__).parent/'data'/'parity_small.safetensors'
SHARED = Path(__file__).parents[2]/'shared'/'parity'
NAMES = 'image_features', 'text_features_long', 'text_features_short'


def unit(n, d=16, seed=0, dtype=torch.float32):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(x + .5, dim=1).to(dtype)


def relative(a, b): return ((a - b).norm()/b.norm()).item()


# The obvious versions.

def oracle_pca(x, k):
    u, s, vh = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    return (u[:, :k]*s[:k]) @ vh[:k] + x.mean(0)


def oracle_info_nce(image, text, scale, smoothing):
    logits, n = scale*image @ text.T, len(image)
    target = torch.full((n, n), smoothing/n, dtype=logits.dtype) + (1 - smoothing)*torch.eye(n, dtype=logits.dtype)
    return -sum((target*z.log_softmax(1)).sum(1).mean() for z in (logits, logits.T))/2


def oracle_sigmoid(image, text, scale, bias):
    n, total = len(image), 0
    for i in range(n):
        for j in range(n):
            logit = scale*(image[i] @ text[j]) + bias
            total = total + F.softplus(-logit if i == j else logit)
    return total/n


def oracle(image, long, short, scale, bias, family, groups, k=8, weight=.3, smoothing=.1):
    "One process with the whole batch; PCA a group at a time."
    def pair(a, b):
        return oracle_info_nce(a, b, scale, smoothing) if family == 'softmax' else oracle_sigmoid(a, b, scale, bias)
    approximation = torch.cat([oracle_pca(x, k) for x in image.chunk(groups)])
    long, short = pair(image, long), pair(approximation, short)
    return dict(loss=weight*short + (1 - weight)*long, long=long, short=short)


# PCA

@pytest.mark.parametrize('n, d, k', [(20, 16, 8), (12, 30, 5), (16, 16, 15), (9, 30, 8), (40, 6, 6), (300, 16, 8)])
def test_pca_is_the_svds(n, d, k):
    x, g = unit(n, d, dtype=torch.float64).requires_grad_(), unit(n, d, 1, torch.float64)
    got, want = pca_approximation(x, k), oracle_pca(x, k)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    grad_got, grad_want = (torch.autograd.grad((y*g).sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(grad_got, grad_want, rtol=1e-7, atol=1e-8)
    y = x.detach().float().requires_grad_()
    single = pca_approximation(y, k)
    assert single.dtype == torch.float32 and relative(single, want) < 1e-6


def hadamard(s):
    "[8, 7] features whose centred matrix has singular values exactly proportional to s."
    two = torch.tensor([[1., 1.], [1., -1.]], dtype=torch.float64)
    return torch.kron(two, torch.kron(two, two))[:, 1:]*torch.tensor(s) + .25


@pytest.mark.parametrize('s', [[2., 2, 2, 1, 1, 1, 1], [4., 2, 2, 1, 1, .5, .25], [4., 3, 2, 0, 0, 0, 0],
                               [4., 3, 2, 1.99, 1, 0, 0]])
@pytest.mark.parametrize('shape', ['wide', 'tall'])
def test_gradcheck_with_repeated_singular_values(s, shape):
    x = hadamard(s)
    x = torch.cat([x, torch.zeros(8, 4, dtype=x.dtype)], 1) if shape == 'wide' else torch.cat([x[:, :6], -x[:, :6]])
    def approximate(x): return pca_approximation(x, 3)
    assert torch.autograd.gradcheck(approximate, x.clone().requires_grad_(), eps=1e-5, atol=1e-5)


def test_a_small_gap_is_not_touched():
    x = hadamard([4., 3, 2.0001, 2, 1, .5, .25]).requires_grad_()
    g = unit(8, 7, dtype=torch.float64)
    got, want = (torch.autograd.grad((f(x, 3)*g).sum(), x)[0] for f in (pca_approximation, oracle_pca))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


TIED = dict(   # features, k
    one=(hadamard([4., 3, 2, 2, 1, .5, .25]), 3),
    four=(hadamard([4., 2, 2, 2, 2, .5, .25]), 3),
    collapsed=(unit(1).repeat(20, 1), 8),
    zeros=(torch.zeros(20, 16), 8),
    five_samples=(unit(5, 16).repeat(4, 1), 8),
    tiny=(1e-20*unit(20), 8),
    huge=(1e15*unit(20), 8),
)


@pytest.mark.parametrize('kind', TIED)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_closed_gaps_are_clamped(kind, dtype):
    x, k = TIED[kind]
    x = x.to(dtype).clone().requires_grad_()
    y = pca_approximation(x, k)
    y.backward(unit(*x.shape, seed=1).to(dtype))
    assert y.isfinite().all() and x.grad.isfinite().all()
    if kind in ("collapsed", "zeros"): assert relative(y + 1, x.detach() + 1) < 1e-6
    if kind in ("collapsed", "zeros", "five_samples"): assert x.grad.norm() < 10


def test_pca_names_what_is_wrong():
    x = unit(40)
    x[3, 0], x[17, 5] = math.nan, -math.inf
    with pytest.raises(NonFiniteFeatures, match=r'samples 3, 17') as e: pca_approximation(x, 8)
    assert e.value.rows == {0: [3, 17]} and isinstance(e.value, ValueError)
    for n in (0, 1, 8):
        with pytest.raises(ValueError, match=r'at least 8 \+ 1 = 9 samples.*rank at most B - 1'):
            pca_approximation(unit(40)[:n], 8)
    torch.testing.assert_close(pca_approximation(unit(9), 8), unit(9))
    with pytest.raises(ValueError, match='16 dimensions have no 17'): pca_approximation(unit(40), 17)
    with pytest.raises(ValueError, match='1 or more'): pca_approximation(unit(40), 0)
    with pytest.raises(ValueError, match='matrix'): pca_approximation(unit(40)[0], 8)
    with pytest.raises(ValueError, match=r'32 \+ 1 = 33 samples'):
        DualCaptionLoss()(unit(32, 64), unit(32, 64), unit(32, 64), 1.)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_pca_in_half_precision_and_under_autocast(dtype):
    x = unit(40).to(dtype).requires_grad_()
    g = unit(40, seed=1)
    plain = x.detach().double().requires_grad_()
    want = oracle_pca(plain, 8)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        got = pca_approximation(x, 8)
        got.backward(g)  # inside as well, though one should not
    want.backward(g)
    assert got.dtype == torch.float32 and relative(got, want) < 1e-6 and x.grad.dtype == dtype
    assert relative(x.grad, plain.grad) < 1e-2


# The loss in one process

@pytest.mark.parametrize('family', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('scope, groups', [('local', 1), ('global', 1), (24, 1), (12, 2)])
def test_one_process(family, scope, groups):
    x = [unit(24, seed=i, dtype=torch.float64).requires_grad_() for i in range(3)]
    scale, bias = torch.tensor(7.).double().requires_grad_(), torch.tensor(-3.).double().requires_grad_()
    got = DualCaptionLoss(.3, 8, .1, family, scope)(*x, scale, bias)
    want = oracle(*x, scale, bias, family, groups)
    for name in want: torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-10)
    inputs = [*x, scale] + [bias]*(family == 'sigmoid')
    grads = torch.autograd.grad(got['loss'], inputs, retain_graph=True)
    torch.testing.assert_close(grads, torch.autograd.grad(want['loss'], inputs), rtol=1e-8, atol=1e-10)
    if family == 'softmax':   # in the graph, so that DDP does not wait for it
        assert torch.autograd.grad(got['loss'], bias)[0] == 0
    assert sorted(got) == ['long', 'loss', 'short'] and all(v.shape == () for v in got.values())


@pytest.mark.parametrize('family', ['softmax', 'sigmoid'])
def test_a_branch_of_weight_0_is_skipped(family):
    image, text = unit(4), unit(4, seed=1)
    alone = DualCaptionLoss(0, family=family)(image, text, None, 5.)  # 4 samples: no 32 components, and none needed
    want = info_nce(image, text, 5., .1) if family == 'softmax' else sigmoid_loss(image, text, 5.)
    assert alone['short'] == 0 and alone['loss'] == alone['long'] and torch.equal(alone['long'], want)
    short = DualCaptionLoss(1, 2, family=family)(image, None, text, 5.)
    both = DualCaptionLoss(.5, 2, family=family)(image, text, text, 5.)
    assert short['long'] == 0 and short['loss'] == short['short'] == both['short']
    with pytest.raises(ValueError, match='None'): DualCaptionLoss(.5, 2)(image, text, None, 5.)


def test_half_precision_and_autocast_change_nothing():
    x = [unit(12, seed=i).bfloat16() for i in range(3)]
    loss = DualCaptionLoss(.3, 8)
    want = loss(*(v.float() for v in x), torch.tensor(100.))
    with torch.autocast('cpu', dtype=torch.bfloat16): got = loss(*x, torch.tensor(100.))
    assert got['loss'].dtype == torch.float32 and all(torch.equal(got[n], want[n]) for n in want)


WRONG = [
    dict(short_weight=-.1), dict(short_weight=1.1), dict(short_weight=math.nan), dict(pca_dim=0), dict(pca_dim=1.5),
    dict(label_smoothing=1.), dict(label_smoothing=-1), dict(family='clip'),
    dict(pca_scope='rank'), dict(pca_scope=32), dict(pca_scope=64.), dict(pca_scope=True), dict(pca_scope=None),
]


@pytest.mark.parametrize('wrong', WRONG, ids=str)
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))): DualCaptionLoss(**wrong)


def test_features_that_do_not_belong_together():
    loss = DualCaptionLoss(.3, 3)
    for bad in ([unit(8), unit(7), unit(8)], [unit(8), unit(8), unit(8, 15)], [unit(8)[None]]*3, [unit(8)[:0]]*3):
        with pytest.raises(ValueError, match='one shape'): loss(*bad, 1.)
    spoilt = unit(8)
    spoilt[5] = math.nan
    with pytest.raises(NonFiniteFeatures, match=r'short features of samples 5') as e:
        loss(unit(8), unit(8), spoilt, 1.)
    assert e.value.rows == {0: [5]}


# Several processes: groups of 2, 3 and 4, one after the other, in one start of four.

TOTAL, FAMILIES = 36, ('softmax', 'sigmoid')
SCOPES = {2: ['local', 'global', 9, 18, 36], 3: ['local', 'global', 12, 36], 4: ['local', 'global', 9, 18, 36]}
SCOPES[1] = SCOPES[2]


def inputs(dtype=torch.float32):
    features = [unit(TOTAL, seed=i, dtype=dtype) for i in range(3)]
    return features, torch.tensor(7., dtype=dtype), torch.tensor(-3., dtype=dtype)


def of_rank(x, rank, world): return x.chunk(world)[rank].clone().requires_grad_()


def run_case(family, scope, rank, world):
    x, scale, bias = inputs()
    x, saved = [of_rank(v, rank, world) for v in x], []
    leaves = [*x, scale.requires_grad_(), bias.requires_grad_()]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        out = DualCaptionLoss(.3, 8, .1, family, scope)(*leaves)
    grads = torch.autograd.grad(out['loss'], leaves)
    return dict(out={n: v.detach() for n, v in out.items()}, grads=grads, saved=set(saved))


def run_golden(rank, world):
    "Long + short of the golden features, and the gradient that goes back to this rank's features, not normalised yet."
    small = load_file(SMALL)
    x, scale = [of_rank(small[n], rank, world) for n in NAMES], small['logit_scale'].requires_grad_()
    out = DualCaptionLoss(short_weight=.5)(*(F.normalize(v, dim=1) for v in x), scale.exp())
    losses = torch.stack([out['long'], out['short']]).detach()
    return dict(losses=losses, grads=torch.autograd.grad(2*out['loss'], [*x, scale]))


def error_of(f):
    try: f()
    except ValueError as e: return f'{type(e).__name__}: {e}', getattr(e, 'rows', None)


def run_faults(rank):
    def go(n, spoil=False, scope='local'):
        x = [unit(n, seed=10*rank + i) for i in range(3)]
        if spoil: x[1][5] = math.nan
        return DualCaptionLoss(.3, 8, pca_scope=scope)(*x, 1.)['loss'].detach()
    together = go(8, scope='global')
    return dict(
        unequal=error_of(lambda: go(12 + (rank == 1))),
        nan=error_of(lambda: go(12, rank == 1)),
        few=error_of(lambda: go(8)),
        uneven=error_of(lambda: go(12, scope=10)),
        together=together,
        after=go(12),
    )


def run_all(rank, world):
    "Everything that one rank is asked for, as {name of a test: what came out}."
    out = {(family, scope): run_case(family, scope, rank, world) for family in FAMILIES for scope in SCOPES[world]}
    if world < 3: out['golden'] = run_golden(rank, world)
    if world > 1:
        again = run_case('softmax', 'local', rank, world)
        out['same_bits'] = all(map(torch.equal, again['grads'], out['softmax', 'local']['grads']))
        out['faults'] = run_faults(rank)
    out['all'] = from_all(torch.tensor([rank, 7]))
    return out


def worker(rank, folder):
    torch.set_num_threads(1)
    for world in (2, 3, 4):
        if rank >= world: continue
        dist.init_process_group('gloo', f'file://{folder}/store{world}', timeout=datetime.timedelta(seconds=60),
                                rank=rank, world_size=world)
        torch.save(run_all(rank, world), f'{folder}/{world}-{rank}.pt')
        dist.destroy_process_group()


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    "What came out on every rank: {N: [rank 0's, …]}; N = 1 without a process group."
    folder = tmp_path_factory.mktemp('ranks')
    mp.spawn(worker, (str(folder),), nprocs=4)
    several = {n: [torch.load(folder/f'{n}-{r}.pt', weights_only=False) for r in range(n)] for n in (2, 3, 4)}
    return {1: [run_all(0, 1)]} | several


def check_ranks(of_ranks, family, groups):
    "The mean over ranks is the loss, and the gradient, of one process with the whole batch in so many PCA groups."
    world, (x, scale, bias) = len(of_ranks), inputs(torch.float64)
    leaves = [v.requires_grad_() for v in (*x, scale, bias)]
    want = oracle(*leaves, family, groups)
    for name in want:
        assert sum(r['out'][name] for r in of_ranks)/world == pytest.approx(want[name].item(), rel=1e-5)
    grads = torch.autograd.grad(want['loss'], leaves, allow_unused=True)
    for i in range(3):   # a parameter's gradient is averaged over ranks
        assert relative(torch.cat([r['grads'][i] for r in of_ranks])/world, grads[i].float()) < 1e-5
    for i in (3, 4):
        expected = 0 if grads[i] is None else grads[i].item()
        assert sum(r['grads'][i] for r in of_ranks)/world == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize('world', [1, 2, 3, 4])
@pytest.mark.parametrize('family', FAMILIES)
def test_n_ranks_are_one_process_with_the_whole_batch(ranks, world, family):
    for scope in SCOPES[world]:
        groups = {'local': world, 'global': 1}.get(scope) or TOTAL//scope
        check_ranks([r[family, scope] for r in ranks[world]], family, groups)


@pytest.mark.parametrize('size', [9, 18, 36])
@pytest.mark.parametrize('family', FAMILIES)
def test_one_group_size_is_one_model_on_1_2_and_4_processes(ranks, size, family):
    alone = ranks[1][0][family, size]
    for world in (2, 4):
        of_ranks = [r[family, size] for r in ranks[world]]
        for name, value in alone['out'].items():
            torch.testing.assert_close(sum(r['out'][name] for r in of_ranks)/world, value, rtol=1e-6, atol=0)
        for i in range(3):
            assert relative(torch.cat([r['grads'][i] for r in of_ranks])/world, alone['grads'][i]) < 1e-6


@pytest.mark.parametrize('world', [2, 3, 4])
def test_no_rank_holds_the_whole_matrix_of_logits(ranks, world):
    for r in ranks[world]:
        for family in FAMILIES:
            saved = r[family, 'local']['saved']
            assert (TOTAL//world, TOTAL) in saved and (TOTAL, TOTAL) not in saved
            assert (TOTAL//world, TOTAL) in r[family, 'global']['saved']


@pytest.mark.parametrize('world', [2, 3, 4])
def test_the_same_bits_again(ranks, world): assert all(r['same_bits'] for r in ranks[world])


@pytest.mark.parametrize('world', [1, 2, 3, 4])
def test_from_all_stacks_the_ranks(ranks, world):
    for r in ranks[world]: assert r['all'].tolist() == [[rank, 7] for rank in range(world)]


@pytest.mark.parametrize('world', [2, 3, 4])
def test_all_ranks_stop_alike_and_go_on(ranks, world):
    faults = [r['faults'] for r in ranks[world]]
    for name in ('unequal', 'nan', 'few', 'uneven'): assert len({f[name][0] for f in faults}) == 1
    first = faults[0]
    assert f'{[12, 13, 12, 12][:world]} samples' in first['unequal'][0]
    assert 'NonFiniteFeatures' in first['nan'][0] and 'rank 1: long features of samples 5' in first['nan'][0]
    assert 'at least 8 + 1 = 9' in first['few'][0]
    assert f'groups of 10 samples do not fit {world} batches of 12' in first['uneven'][0]
    for f in faults: assert f['nan'][1] == {1: [5]} and f['after'].isfinite() and f['together'].isfinite()


# Golden values

def test_golden_pca():
    small = load_file(SMALL)
    image = F.normalize(small['image_features'], dim=1)
    for n in (40, 80):
        assert relative(pca_approximation(image[:n]), small[f'pca_{n}']) < 1e-6


@pytest.mark.parametrize('world', [1, 2])
def test_golden_losses(ranks, world):
    got = torch.stack([r['golden']['losses'] for r in ranks[world]])
    torch.testing.assert_close(got, load_file(SMALL)[f'world{world}.losses'], rtol=1e-5, atol=0)


@pytest.fixture(scope='module')
def encoded(parity_backbone):
    "The reference's tiny model, its golden values, and the three outputs with their graph."
    if not SHARED.is_dir(): pytest.skip('golden values are not here (../shared/parity)')
    from debias_clip.models import load_checkpoint
    model = load_checkpoint(SHARED/'model.safetensors', parity_backbone).eval()
    golden = load_file(SHARED/'golden.safetensors')
    texts = [model.encode_text(golden[name]) for name in ('tokens_long', 'tokens_short')]
    return model, golden, (model.encode_image(golden['images']), *texts)


@pytest.mark.parametrize('world', [1, 2])
def test_golden_gradients(ranks, encoded, world):
    model, golden, outputs = encoded
    wanted = {key.split('.grad.')[1]: v for key, v in golden.items() if key.startswith(f'world{world}.grad.')}
    *features, scale = [torch.stack(g) for g in zip(*(r['golden']['grads'] for r in ranks[world]), strict=True)]
    parameters = {n: p for n, p in model.named_parameters() if n in wanted or n == 'positional_embedding'}
    del parameters['logit_scale']
    arriving = [g.flatten(0, 1)/world for g in features]
    grads = torch.autograd.grad(outputs, list(parameters.values()), arriving, retain_graph=True)
    grads = dict(zip(parameters, grads, strict=True)) | dict(logit_scale=scale.mean())
    grads['positional_embedding_res'] = grads['positional_embedding']
    assert len(wanted) == 7
    for name, want in wanted.items():
        used = slice(20, None) if name == 'positional_embedding_res' else ...   # rows 0-19: those of the frozen table
        assert relative(grads[name][used], want[used]) < 1e-4, name
