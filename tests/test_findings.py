"""Findings: every branch of every sentence reads well, and says what the numbers say."""
import re

import numpy as np
import pandas as pd
import pytest

from debias_clip.findings import (
    FEW_SEEDS,
    STATEMENTS,
    arm_said,
    attention_finding,
    backbones_finding,
    basis_said,
    claim_finding,
    compare,
    cosine_finding,
    details_finding,
    drops_finding,
    joined,
    listed,
    order_finding,
    paper_table,
    push_finding,
    sentence,
    steps_finding,
    weight_finding,
)
from debias_clip.tables import differences

HIGHER, LOWER, UNCLEAR = 4., -4., .5
VALUES = {"higher": HIGHER, "lower": LOWER, "unclear": UNCLEAR, "no interval": 1.}


def made(text="whole caption", value=HIGHER, seeds=5, **other):
    "A row of `tables.differences`; clear where the value is beyond ±2."
    row = dict(arm="DeBias recipe", against="Long-CLIP recipe", test="training author", text=text, direction="t2i")
    ends = dict(low=value - 1, high=value + 1, holm_low=value - 2, holm_high=value + 2)
    over = "over seeds" if seeds > 1 else "over images"
    return row | ends | dict(value=value, seeds=seeds, n=1000, interval=over) | other


def bare(**row): return made(value=1., seeds=1, low=np.nan, high=np.nan, holm_low=np.nan, holm_high=np.nan, **row)


def row_of(kind, **other): return bare(**other) if kind == "no interval" else made(value=VALUES[kind], **other)


def frame(*rows): return pd.DataFrame(list(rows))


def reads_well(text):
    "Whole sentences: a capital first, a full stop last, no gap, no missing value, nothing left of a template."
    for part in filter(None, text.split("\n\n")):
        assert part.endswith(".") and not re.search(r"nan|None|NaN|\{|\}|  | \.|,,|\.\.|;\.| ,", part), part
        told = re.sub(r"^\*\*[^*]*\*\*(: | \()?", "", part)
        for one in re.split(r"(?<=[a-z\])*])\. ", told): assert re.match(r"[A-Z*(t]", one), one
    assert text.count("(") == text.count(")") and text.count("[") == text.count("]")
    return text


# ---- the parts

def test_names():
    assert joined(["a"]) == "a" and joined("abcd") == "a, b, c and d"
    assert arm_said("Long-CLIP recipe, λ_s 0.5") == "the Long-CLIP recipe, λ_s 0.5"
    assert arm_said("pre-trained") == "the pre-trained model" and arm_said("+ sampling") == "*+ sampling*"


@pytest.mark.parametrize("seeds, said", [
    ([5, 5], "over 5 seeds"), ([3, 5], "over 3 to 5 seeds"),
    ([1, 1], "with one seed, whose intervals over images tell nothing of other seeds")])
def test_what_a_sentence_rests_on(seeds, said):
    assert basis_said(frame(*(made(seeds=n) for n in seeds))) == said
    assert basis_said(frame(bare())) == "with one seed"
    assert basis_said(frame(made(seeds=5, family=12))) == "over 5 seeds, corrected for 12 comparisons"
    assert basis_said(frame(made(seeds=5, family=1))) == "over 5 seeds"


def test_places_share_their_numbers():
    rows = frame(made("short", 3.), made("short", 4., test="other author"), made("move", 3.))
    assert listed(rows, by_test=True) == (
        "with short text (training author +3.0 points [2.0, 4.0], other author +4.0 points [3.0, 5.0]) and under Move "
        "(training author +3.0 points [2.0, 4.0])")


def test_an_interval_that_correction_widens_over_zero_is_marked():
    "Else \"no clear difference\" would stand beside an interval without zero."
    told = compare(frame(made("move", 1.5), made("remove", 3.), made("short", .5)))
    assert "under Remove (+3.0 points [2.0, 4.0])" in told and "with short text (+0.5 points [-0.5, 1.5])" in told
    assert "under Move (+1.5 points [0.5, 2.5] before correction)" in told


KINDS = ["higher", "lower", "unclear", "no interval"]
SUBSETS = [[k for i, k in enumerate(KINDS) if number >> i & 1] for number in range(1, 16)]

@pytest.mark.parametrize("kinds", SUBSETS, ids="+".join)
@pytest.mark.parametrize("brief", [False, True])
def test_every_mixture_is_a_sentence(kinds, brief):
    texts = dict(zip(KINDS, ("whole caption", "move", "remove", "short"), strict=True))
    told = reads_well(sentence(frame(*(row_of(kind, text=texts[kind]) for kind in kinds)), brief=brief))
    assert ("scores higher than" in told) == ("higher" in kinds)
    assert ("scores lower than" in told) == ("lower" in kinds)
    assert ("no clear difference" in told) == ("unclear" in kinds)
    assert ("there is no interval" in told) == ("no interval" in kinds)
    assert told.count("the DeBias recipe") + told.count("The DeBias recipe") == 1
    assert told.count("Long-CLIP recipe") == 1
    if not brief: assert "+1.0 points)" in told or "no interval" not in kinds


def test_a_sentence_in_full():
    rows = frame(made(), made("move", LOWER), made("short", UNCLEAR))
    assert sentence(rows) == (
        "Over 5 seeds, the DeBias recipe scores higher than the Long-CLIP recipe with whole captions (+4.0 points "
        "[3.0, 5.0]) and scores lower than it under Move (-4.0 points [-5.0, -3.0]); there is no clear difference with "
        "short text (+0.5 points [-0.5, 1.5]).")
    assert sentence(rows.iloc[2:], brief=True) == (
        "Over 5 seeds, there is no clear difference between the DeBias recipe and the Long-CLIP recipe anywhere.")
    assert compare(rows.iloc[:0]) == sentence(rows.iloc[:0]) == ""


def test_a_brief_sentence_names_what_is_clear_before_the_correction_alone():
    nearly = made("move", 4.) | dict(holm_low=-1., holm_high=9.)
    assert sentence(frame(made("remove"), nearly, made("short", UNCLEAR)), brief=True).endswith(
        "under Remove (+4.0 points [3.0, 5.0]); there is no clear difference elsewhere, though close to one under Move "
        "(+4.0 points [3.0, 5.0] before correction).")


# ---- does the claim hold?

@pytest.mark.parametrize("kinds, headline", [
    (["higher"]*3, "The claim holds here"),
    (["higher", "unclear", "unclear"], "The claim holds here in part"),
    (["higher", "no interval", "higher"], "The claim holds here in part"),
    (["higher", "lower", "unclear"], "The claim holds here in part, and in part the opposite is so"),
    (["lower", "unclear", "unclear"], "The claim does not hold here"),
    (["lower"]*3, "The claim does not hold here"),
    (["unclear"]*3, "Whether the claim holds here is not clear"),
    (["no interval"]*3, "Whether the claim holds here is not clear")])
def test_the_claim(kinds, headline):
    texts = ("whole caption", "move", "remove")
    rows = [row_of(kind, text=text) for kind, text in zip(kinds, texts, strict=True)]
    told = reads_well(claim_finding(frame(*rows, made("short", LOWER))))          # short text is no part of the claim
    assert told.startswith(f"**{headline}** (text→image recall@1, ") and "short" not in told


def test_the_claim_has_a_sentence_for_each_test_set():
    rows = [made(text, value, test=test) for test, value in (("training author", HIGHER), ("other author", UNCLEAR))
            for text in ("whole caption", "move", "remove")]
    told = reads_well(claim_finding(frame(*rows)))
    assert "On *training author*, the DeBias recipe scores higher than" in told
    assert "On *other author*, there is no clear difference between the DeBias recipe and" in told


def test_a_claim_without_its_arms():
    told = reads_well(claim_finding(frame(made(arm="pre-trained"))))
    assert told == "The claim was not tested: the DeBias recipe was not compared with the Long-CLIP recipe."
    assert claim_finding(differences([dict(arm="Long-CLIP recipe", seed=0, test="t")], "Long-CLIP recipe", ["test"]))


@pytest.mark.parametrize("kind, reason", [("higher", 0), ("unclear", 1), ("lower", 2), ("no interval", 1)])
def test_the_paper_beside_what_was_found(kind, reason):
    "Under Move and Remove points are lost, so less is as in the paper."
    turned = {"higher": "lower", "lower": "higher"}.get(kind, kind)
    gains = frame(*(row_of(kind, text=text) for text in ("whole caption", "short", "behind 48 tokens of filler")))
    more = frame(*(row_of(turned, text=text) for text in ("move", "remove")))
    shown = paper_table(gains, more)
    assert shown.index.tolist() == [s.paper for s in STATEMENTS]
    assert [r.lower() for r in shown["a possible reason"]] == [s.reasons[reason].lower() for s in STATEMENTS]
    for here in shown["here"]: reads_well(f"{here}.")
    if kind == "higher": assert "loses less than" in shown["here"].iloc[1]


def test_mixed_results_have_the_middle_reason():
    rows = frame(made(), made(value=LOWER, test="other author"))
    assert paper_table(rows, rows.iloc[:0])["a possible reason"].tolist() == [
        STATEMENTS[0].reasons[1][0].upper() + STATEMENTS[0].reasons[1][1:]]
    rows = frame(made(), made(value=UNCLEAR, test="other author"))          # clear in one of two, and none against it
    assert paper_table(rows, rows.iloc[:0])["a possible reason"].iloc[0].lower() == STATEMENTS[0].reasons[0].lower()


def test_too_few_seeds_are_said_to_be_too_few():
    "A plain interval without zero, but nothing clear after the correction."
    gains = frame(made(value=UNCLEAR))
    gains["low"], gains["high"] = .5, 2.
    assert paper_table(gains, gains.iloc[:0])["a possible reason"].iloc[0].lower() == FEW_SEEDS.lower()


def test_the_paper_beside_nothing():
    nothing = frame(made()).iloc[:0]
    assert paper_table(nothing, nothing).shape == (0, 2)


# ---- other experiments

@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind):
    steps = frame(row_of(kind, arm="+ sampling", against="+ summary removal"), row_of("unclear", arm="+ prefix padding",
                  against="+ sampling"))
    told = reads_well(steps_finding(steps))
    assert "*+ sampling*" in told and "between *+ prefix padding* and *+ sampling* anywhere." in told
    assert reads_well(steps_finding(steps.iloc[:0])) == "No two models were compared."


@pytest.mark.parametrize("kinds, says", [
    (["lower", "lower"], ", as in the paper."), (["lower", "unclear"], "; in the paper it loses less under both."),
    (["unclear", "unclear"], "; in the paper it loses less under both."),
    (["higher", "unclear"], ", unlike in the paper."),
    (["higher", "lower"], ", unlike in the paper."), (["no interval"]*2, "; in the paper it loses less under both.")])
def test_drops(kinds, says):
    rows = [row_of(kind, text=text) for kind, text in zip(kinds, ("move", "remove"), strict=True)]
    assert reads_well(drops_finding(frame(*rows))).endswith(says)
    told = reads_well(drops_finding(frame(*rows, made("move", HIGHER, arm="pre-trained"))))
    assert told.endswith("The pre-trained model loses more than the Long-CLIP recipe under Move (+4.0 points "
                         "[3.0, 5.0]).")


def test_drops_without_the_arm():
    assert "pre-trained" in reads_well(drops_finding(frame(made("move", arm="pre-trained"))))
    assert drops_finding(frame(made()).iloc[:0]) == "No two models were compared."


@pytest.mark.parametrize("kind", KINDS)
def test_backbones(kind):
    rows = frame(row_of(kind, backbone="scenes-clip"), row_of("unclear", backbone="scenes-siglip"))
    told = reads_well(backbones_finding(rows))
    assert [part.split(":")[0] for part in told.split("\n\n")] == ["**scenes-clip**", "**scenes-siglip**"]
    assert backbones_finding(rows.iloc[:0]) == "No two models were compared."


@pytest.mark.parametrize("kind", KINDS)
def test_pushes(kind):
    rows = frame(row_of(kind, by="words"), row_of("unclear", by="pads"))
    told = reads_well(push_finding(rows, 48))
    assert "behind 48 tokens of filler" in told and "behind 48 pads" in told
    assert push_finding(rows.iloc[:0], 48) == "No two models were compared."


@pytest.mark.parametrize("kind", KINDS)
def test_orders(kind):
    orders = ("shuffled, mean", "shuffled, worst", "summary at 4", "without 2")
    rows = frame(*(row_of(kind, order=order, backbone="scenes-clip") for order in orders))
    told = reads_well(order_finding(rows))
    if kind in ("higher", "lower"):
        for said in ("with shuffled sentences", "under the worst shuffle", "with the first sentence at place 4"):
            assert said in told
    assert order_finding(rows.iloc[:0]) == "No two models were compared."


def weights(**slopes):
    names = dict(long="Long-CLIP recipe", debias="DeBias recipe")
    return frame(*(dict(backbone="scenes-clip", arm=names[arm], x=x, value=1.2 - slope*x)
                   for arm, slope in slopes.items() for x in range(1, 21)))


@pytest.mark.parametrize("slopes, says", [
    (dict(long=.03, debias=0), "As in the paper, it falls off with Long-CLIP's recipe alone."),
    (dict(long=.03, debias=.03), "In the paper it does not fall off with the DeBias recipe; here it does."),
    (dict(long=0, debias=0), "In the paper it falls off with Long-CLIP's recipe; here it does not."),
    (dict(long=0, debias=.03), "In the paper it falls off with Long-CLIP's recipe; here it does not."),
    (dict(long=.03), "one of them is missing here.")])
def test_attention(slopes, says):
    told = reads_well(attention_finding(weights(**slopes)))
    assert told.endswith(says) and "(an even reader has 1)" in told
    assert attention_finding(weights(long=0).iloc[:0]) == ""


@pytest.mark.parametrize("value, low, says", [
    (.05, .04, "the whole caption is nearer to the image, unlike in the paper"), (.05, -.01, "about equally near"),
    (-.05, -.06, "the first sentence alone is nearer to the image, as in the paper"),
    (.05, np.nan, "about equally near")])
def test_cosines(value, low, says):
    nearer = frame(made(value=value, arm="Long-CLIP recipe", low=low, high=value + .01))
    told = reads_well(cosine_finding(nearer, frame(made(value=3.))))
    assert says in told and "the DeBias recipe gains more from the rest of the caption than" in told
    assert reads_well(cosine_finding(nearer, frame(made(value=UNCLEAR)))).count("no clear difference") == 1
    assert cosine_finding(nearer.iloc[:0], nearer.iloc[:0]) == "No two models were compared."


@pytest.mark.parametrize("kinds, says", [
    ({.1: "unclear", .5: "lower"}, "here the recipes part at 0.5 (in 1 of 1 comparisons) and not yet at 0.1"),
    ({.1: "lower", .5: "lower"}, "and here, too, the recipes part at 0.1 (in 1 of 1 comparisons)."),
    ({.1: "unclear", .5: "higher"}, "at no λ_s that was tried."), ({.1: "no interval"}, "at no λ_s that was tried."),
    ({.5: "lower"}, "which was not tried; they part at 0.5 (in 1 of 1 comparisons).")])
def test_weights(kinds, says):
    told = reads_well(weight_finding(frame(*(row_of(kind, text="move", λ_s=w) for w, kind in kinds.items()))))
    assert says in told and all(f"At λ_s {w:g}, " in told for w in kinds)
    assert weight_finding(frame(made(λ_s=.1)).iloc[:0]) == "No λ_s was tried with both recipes."


@pytest.mark.parametrize("kinds, says", [
    (["higher", "lower"], "*detail 0* scores higher"),
    (["lower", "unclear"], "The other detail makes no clear difference."),
    (["lower", "unclear", "no interval"], "The other 2 details make no clear difference."),
    (["unclear"], "No detail makes a clear difference (1 tried, over 5 seeds).")])
def test_details(kinds, says):
    rows = frame(*(row_of(kind, arm=f"detail {i}", against="DeBias recipe") for i, kind in enumerate(kinds)))
    assert says in reads_well(details_finding(rows))
    assert details_finding(rows.iloc[:0]) == "No detail was varied."
