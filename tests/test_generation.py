"""Late words in pictures: what is asked, what reaches the pipeline, and a score that an oracle passes.

The pipelines are tiny and of random weights, in the real classes.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

os.environ |= dict(HF_HUB_OFFLINE="1")
from debias_clip import generation
from debias_clip.config import arm_config, model_key
from debias_clip.families import SIGLIP
from debias_clip.generation import OWN, ask_arms, embed, encoders, generate, load_pipeline, place_costs
from debias_clip.models import create_model, create_model_and_transforms, save_checkpoint
from debias_clip.pipelines import random_pipeline, to_diffusers
from debias_clip.preset import notebook_cells
from debias_clip.questions import (
    Question,
    asked_pictures,
    photographs,
    questions_of,
    recognised,
    scene_questions,
    second_model,
    seen,
    sees,
)
from debias_clip.scenes import CELL, COLOURS, RGB, SHAPES
from debias_clip.tables import reading
from debias_clip.tokens import get_tokenizer

pytest.importorskip("diffusers")
REPO, N = Path(__file__).parents[1], 6


@pytest.fixture(scope="module")
def world():
    return scene_questions(N, seed=3)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return create_model("scenes-clip", context_length=88, keep=8).eval()


@pytest.fixture
def pipeline():
    found = random_pipeline("scenes-clip")
    found.set_progress_bar_config(disable=True)
    return found


# ---- what is asked


@given(
    st.lists(st.sampled_from(["A dog sleeps.", "It rains.", "The sky is grey!", "Who knows?"]), max_size=5),
    st.integers(0, 2),
)
def test_early_and_late_hold_the_same_sentences(rest, k):
    q = Question(" ".join([*rest, "A {} boat lies there."]), "a {} boat", ("red", "blue", "green"))
    late, early, asked = q.text(k), q.text(k, "early"), f"A {q.options[k]} boat lies there."
    assert late.endswith(asked) and early.startswith(asked) and sorted(late.split()) == sorted(early.split())
    assert q.probes()[k] == f"a {q.options[k]} boat"


@pytest.mark.parametrize(
    "prompt, probe, options, says",
    [
        ("A boat.", "a {}", "ab", "in its last sentence"),
        ("A {} boat. Sun.", "a {}", "ab", "in its last sentence"),
        ("A {} {} boat.", "a {}", "ab", "one {}"),
        ("A {} boat.", "a boat", "ab", "probe needs one"),
        ("A {} boat.", "a {}", "a", "two or more"),
        ("A {} boat.", "a {}", "aa", "two or more"),
    ],
)
def test_questions_that_cannot_be_asked(prompt, probe, options, says):
    with pytest.raises(ValueError, match=says):
        Question(prompt, probe, tuple(options))


def test_other_places_and_prompts_are_refused():
    with pytest.raises(ValueError, match='"late" or "early"'):
        photographs(1)[0].text(0, "middle")
    for wrong in ("photos", [], None):
        with pytest.raises(ValueError, match='prompts is "scenes", "photographs"'):
            questions_of(wrong)
    own = questions_of([dict(prompt="A {} boat.", probe="a {} boat", options=["red", "blue"])] * 3, 2)
    assert (
        len(own) == 2
        and own[0].options == ("red", "blue")
        and questions_of("photographs", 1, 2)[0].options == photographs(1)[0].options[:2]
        and len(questions_of("photographs", 3)) == 3 == len(questions_of("scenes", 3))
    )


def test_scenes_are_told_as_they_are(world):
    "Every object but the asked one with its colour; the asked one's shape is its alone, so no picture is ambiguous."
    questions, scenes, cells = world
    for i, (q, cell) in enumerate(zip(questions, cells, strict=False)):
        present = np.flatnonzero(scenes.present[i])
        shape = list(SHAPES)[scenes.shape[i, cell]]
        assert (
            cell in present
            and (scenes.shape[i, present] == scenes.shape[i, cell]).sum() == 1
            and q.probe == f"a {{}} {shape}"
            and q.options == tuple(COLOURS)
        )
        told = [
            f"a {list(COLOURS)[scenes.colour[i, c]]} {list(SHAPES)[scenes.shape[i, c]]}" for c in present if c != cell
        ]
        assert (
            all(t in q.prompt.lower() for t in told)
            and q.prompt.count(".") == len(present) + 1
            and q.prompt.split(". ")[-1].startswith("There is a {}")
        )


def test_asked_pictures_differ_in_the_asked_cell_alone(world):
    _, scenes, cells = world
    a, b = asked_pictures(scenes, cells, 0), asked_pictures(scenes, cells, 1)
    for i, cell in enumerate(cells):
        changed = (a[i] != b[i]).any(-1)
        rows, columns = np.nonzero(changed)
        assert changed.any() and set(rows // CELL) == {cell // 3} and set(columns // CELL) == {cell % 3}


# ---- the score

SHORT = get_tokenizer("scenes-clip", 28)


class Oracle(nn.Module):
    "Knows the colours, and in which cell of each picture to look."

    family = SIGLIP  # whose rows are read as they are

    def __init__(self, cells):
        super().__init__()
        self.cells, self.p, self.context_length = iter(cells), nn.Parameter(torch.zeros(1)), SHORT.context_length

    def encode_image(self, image):
        row, column = divmod(int(next(self.cells)), 3)
        cell = image[0, :, CELL * row : CELL * (row + 1), CELL * column : CELL * (column + 1)].flatten(1)
        return -((cell[:, None] - torch.tensor(RGB).T[..., None]) ** 2).sum(0).min(1).values[None]

    def encode_text(self, rows, normalize=False):
        return torch.tensor([[float(SHORT.encode(c)[0] in row) for c in COLOURS] for row in rows.tolist()])


def as_tensor(image):
    return torch.tensor(np.asarray(image)).permute(2, 0, 1).float()


def test_an_oracle_recognises_what_is_drawn_and_nothing_else(world):
    questions, scenes, cells = world
    pairs = [(q, k) for k in range(8) for q in range(N)]
    pictures = np.concatenate([asked_pictures(scenes, cells, k) for k in range(8)])
    look = lambda pictures: recognised(
        seen((Oracle([*cells] * 8), as_tensor, SHORT), pictures, questions, pairs), questions, pairs
    )
    right, swapped = look(pictures), look(np.roll(pictures, N, 0))  # every colour drawn as the one before it
    assert right["value"] == 100 and swapped["value"] == 0 and right["n"] == 8 * N and right["chance"] == 12.5
    assert (
        right["shares"].tolist() == [100] * N and right["low"] < 60 and swapped["high"] > 40
    )  # six questions say no more
    half = look(np.concatenate([pictures[: 4 * N], np.roll(pictures, N, 0)[4 * N :]]))
    assert half["value"] == 50 and half["low"] < 50 < half["high"]


def test_a_tie_is_not_recognised():
    class Blind(Oracle):
        def encode_image(self, image):
            return torch.zeros(1, 8)

    (q,) = photographs(1)
    found = seen((Blind([]), as_tensor, SHORT), np.zeros((4, 8, 8, 3), np.uint8), [q], [(0, k) for k in range(4)])
    assert found.tolist() == [3] * 4 and recognised(found, [q], [(0, k) for k in range(4)])["value"] == 0


def answers(rng, questions, options, p=1 / 8, alike=4, sims=1000):
    "What `seen` might return, int [sims, questions*options]: each question has a probability of its own, p on average."
    share = rng.beta(p * alike, (1 - p) * alike, (sims, questions, 1))
    return (rng.random((sims, questions, options)) >= share).astype(int).reshape(sims, -1)


@pytest.mark.parametrize("questions, options", [(8, 8), (3, 3), (40, 8)])
def test_chance_is_seldom_left_out(questions, options):
    "Pictures of a question are alike; Wilson's interval over pictures would leave chance out in every sixth run."
    asked, of = (
        [(q, k) for q in range(questions) for k in range(options)],
        [Question("A {} boat.", "a {} boat", tuple("abcdefgh"[:options]))] * questions,
    )
    rows = [recognised(found, of, asked) for found in answers(np.random.default_rng(0), questions, options)]
    assert (
        np.isclose(np.mean([r["value"] for r in rows]), 12.5, atol=1)
        and np.mean([not r["low"] <= 12.5 <= r["high"] for r in rows]) < 0.07
    )
    assert all(0 <= r["low"] < r["high"] <= 100 and r["low"] - 1e-9 <= r["value"] <= r["high"] + 1e-9 for r in rows)


@pytest.mark.parametrize("questions, options, p", [(8, 8, 1 / 8), (8, 8, 1 / 2), (3, 3, 1 / 3)])
def test_places_that_are_alike_are_seldom_told_apart(questions, options, p):
    "A bootstrap over eight questions tells them apart in every eighth run."
    rng = np.random.default_rng(1)
    both = {
        text: 100 * (1 - answers(rng, questions, options, p).reshape(1000, questions, options).mean(2))
        for text in ("late", "early")
    }
    cost = place_costs(
        [dict(arm=i, seed=0, text=text, shares=shares[i]) for i in range(1000) for text, shares in both.items()]
    )
    assert (
        len(cost) == 1000
        and set(cost.interval) == {"over questions"}
        and ((cost.low > 0) | (cost.high < 0)).mean() < 0.07
    )


def test_costs_by_hand():
    row = lambda arm, seed, text, *shares: dict(arm=arm, seed=seed, text=text, shares=np.array(shares, float))
    cost = place_costs(
        [
            row("a", 0, "late", 10, 20),
            row("a", 0, "early", 30, 60),
            row("b", 0, "late", 10),
            row("b", 0, "early", 30),
            *[row("c", s, text, s * v, v) for s in (0, 1) for text, v in (("late", 40), ("early", 20))],
        ]
    ).set_index("arm")
    assert (
        cost.value.to_dict() == dict(a=-30, b=-20, c=15)
        and cost.interval.tolist() == ["over questions", "over questions", "over seeds"]
        and cost.seeds.tolist() == [1, 1, 2]
    )
    assert (
        np.isclose(cost.high["a"] + 30, 12.706 * 10, rtol=1e-4)
        and np.isnan(cost.low["b"])
        and np.isclose(cost.high["c"] - 15, 12.706 * 5, rtol=1e-4)
    )
    told = reading(cost.reset_index())
    assert "**a** against early, late" in told and "no clear difference" in told
    assert "no interval" in reading(cost.loc[["b"]].reset_index())


def test_a_single_question_has_no_interval():
    (q,) = questions_of("photographs", 1)
    row = recognised([0, 1, 2, 3], [q], [(0, k) for k in range(4)])
    assert (row["value"], row["low"], row["high"], row["chance"]) == (25, None, None, 25)


def test_a_random_pipeline_gets_no_verdict():
    "The notebook's own cell."
    (code,) = (
        c["source"]
        for c in notebook_cells(REPO / "nbs" / "experiments" / "generation.ipynb")
        if "reading(" in c["source"] and "import" not in c["source"]
    )
    rows = [
        dict(arm="a", seed=0, text=text, shares=np.array(shares))
        for text, shares in (("late", [50.0, 60, 70]), ("early", [10.0, 20, 31]))
    ]
    for pipeline, told in ((None, "There is no verdict"), ("sdxl", "better")):
        given = dict(rows=rows, pipeline=pipeline, place_costs=place_costs, reading=reading, Markdown=lambda text: text)
        exec(code.replace("Markdown(", "said = Markdown("), given)
        assert told in given["said"] and ("better" in given["said"]) == (pipeline is not None)


def test_how_well_the_second_model_sees_is_its_score_on_certain_pictures():
    _, _, cells = scene_questions(5, 0)
    row = sees((Oracle([*cells] * 8), as_tensor, SHORT), n=5)
    assert row["value"] == 100 and row["n"] == 40 and row["chance"] == 12.5


# ---- what reaches the pipeline


@torch.no_grad()
def layers(model, rows):
    x = model.token_embedding(rows) + model.positional_embedding
    for block in model.transformer.resblocks[:-1]:
        x = block(x, attn_mask=model.attn_mask)
    return x


@torch.no_grad()
def test_embeddings_are_the_text_encoders_own_at_full_length(model, pipeline, world):
    texts = [q.text(2) for q in world[0]]
    before, cut = embed(pipeline, texts)
    assert before["prompt_embeds"].shape == (N, 28, 160) and cut == N
    embeds, cut = embed(to_diffusers(model, pipeline), texts)
    assert cut == 0 and {k: tuple(v.shape) for k, v in embeds.items()} == dict(
        prompt_embeds=(N, 88, 160),
        negative_prompt_embeds=(N, 88, 160),
        pooled_prompt_embeds=(N, 32),
        negative_pooled_prompt_embeds=(N, 32),
    )
    ids = lambda t: t(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    torch.testing.assert_close(
        embeds["prompt_embeds"][..., :128], layers(model, ids(pipeline.tokenizer)), rtol=1e-4, atol=1e-4
    )
    second = pipeline.text_encoder_2(ids(pipeline.tokenizer_2), output_hidden_states=True)
    assert torch.equal(embeds["prompt_embeds"][..., 128:], second.hidden_states[-2]) and torch.equal(
        embeds["pooled_prompt_embeds"], second.text_embeds
    )
    tok = get_tokenizer("scenes-clip", 88)
    assert [row[row != tok.eot].tolist() for row in ids(pipeline.tokenizer)] == [
        [tok.sot, *tok.encode(t)] for t in texts
    ]


def test_cut_prompts_are_counted_in_silence(pipeline, world):
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for log in loggers:
        log.addHandler(handler)
    try:
        levels = [log.level for log in loggers]
        assert embed(pipeline, [q.text(0) for q in world[0]] + ["a red ring"])[1] == N and not told
        assert [log.level for log in loggers] == levels
        pipeline.encode_prompt(world[0][0].text(0), device="cpu")
        assert any("truncated" in t for t in told)  # otherwise this test would hear nothing in any case
    finally:
        for log in loggers:
            log.removeHandler(handler)


def test_a_late_word_reaches_the_picture_only_in_a_long_context(model, pipeline, world):
    q, how = world[0][0], dict(steps=2, size=16)
    pair = [q.text(0), q.text(1)]
    a, b = generate(pipeline, pair, [4, 4], **how)[0]
    assert np.array_equal(a, b)  # 28 tokens: cut before it
    early, other = generate(pipeline, [q.text(0, "early"), q.text(1, "early")], [4, 4], **how)[0]
    assert not np.array_equal(early, other)
    to_diffusers(model, pipeline)
    pictures, cut = generate(pipeline, pair, [4, 4], **how)
    assert (
        cut == 0 and not np.array_equal(*pictures) and pictures.dtype == np.uint8 and pictures.shape == (2, 16, 16, 3)
    )
    embeds = embed(pipeline, pair)[0]["prompt_embeds"][..., :128]
    at = len(get_tokenizer("scenes-clip", 88).encode(pair[0][: pair[0].rindex(" a ") + 2])) + 1
    assert torch.equal(embeds[0, :at], embeds[1, :at]) and not torch.equal(embeds[0, at], embeds[1, at])


def test_pictures_depend_on_prompt_and_noise_alone(model, pipeline, world):
    to_diffusers(model, pipeline)
    texts, how = [q.text(k) for k, q in enumerate(world[0][:3])], dict(steps=2, size=16)
    whole = generate(pipeline, texts, [0, 1, 2], **how)[0]
    for batch in (1, 2):
        parts = generate(pipeline, texts, [0, 1, 2], batch=batch, **how)[0]
        assert np.abs(parts.astype(int) - whole).max() <= 1  # sums in another order
    assert np.array_equal(generate(pipeline, texts, [0, 1, 2], **how)[0], whole)
    assert not np.array_equal(generate(pipeline, texts[:1], [9], **how)[0], whole[:1])
    assert not np.array_equal(generate(pipeline, texts[:1], [0], guidance=1.5, **how)[0], whole[:1])


def test_stable_diffusion_is_asked_in_the_same_way(model, pipeline, world):
    "A pipeline of one encoder, whose pooled text goes nowhere."
    import diffusers

    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        cross_attention_dim=128,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    sd = diffusers.StableDiffusionPipeline(
        vae=pipeline.vae,
        scheduler=pipeline.scheduler,
        tokenizer=pipeline.tokenizer,
        text_encoder=pipeline.text_encoder,
        unet=unet,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    sd.set_progress_bar_config(disable=True)
    embeds, _ = embed(to_diffusers(model, sd), [world[0][0].text(0)])
    assert embeds.keys() == {"prompt_embeds", "negative_prompt_embeds"} and embeds["prompt_embeds"].shape == (
        1,
        88,
        128,
    )
    assert generate(sd, [world[0][0].text(0)], [0], steps=1, size=16)[0].shape == (1, 16, 16, 3)


def test_random_pipelines_are_the_same_and_disturb_nothing():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    a = random_pipeline("scenes-clip")
    assert torch.equal(torch.rand(3), want)
    b, c = random_pipeline("scenes-clip"), random_pipeline("scenes-clip", seed=1)
    state = lambda p: torch.cat(
        [x.flatten() for part in (p.unet, p.vae, p.text_encoder, p.text_encoder_2) for x in part.parameters()]
    )
    assert torch.equal(state(a), state(b)) and not torch.equal(state(a), state(c)) and torch.isfinite(state(a)).all()
    assert a.tokenizer.model_max_length == a.tokenizer_2.model_max_length == 28


def test_a_pipeline_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no pipeline 'nobody/nothing' here.*name a folder of diffusers"):
        load_pipeline("nobody/nothing", "scenes-clip")


def test_pictures_that_are_no_pictures_are_refused(pipeline, world):
    with torch.no_grad():
        pipeline.vae.decoder.conv_out.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        generate(pipeline, [world[0][0].text(0)], [0], steps=1, size=16)


# ---- models

SMALL = dict(data="scenes", keep=8, epochs=1, batch_size=8, pca_dim=4, lr=1e-3, warmup=1)
FINE = SMALL | dict(data_options=dict(split="train", n=16), backbone="scenes-clip", context_length=88)
PRE = SMALL | dict(
    data_options=dict(split="web", text="web", n=16), recipe=None, short_weight=0.0, context_length=28
)
ARMS = {"pre-trained": None, "DeBias recipe": dict(recipe="debias")}


def test_the_arms_are_those_of_other_experiments(model, tmp_path):
    file = save_checkpoint(model, tmp_path / "mine.safetensors")
    experiment = dict(arms=ARMS, checkpoints={"mine": str(file)}, seeds=[0, 1], finetuning=FINE, pretraining=PRE)
    found = list(encoders(experiment, tmp_path / "models"))
    assert [(n, s) for n, s, _ in found] == [
        (OWN, 0),
        ("pre-trained", 0),
        ("DeBias recipe", 0),
        ("pre-trained", 1),
        ("DeBias recipe", 1),
        ("mine", 0),
    ] and found[0][2] is None
    assert {f.name for f in (tmp_path / "models").iterdir()} >= {
        model_key(arm_config(FINE, PRE, s, dict(recipe="debias"))) for s in (0, 1)
    }
    assert torch.equal(found[-1][2].positional_embedding, model.positional_embedding) and not any(
        m.training for _, _, m in found[1:]
    )


def test_every_model_draws_the_same_prompts_from_the_same_noise(model, pipeline, world, monkeypatch):
    asked, plain = [], generation.generate
    monkeypatch.setattr(
        generation,
        "generate",
        lambda p, texts, seeds, **how: (
            asked.append((texts, seeds, p.tokenizer.model_max_length)),
            plain(p, texts, seeds, **how),
        )[1],
    )
    torch.manual_seed(7)
    other, judge = (
        create_model("scenes-clip", context_length=88, keep=8).eval(),
        (
            create_model("scenes-clip", context_length=28, keep=8).eval(),
            create_model_and_transforms("scenes-clip", None, 28, 8)[2],
            SHORT,
        ),
    )
    questions = [replace(q, options=q.options[:2]) for q in world[0][:2]]
    rows, shown = ask_arms(
        [(OWN, 0, None), ("a", 0, model), ("b", 0, other)],
        pipeline,
        judge,
        questions,
        noises=2,
        n_shown=3,
        steps=1,
        size=16,
    )
    assert [(r["arm"], r["text"], r["n"]) for r in rows] == [
        (a, p, 8) for a in (OWN, "a", "b") for p in ("late", "early")
    ]
    assert [length for *_, length in asked] == [28, 28, 88, 88, 88, 88]
    texts, seeds = {tuple(t) for t, *_ in asked[::2]}, {tuple(s) for _, s, _ in asked}
    assert len(texts) == 1 and seeds == {(0, 1000, 0, 1000, 1, 1001, 1, 1001)}  # a prompt's colours share their noise
    assert [r["truncated"] for r in rows] == [8, 8, 0, 0, 0, 0] and all(
        len(r["shares"]) == 2 and r["shares"].mean() == r["value"] for r in rows
    )
    assert shown.keys() == {(r["arm"], r["text"]) for r in rows} and all(
        p.shape == (3, 16, 16, 3) for p in shown.values()
    )
    assert not np.array_equal(shown["a", "late"], shown["b", "late"])


@pytest.mark.parametrize("likes", [0, 2])
def test_who_always_says_the_same_is_at_chance(pipeline, likes):
    "With fewer options than a prompt has, too: the others are not there."

    class Fond(Oracle):
        def encode_image(self, image):
            return torch.eye(8)[likes][None]

    for options in (3, 8):
        rows, _ = ask_arms(
            [(OWN, 0, None)],
            pipeline,
            (Fond([]), as_tensor, SHORT),
            questions_of("scenes", 2, options),
            steps=1,
            size=16,
        )
        assert all(
            np.isclose(r["value"], r["chance"]) and np.isclose(r["chance"], 100 / options) and r["n"] == 2 * options
            for r in rows
        )


def test_the_second_model_is_another(tmp_path):
    judge, transform, tok = second_model(dict(backbone="scenes-clip", seed=1), PRE, tmp_path)
    assert judge.context_length == tok.context_length == 28 and model_key(arm_config(FINE, PRE, 1, {}).init) in {
        f.name for f in tmp_path.iterdir()
    }
    file = save_checkpoint(judge, tmp_path / "judge.safetensors")
    again, _, tok = second_model(dict(backbone="scenes-clip", pretrained=str(file)), {}, tmp_path)
    assert torch.equal(again.positional_embedding, judge.positional_embedding) and tok.context_length == 28
    with pytest.raises(ValueError, match="The second model has no weights"):
        second_model(dict(backbone="scenes-clip"), {}, tmp_path)
