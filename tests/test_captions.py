"Short captions, their pieces and recipes, and permutations: properties over any caption, and what is refused."
import json
import pickle
import random
from collections import Counter
from functools import partial
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debias_clip import captions
from debias_clip.captions import (
    DEBIAS,
    LONG_CLIP,
    NO_SUMMARY,
    RECIPES,
    SAMPLED,
    SMARTCLIP,
    Recipe,
    ShortCaption,
    draw,
    drop_summary,
    in_order,
    min_sentences,
    permute,
    piece,
    random_pads,
    sample_rng,
    shuffle,
    split_sentences,
    summary,
)

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture
def own_pieces(monkeypatch):
    "A registry whose new pieces go again."
    monkeypatch.setattr(captions, "PIECES", dict(captions.PIECES))


# ---- sample_rng

def test_draws_depend_on_seed_epoch_and_index_alone():
    draws = {(s, e, i): sample_rng(s, e, i).random() for s in range(3) for e in range(3) for i in range(50)}
    assert len(set(draws.values())) == len(draws)
    assert all(sample_rng(*k).random() == v for k, v in draws.items())
    assert sample_rng(np.int64(1), np.int32(2), 3).random() == draws[1, 2, 3]


@pytest.mark.parametrize("args", [(-1, 0, 0), (0, 0.5, 0), (0, 0, "7"), (None, 0, 0)])
def test_what_is_no_whole_number_is_refused(args):
    with pytest.raises((ValueError, TypeError), match="whole numbers, 0 or more"): sample_rng(*args)


# ---- recipes by four choices

@settings(max_examples=300, deadline=None)
@given(st.integers(1, 30), st.sampled_from(["summary", "rest", "all"]), st.sampled_from(["none", "subset", "run"]),
       st.booleans(), SEEDS)
def test_what_a_short_caption_may_hold(k, source, sample, keep_order, seed):
    got = ShortCaption(source, sample, keep_order)(range(k), random.Random(seed))
    pool = {"summary": [0], "rest": list(range(1, k)) or [0], "all": list(range(k))}[source]
    assert 1 <= len(got) == len(set(got)) and set(got) <= set(pool)
    if sample == "none": assert got == pool
    if sample == "run": assert got == pool[:len(got)]
    if sample != "subset" or keep_order: assert got == sorted(got)


def test_the_papers_recipes():
    assert LONG_CLIP == ShortCaption("summary", "none", True, False)
    assert NO_SUMMARY == ShortCaption("rest", "none", True, False)
    assert SAMPLED == ShortCaption("rest", "subset", False, False)
    assert DEBIAS == ShortCaption() == ShortCaption("rest", "subset", False, True)
    assert SMARTCLIP == ShortCaption("all", "run", True, False)
    assert list(RECIPES.values()) == [LONG_CLIP, NO_SUMMARY, SAMPLED, DEBIAS, SMARTCLIP]
    assert [r.prefix_pad for r in RECIPES.values()] == [False, False, False, True, False]


def test_what_the_papers_recipes_make():
    s, rng = ["s1", "s2", "s3"], sample_rng(0, 0, 0)
    assert LONG_CLIP(s, rng) == ["s1"]
    assert NO_SUMMARY(s, rng) == ["s2", "s3"]
    assert {len(SMARTCLIP(s, rng)) for _ in range(50)} == {1, 2, 3} and SMARTCLIP(s, rng)[0] == "s1"
    assert s == ["s1", "s2", "s3"]   # the caption itself is left alone


def test_what_the_papers_recipes_draw_stays():
    "Numbers that trained models rest on: when one moves, raise the version of the piece."
    places = [DEBIAS.short_places(7, sample_rng(0, 0, i)) for i in range(4)]
    assert places == [[2, 1, 3, 6], [3, 4, 2], [3, 5, 6, 2], [3, 4, 6, 5, 1]]
    rng = sample_rng(0, 0, 0)
    assert DEBIAS.short_places(7, rng) == places[0] and DEBIAS.pads("short", 200, rng) == 183


@pytest.mark.parametrize("name", RECIPES)
def test_a_caption_of_one_sentence_stays(name): assert RECIPES[name](["It."], sample_rng(0, 0, 0)) == ["It."]


@pytest.mark.parametrize("name", ["no_summary", "sampled", "debias"])
def test_two_sentences_leave_one(name): assert RECIPES[name](["s1", "s2"], sample_rng(0, 0, 0)) == ["s2"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("empty", [[], (), range(0), np.array([])])
def test_no_sentence_is_refused_with_the_remedy(name, empty):
    with pytest.raises(ValueError, match="drop empty captions"): RECIPES[name](empty, sample_rng(0, 0, 0))


def test_an_unsplit_caption_is_refused():
    with pytest.raises(TypeError, match="split_sentences"): DEBIAS("A dog. It runs.", sample_rng(0, 0, 0))
    with pytest.raises(TypeError, match="split_sentences"): permute("A dog. It runs.", "first")


@pytest.mark.parametrize("fields", [dict(source="sumary"), dict(sample="subsets"), dict(source=None),
                                    dict(keep_order="no"), dict(prefix_pad=1)])
def test_wrong_choices_are_refused(fields):
    with pytest.raises(ValueError, match=repr(next(iter(fields.values())))): ShortCaption(**fields)


def test_numbers_and_sentences_are_drawn_alike():
    s = [f"s{i}" for i in range(9)]
    for i in range(100):
        assert [s[j] for j in DEBIAS(range(9), sample_rng(3, 1, i))] == DEBIAS(s, sample_rng(3, 1, i))


def test_long_clips_short_caption_with_its_own_splitter():
    caption = "A view of St. Louis.\nIt is night. The arch shines."
    short = caption.replace("\n", " ").split(". ")[0]
    assert LONG_CLIP(split_sentences(caption, "period"), sample_rng(0, 0, 0)) == [short] == ["A view of St"]


# ---- what is drawn is uniform

def chi2(counts, n, cells):
    assert len(counts) <= cells
    return sum((c - n/cells)**2/(n/cells) for c in counts.values()) + (cells - len(counts))*n/cells


@pytest.mark.parametrize("make", [lambda i: sample_rng(0, 0, i), random.Random], ids=["numpy", "python"])
def test_number_and_subsets_are_uniform(make):
    draws = [tuple(DEBIAS(range(5), make(i))) for i in range(8000)]
    assert chi2(Counter(map(len, draws)), len(draws), 4) < 16.3      # 99.9 % of chi-square, 3 degrees of freedom
    for n, cells, limit in [(1, 4, 16.3), (2, 12, 31.3), (3, 24, 49.7), (4, 24, 49.7)]:   # every ordered choice
        of_n = [d for d in draws if len(d) == n]
        assert set(of_n) <= set(permutations(range(1, 5), n))
        assert chi2(Counter(of_n), len(of_n), cells) < limit


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_order_of_a_counted_draw_is_as_likely(count):
    rng, n = np.random.default_rng(0), 6000
    drawn = Counter(tuple(draw([1, 2, 3], rng, count=count)) for _ in range(n))
    cells = len(list(permutations(range(3), count)))
    assert chi2(drawn, n, cells) < {3: 13.8, 6: 20.5}[cells]


@pytest.mark.parametrize("share", [0, .25, .5, 1.])
def test_every_number_of_pads_up_to_the_share_is_drawn_as_often(share):
    rng, n, most = np.random.default_rng(0), 8000, int(share*41)
    drawn = Counter(random_pads(41, rng, share=share) for _ in range(n))
    assert set(drawn) == set(range(most + 1))
    assert all(abs(c - n/(most + 1)) < 5*np.sqrt(n/(most + 1)) for c in drawn.values())


# ---- pieces together

@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from([[summary], [drop_summary], []]), st.booleans(), SEEDS)
def test_a_counted_draw_takes_exactly_so_many(k, count, source, ordered, seed):
    recipe = Recipe([*source, partial(draw, count=count), *([in_order] if ordered else [])])
    pool = Recipe(source)(range(k), None)
    drawn = recipe(range(k), np.random.default_rng(seed))
    assert len(drawn) == len(set(drawn)) == min(count, len(pool)) and set(drawn) <= set(pool)
    if ordered: assert drawn == sorted(drawn)


@settings(deadline=None)
@given(st.integers(1, 9), SEEDS, st.sampled_from(list(RECIPES)))
def test_in_order_keeps_the_sentences_drawn(k, seed, name):
    recipe = RECIPES[name]
    ordered = Recipe([*recipe.short, in_order])
    drawn = recipe(range(k), np.random.default_rng(seed))
    assert ordered(range(k), np.random.default_rng(seed)) == sorted(drawn)


def test_both_captions_have_draws_of_their_own_and_short_ones_stay():
    both = Recipe([drop_summary, draw], random_pads, [shuffle], partial(random_pads, share=.5))
    for i in range(200):
        paper, rng = sample_rng(0, 0, i), sample_rng(0, 0, i)
        assert both.short_places(6, rng) == DEBIAS.short_places(6, paper)
        assert both.pads("short", 99, rng) == DEBIAS.pads("short", 99, paper)
        assert sorted(both.long_places(6, rng)) == list(range(6))
        assert 0 <= both.pads("long", 30, rng) <= 15
    assert DEBIAS.long_places(6, None) == list(range(6)) and DEBIAS.pads("long", 30, None) == 0   # nothing is drawn


def test_a_recipe_can_be_sent_to_another_process():
    for recipe in (*RECIPES.values(), Recipe([partial(draw, count=2)], partial(random_pads, share=.5))):
        again = pickle.loads(pickle.dumps(recipe))
        assert again == recipe and hash(again) == hash(recipe)
        assert again(range(9), sample_rng(0, 0, 5)) == recipe(range(9), sample_rng(0, 0, 5))


# ---- a recipe as plain data

WRITTEN = {
    "debias": {"short": ["drop_summary", "draw"], "short_pads": "random_pads"},
    "no_summary": {"short": ["drop_summary"], "short_pads": None, "long": []},
    "smartclip": {"short": [{"run": None}]},
    "sampled": {"short": ["drop_summary", {"draw": {"count": None}}]},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_name_and_the_recipe_written_out_are_one(name):
    written = Recipe.parse(WRITTEN[name])
    assert written == Recipe.parse(name) == RECIPES[name]
    assert written.as_dict() == RECIPES[name].as_dict()


def test_plain_data_gives_the_recipe_back():
    some = Recipe([drop_summary, partial(draw, count=2)], random_pads, [shuffle], partial(random_pads, share=.25))
    for recipe in (*RECIPES.values(), some):
        data = json.loads(json.dumps(recipe.as_dict()))
        assert data == recipe.as_dict() and Recipe.parse(data) == recipe == Recipe.parse(recipe)
    assert some.as_dict() == dict(
        short=["drop_summary", {"draw": {"count": 2}}],
        short_pads="random_pads",
        long=["shuffle"],
        long_pads={"random_pads": {"share": .25}},
        versions=dict(draw=1, drop_summary=1, random_pads=1, shuffle=1),
    )


def test_whole_and_half_numbers_are_one_recipe():
    zero, none = ({"short": [], "long_pads": {"random_pads": {"share": share}}} for share in (0, 0.))
    assert json.dumps(Recipe.parse(zero).as_dict()) == json.dumps(Recipe.parse(none).as_dict())


def test_another_version_is_another_recipe(own_pieces):
    def own(places, rng): return places
    piece(version=1)(own)
    first = Recipe([own])
    piece(version=2)(own)
    second = Recipe([own])
    assert first != second and first.as_dict() != second.as_dict()
    with pytest.raises(ValueError, match="made with version 1 of the piece own, which has 2 now"):
        Recipe.parse(first.as_dict())


@pytest.mark.parametrize("value, says", [
    ("debais", "no recipe 'debais'; did you mean debias?"),
    (None, "no recipe None"),
    (["draw"], "no recipe"),
    ({"shorts": []}, "no part of a recipe 'shorts'; did you mean short"),
    ({"long": []}, "needs `short`"),
    ({"short": "draw"}, "short must be a list of pieces, not 'draw'"),
    ({"short": ["darw"]}, "did you mean draw"),
    ({"short": ["random_pads"]}, "no piece"),
    ({"short": [{"draw": {"cuont": 1}}]}, "no option of draw 'cuont'; did you mean count?"),
    ({"short": [{"draw": {"count": 0}}]}, "count must be 1 or more"),
    ({"short": [{"draw": {"count": 1.5}}]}, "count must be 1 or more"),
    ({"short": [{"draw": {"count": True}}]}, "count must be 1 or more"),
    ({"short": [{"draw": 2}]}, "must be `name: value`, not 2"),
    ({"short": [{"draw": {"count": [1]}}]}, "must be a number or a text"),
    ({"short": [{"draw": {}, "run": {}}]}, "no piece"),
    ({"short": [], "short_pads": "draw"}, "no piece"),
    ({"short": [], "short_pads": {"random_pads": {"share": 1.1}}}, "share must be from 0 to 1"),
    ({"short": [], "short_pads": {"random_pads": {"share": -.1}}}, "share must be from 0 to 1"),
    ({"short": [], "short_pads": {"random_pads": {"share": float("nan")}}}, "share must be from 0 to 1"),
    ({"short": [], "short_pads": {"random_pads": {"share": True}}}, "share must be from 0 to 1"),
    ({"short": [], "short_pads": {"random_pads": {"share": "half"}}}, "share must be from 0 to 1"),
], ids=str)
def test_a_recipe_that_cannot_be_meant(value, says):
    with pytest.raises(ValueError) as e: Recipe.parse(value)
    assert says in str(e.value)


# ---- a reader's own pieces

def test_an_own_piece_with_options(own_pieces):
    @piece(version=3)
    def every(places, rng, step=2): return places[::step]
    recipe = Recipe([drop_summary, partial(every, step=3)])
    assert recipe(range(8), None) == [1, 4, 7]
    assert recipe.as_dict()["short"] == ["drop_summary", {"every": {"step": 3}}]
    assert recipe.as_dict()["versions"] == dict(drop_summary=1, every=3)
    assert Recipe.parse({"short": ["drop_summary", {"every": {"step": 3}}]}) == recipe


def test_an_own_piece_that_does_not_work(own_pieces):
    @piece()
    def later(places, rng): return [p + 1 for p in places]
    @piece()
    def nothing(places, rng): return []
    @piece()
    def too_many(n_post, rng): return n_post + 1
    with pytest.raises(ValueError, match=r"later made \[1\] of the places \[0\]"): Recipe([later])
    with pytest.raises(ValueError, match="nothing made"): Recipe([nothing])
    with pytest.raises(ValueError, match="too_many gives 1 of 0 pads"): Recipe([], too_many)


def test_functions_that_are_no_pieces(own_pieces):
    def plain(places, rng): return places
    with pytest.raises(ValueError, match="plain is not a piece yet"): Recipe([plain])
    with pytest.raises(ValueError, match="first parameters"): piece()(lambda x: x)
    plain.__name__ = "draw"
    with pytest.raises(ValueError, match="there is a piece draw in debias_clip.captions: give yours another name"):
        piece()(plain)


def test_a_cell_may_be_run_again_but_not_changed_without_a_new_version(own_pieces):
    def cell(text, version):
        names = {"piece": piece, "__name__": "__main__"}
        exec(f"@piece(version={version})\ndef own(places, rng, most=2): return {text}", names)
        return names["own"]
    cell("places[:most]", 1)
    own = cell("places[:most]", 1)
    assert Recipe([own])([7, 8, 9], None) == [7, 8]
    with pytest.raises(ValueError, match="own was changed: raise its version, 1"): cell("places[-most:]", 1)
    own = cell("places[-most:]", 2)
    assert Recipe([own])([7, 8, 9], None) == [8, 9]


# ---- permute

def test_permutations():
    s = [1, 2, 3, 4, 5]
    assert permute(s, "full") == s and permute(s, "full") is not s
    assert permute(s, "move") == [4, 2, 3, 1, 5]
    assert permute(s, "remove") == [2, 3, 4, 5]
    assert permute(s, "first") == [1] and permute(s, "first2") == [1, 2] and permute(s, "swap2") == [2, 1]
    assert s == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how, needed", dict(full=1, first=1, first2=2, swap2=2, remove=2, move=4).items())
def test_too_few_sentences(how, needed):
    assert min_sentences(how) == needed and permute(range(needed), how)
    with pytest.raises(ValueError, match=f"needs {needed} sentences and this caption has {needed - 1}"):
        permute(range(needed - 1), how)


@pytest.mark.parametrize("ask", [min_sentences, lambda how: permute([1], how)])
def test_unknown_permutation(ask):
    with pytest.raises(ValueError, match="did you mean remove"): ask("removed")
