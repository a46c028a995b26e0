"""The rehearsal: data in their exact layouts, tokenisers of the published kinds, and the paper's presets on them.

The last test runs notebooks of paper-b16 whole.
"""
import re

import pytest
from layouts import HELD_OUT, made_up_caption, write_data
from rehearsal import SMALL, data_of, rehearse, small_parameters, weights_of, write_tokenizer

from debias_clip.benchmarks import load_records
from debias_clip.checks import check_data
from debias_clip.datasets import DATASETS
from debias_clip.families import model_config
from debias_clip.records import load_image
from debias_clip.tokens import get_tokenizer

READ = [name for name, row in DATASETS.items() if row.reader]
pytestmark = pytest.mark.filterwarnings("ignore:.*published")


# ---- data

@pytest.fixture(scope="module")
def written(tmp_path_factory):
    "The folder of every data set."
    roots = {DATASETS[name].home: tmp_path_factory.mktemp(DATASETS[name].home) for name in READ}
    for home, root in roots.items(): write_data(home, root)
    return roots


@pytest.mark.parametrize("name", READ)
def test_every_protocol_reads_what_is_written_for_it(written, name):
    records = load_records(name, written[DATASETS[name].home])
    assert 2 <= len(records) <= (HELD_OUT if name == "sharegpt4v-val" else 32)
    if records.short is None: texts = [records.text(caption) for caption in records.captions]
    else: texts = [text for several in records.short for text in several]
    assert len(set(texts)) == len(texts) and all(text == text.strip() for text in texts)
    pictures = [load_image(file).tobytes() for file in list(records.images)[:8]]
    assert len(set(pictures)) == len(pictures)
    if records.short is None and "dci" not in name:
        assert min(map(len, records.captions)) >= 4                   # long enough for every order of the sentences


def test_the_oddities_of_the_real_files_are_there(written):
    tokenizer = get_tokenizer("ViT-B-16-quickgelu")
    dci, coco = load_records("dci", written["dci"]), load_records("coco", written["coco"])
    assert sum(len(tokenizer.encode(dci.text(caption))) > tokenizer.room for caption in dci.captions) == 1
    assert len(load_records("long-dci", written["dci"])) == len(dci)/2                     # blank ones are skipped
    assert sorted(map(len, coco.short)) == [5]*5 + [6]
    assert '" A picture' in (written["coco"]/"annotations/captions_val2017.json").read_text()
    assert (written["urban1k"]/"Urban1k/caption/3.txt").read_text().startswith("\n")
    assert {folder.name for folder in (written["sharegpt4v"]/"data").iterdir()} == {"sam", "coco", "llava"}


@pytest.mark.parametrize("name", [name for name in READ if not name.startswith("sharegpt4v")])
def test_nothing_but_the_numbers_is_wrong_with_them(written, name):
    report = check_data(name, written[DATASETS[name].home])
    assert report.faults.keys() <= {"counts"}, report.summary()


@pytest.mark.parametrize("backbone,first_differs", [("ViT-B-16-SigLIP", False), ("ViT-B-16-SigLIP2", True)])
def test_tokenisers_are_of_the_published_kinds(tmp_path, backbone, first_differs):
    write_tokenizer(tmp_path/backbone, first_differs)
    tokenizer, text = get_tokenizer(backbone, path=tmp_path/backbone), made_up_caption(3)
    ids = tokenizer.encode(text)
    assert 0 < len(ids) <= 2*len(text.split()) and max(ids) < model_config(backbone)["text_cfg"]["vocab_size"]
    assert (tokenizer.encode_sentence("The dog") != tokenizer.encode("The dog")) == first_differs
    assert (tokenizer.pad == tokenizer.eot) == (not first_differs)


# ---- settings

FINE = {"data": "sharegpt4v", "root": "data/sharegpt4v", "backbone": "ViT-B-16-quickgelu", "init": "openai",
        "batch_size": 256, "pca_group": 64, "pca_dim": 32, "lr": 1e-6}
PARAMETERS = {
    "out": "runs/x", "preset": "x", "seeds": [0], "pretraining": {}, "finetuning": FINE,
    "arms": {"start": None, "DeBias": {"recipe": "debias", "epochs": 6}},
    "tests": {"DOCCI": {"data": "docci", "root": "data/docci"}, "scenes": {"data": "scenes"}},
}


def test_only_what_few_records_cannot_bear_is_replaced():
    small = small_parameters(PARAMETERS)
    changed = {name: value for name, value in small.items() if PARAMETERS[name] != value}
    arms = {"start": None, "DeBias": {"recipe": "debias", "epochs": 1}}
    assert changed == {"finetuning": FINE | SMALL, "arms": arms} and FINE["batch_size"] == 256
    assert data_of(PARAMETERS) == {"data/sharegpt4v": "sharegpt4v", "data/docci": "docci"}
    assert weights_of(PARAMETERS) == [("ViT-B-16-quickgelu", "openai")]
    both = PARAMETERS | {"backbones": {"ViT-B-16-quickgelu": {}, "ViT-B-16-SigLIP": {"finetuning": {"init": "webli"}}}}
    assert weights_of(both) == [("ViT-B-16-quickgelu", "openai"), ("ViT-B-16-SigLIP", "webli")]


def test_what_draws_is_made_small_and_random():
    "A pipeline of gigabytes is replaced by a tiny one, and who looks at its pictures by what is trained from."
    pictures = {"pipeline": "sdxl", "checkpoints": {"mine": "mine.pt"}, "n_prompts": 8, "options": 4, "noises": 4,
                "steps": 30, "size": 1024, "guidance": 5.0, "judge": {"backbone": "ViT-H-14", "pretrained": "laion2b"}}
    small = small_parameters(PARAMETERS | pictures)
    assert {name: small[name] for name in pictures} == {
        "pipeline": None, "checkpoints": {}, "n_prompts": 1, "options": 2, "noises": 1, "steps": 1, "size": 16,
        "guidance": 5.0, "judge": {"backbone": "ViT-B-16-quickgelu", "pretrained": "openai"}}


# ---- notebooks

def rehearsed(preset, *only):
    "What a rehearsal prints."
    done = rehearse(preset, only)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_the_papers_preset_is_rehearsed():
    "Three notebooks of paper-b16 on tiny models of its four backbones."
    printed = rehearsed("paper-b16", "main_table", "permutation", "backbones")
    assert "[3/3] backbones" in printed
    for test in ("Urban1k", "DCI", "Long-DCI", "DOCCI", "COCO", "Flickr30k"):
        assert re.search(rf"^ *{test} +DeBias recipe +\d", printed, re.M), test


@pytest.mark.slow
def test_the_analyses_are_rehearsed():
    "The other notebooks of the preset. MINUTES."
    rehearsed("paper-b16", "ablation", "padding", "sentence_order", "attention", "similarity", "diagnose", "tradeoff")


@pytest.mark.slow
def test_the_pictures_are_rehearsed():
    printed = rehearsed("paper-l14", "generation")
    assert re.search(r"DeBias recipe .* 50\.0 ", printed)
