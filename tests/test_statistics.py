"""Intervals against slow loops and against simulated worlds whose truth is known."""
import numpy as np
import pytest
import torch
from scipy import stats

from debias_clip.statistics import (
    bootstrap_interval,
    bootstrap_p,
    bootstrapped_means,
    holm,
    mean_interval,
    paired_difference,
    ratio_interval,
    recall_interval,
    resampled_sums,
    seed_interval,
    seed_p,
    share_interval,
)

def slow_bootstrap(values, image_of, n_boot, seed):
    "The same draws, the texts of every drawn image put in one list; percentiles of the means, in percent."
    draw, n, means = np.random.default_rng(seed), len(set(image_of)), []
    of_image = [[v for v, i in zip(values, image_of, strict=True) if i == k] for k in range(n)]
    for _ in range(n_boot):
        drawn = [v for k in draw.integers(0, n, n) for v in of_image[k]]
        means.append(100*np.mean(drawn))
    return np.percentile(means, [2.5, 97.5])


def test_intervals_are_the_slow_ones():
    g = np.random.default_rng(1)
    a, b = g.integers(0, 4, 40), g.integers(0, 4, 40)
    of = g.permutation(np.concatenate([np.arange(12), g.integers(0, 12, 28)]))
    gains = (a < 2)*1. - (b < 2)
    np.testing.assert_allclose(recall_interval(a, 2, of, 50, 3), slow_bootstrap((a < 2)*1., of, 50, 3))
    alone = slow_bootstrap((a < 1)*1., range(40), 50, 0)
    np.testing.assert_allclose(recall_interval(torch.tensor(a), 1, n_boot=50), alone)
    np.testing.assert_allclose(paired_difference(a, b, 2, of, 50, 3)[1:], slow_bootstrap(gains, of, 50, 3))
    names = [f"{i:02d}.jpg" for i in of]
    assert recall_interval(a, 2, of) == recall_interval(a, 2, of) == recall_interval(a, 2, names)
    assert recall_interval(a, 2, of) != recall_interval(a, 2, of, seed=1)


def test_the_interval_covers_the_truth():
    g, truth, hits = np.random.default_rng(0), 60, 0
    for seed in range(300):
        low, high = recall_interval((g.random(150) > truth/100).astype(int), n_boot=300, seed=seed)
        hits += low <= truth <= high
    assert .91 <= hits/300 <= .98


def test_texts_of_an_image_are_drawn_together():
    "Images are easy or hard for all of their five texts: the interval that takes texts for independent is too narrow."
    g, of, widths, hits = np.random.default_rng(0), np.repeat(np.arange(100), 5), [], np.zeros(2)
    for seed in range(200):
        easy = np.repeat(g.random(100) < .5, 5)
        ranks = (g.random(500) > np.where(easy, .9, .1)).astype(int)
        both = [recall_interval(ranks, n_boot=300, seed=seed, image_of=images) for images in (None, of)]
        widths.append([high - low for low, high in both])
        hits += [low <= 50 <= high for low, high in both]
    naive, together = np.mean(widths, 0)
    assert together > 1.6*naive and hits[0]/200 < .8 and .9 <= hits[1]/200 <= .985


def test_paired_differences():
    g = np.random.default_rng(0)
    b = g.integers(0, 3, 400)
    a = np.where(g.random(400) < .9, b, 0)                          # like b, but for queries that a has right
    difference, low, high = paired_difference(a, b)
    assert difference == pytest.approx(100*((a < 1).mean() - (b < 1).mean())) and 0 < low < difference < high
    mirrored = paired_difference(b, a)
    assert mirrored[0] == -difference and mirrored[2] == pytest.approx(-low, abs=.5)
    assert high - low < np.subtract(*recall_interval(a)[::-1])      # narrower than either model's own
    assert paired_difference(a, a) == paired_difference(a, b, k=3) == (0, 0, 0)
    assert paired_difference(torch.tensor(a), torch.tensor(b)) == (difference, low, high)
    with pytest.raises(ValueError, match="400 ranks of one and 399 of the other"): paired_difference(a, b[1:])
    with pytest.raises(ValueError): recall_interval(a, image_of=range(399))


def test_mean_interval():
    values = np.array([[1., np.nan], [3., np.nan], [5., np.nan]])
    mean, low, high = mean_interval(values)
    assert mean[0] == 3 and 1 <= low[0] < 3 < high[0] <= 5 and np.isnan([mean[1], low[1], high[1]]).all()
    assert mean_interval([2., 2., np.nan]) == (2, 2, 2)
    assert mean_interval([1., 3., 5.]) == (mean[0], low[0], high[0]) == mean_interval([1., 3., 5.])
    _, low, high = mean_interval(np.random.default_rng(0).normal(size=400))
    assert abs(high - low - 2*1.96/20) < .03                        # the width of a mean's interval


def test_ratios_are_of_the_same_draws():
    g = np.random.default_rng(0)
    parts, wholes = g.random((30, 2)), g.random(30)
    sums = resampled_sums(np.column_stack([parts, wholes]), 100, 7)
    value, low, high = ratio_interval(parts, wholes, 100, 7)
    np.testing.assert_allclose(value, parts.sum(0)/wholes.sum())
    np.testing.assert_allclose([low, high], np.percentile(sums[:, :2]/sums[:, 2:], [2.5, 97.5], axis=0))


SEEDS = [([1, 2, 3], 2, 2.48414), ([10, 12, 11, 13, 14], 12, 1.96324), ([0., 1.], .5, 6.35310), ([7.5]*4, 7.5, 0)]

@pytest.mark.parametrize("values, mean, half", SEEDS)
def test_seed_interval(values, mean, half):
    "Half-widths by hand: t of the table (12.7062, 4.3027, 3.1824, 2.7764) · standard deviation / √n."
    assert seed_interval(values) == pytest.approx((mean, mean - half, mean + half), abs=1e-4)
    assert seed_interval(values[:1]) == (values[0], None, None)


@pytest.mark.parametrize("values", [[], [1., float("nan")]])
def test_no_interval_of_nothing(values):
    with pytest.raises(ValueError, match="one finite number a seed"): seed_interval(values)


# ---- many differences

def slow_holm(p, alpha=.05):
    "Which of a family are clear, by the procedure as Holm wrote it: from the smallest up, until one fails."
    found = [False]*len(p)
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] > alpha/(len(p) - rank): break
        found[i] = True
    return found


def test_holm_is_the_step_down_procedure():
    g = np.random.default_rng(0)
    for _ in range(500):
        p = g.random(g.integers(1, 12))**4
        adjusted, levels = holm(p)
        assert (adjusted <= .05).tolist() == slow_holm(p)
        assert all((adjusted <= a).tolist() == slow_holm(p, a) for a in (.01, .2))
        assert (np.diff(adjusted[p.argsort()]) >= 0).all() and (adjusted >= p).all() and adjusted.max() <= 1
        assert (p <= 1 - levels + 1e-15).tolist() == (adjusted <= .05).tolist()


def test_holm_of_a_published_example():
    "R: p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.05), 'holm'), and of the page on Holm's method: .01, .04, .03, .005."
    np.testing.assert_allclose(holm([.01, .02, .03, .04, .05])[0], [.05, .08, .09, .09, .09])
    np.testing.assert_allclose(holm([.01, .04, .03, .005])[0], [.03, .06, .06, .02])
    np.testing.assert_allclose(holm([0, 0, 1])[1], [1 - .05/3, 1 - .05/3, .95])
    assert holm([.3])[0] == .3 and holm([.3])[1] == .95 and len(holm([])[0]) == 0


def test_p_values_over_seeds_are_the_t_tests():
    g = np.random.default_rng(0)
    for n in (2, 3, 5, 9):
        values = g.normal(.5, 1, n)
        p = seed_p(values)
        assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
        _, low, high = seed_interval(values, 1 - p)
        assert min(abs(low), abs(high)) < 1e-9                  # the interval at level 1 − p just reaches zero
    assert seed_p([1.]) is None and seed_p([0., 0.]) == 1 and seed_p([2., 2.]) == 0


def test_the_bootstrap_of_kinds_is_the_bootstrap_of_images():
    "Compared with draws of single images: the same spread, with one text an image and with several."
    g = np.random.default_rng(0)
    values, of = g.integers(-1, 2, 200).astype(float), np.repeat(np.arange(50), 4)
    for image_of in (None, of):
        means = bootstrapped_means(values, image_of, 4000)
        sums = resampled_sums(np.column_stack([values.reshape(-1, 4).sum(1), np.full(50, 4)]) if image_of is not None
                              else np.column_stack([values, np.ones(200)]), 4000, 1)
        slow = np.sort(sums[:, 0]/sums[:, 1])
        assert len(means) == 4000 and (np.diff(means) >= 0).all()
        np.testing.assert_allclose(np.percentile(means, [2.5, 25, 50, 75, 97.5]),
                                   np.percentile(slow, [2.5, 25, 50, 75, 97.5]), atol=.012)
    names = [f"{i:02d}.jpg" for i in of]
    np.testing.assert_array_equal(bootstrapped_means(values, names, 99), bootstrapped_means(values, of, 99))


@pytest.mark.parametrize("shift", [0, .05, .1, .2, -.15])
def test_bootstrapped_intervals_and_p_values_agree(shift):
    g = np.random.default_rng(3)
    means = bootstrapped_means(g.normal(shift, 1, 300), n_boot=999)
    p = bootstrap_p(means)
    for level in (.5, .9, .95, .99, .995, 1 - p, 1 - p - 1e-6):
        low, high = bootstrap_interval(means, level)
        assert (low > 0 or high < 0) == (p <= 1 - level + 1e-12)
    ones = bootstrapped_means(np.ones(9), n_boot=99)
    assert bootstrap_interval(ones, .98) == (1, 1) and bootstrap_interval(ones, .981) == (0, 1)    # p is 2/100 at least
    assert bootstrap_p(bootstrapped_means(np.zeros(9))) == 1
    assert bootstrap_p(bootstrapped_means(np.ones(9), n_boot=999)) == 2/1000


@pytest.mark.parametrize("questions, pictures", [(8, 8), (3, 3), (40, 8)])
def test_chance_is_seldom_left_out(questions, pictures):
    "Pictures of a question are alike; Wilson's interval over pictures misses chance in every sixth run of eight."
    g, missed = np.random.default_rng(0), 0
    for _ in range(1000):
        own = g.beta(.5, 3.5, (questions, 1))                       # each question's own probability, 1/8 on average
        shares = (g.random((questions, pictures)) < own).mean(1)
        low, high = share_interval(shares, pictures)
        assert 0 <= low < high <= 1 and low - 1e-9 <= shares.mean() <= high + 1e-9
        missed += not low <= 1/8 <= high
    assert missed < 70
    assert share_interval(shares[:1], pictures) == (None, None)
