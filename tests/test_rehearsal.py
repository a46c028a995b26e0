"""The rehearsal: data in their exact layouts, weights and tokenisers where published ones lie, and the paper's presets on them.

The last test runs paper-b16 whole: five minutes on two cores; the others a few seconds.
"""
import json, os, re, subprocess, sys
from pathlib import Path

import pytest

from debias_clip import rehearsal
from debias_clip.data import PROTOCOLS, load_image, load_records
from debias_clip.datasets import DATASETS, check_data
from debias_clip.rehearsal import SMALL, made_up_caption, prepare, small_parameters, write_data
from debias_clip.tokens import get_tokenizer, model_config

REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    "The folder of every data set."
    roots = {name: tmp_path_factory.mktemp(name) for name in DATASETS}
    for name, root in roots.items(): write_data(name, root)
    return roots


@pytest.mark.filterwarnings("ignore:.*published")
@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_reads_what_is_written_for_it(written, name):
    data = next(n for n, d in DATASETS.items() if name in (n, *d.protocols))
    if name == "flickr30k-full": assert (written[data]/"results_20130124.token").is_file()
    records = load_records(name, written[data])
    assert 2 <= len(records) <= (1000 if name == "sharegpt4v-val" else 32)
    texts = [records.text(c) for c in records.captions] if records.short is None else [t for several in records.short for t in several]
    assert len(set(texts)) >= .9*len(texts) and all(t == t.strip() for t in texts)
    pictures = [load_image(f).tobytes() for f in list(records.images)[:8]]
    assert len(set(pictures)) == len(pictures)
    if records.short is None and name != "dci": assert min(map(len, records.captions)) >= 4       # long enough for every order of the sentences


@pytest.mark.filterwarnings("ignore:.*published")
def test_the_oddities_of_the_real_files_are_there(written):
    tok = get_tokenizer("ViT-B-16-quickgelu")
    dci, coco = load_records("dci", written["dci"]), load_records("coco", written["coco"])
    assert sum(len(tok.encode(dci.text(c))) > tok.room for c in dci.captions) == 1                  # one caption is cut
    assert "8 blank ones skipped" in load_records("long-dci", written["dci"]).protocol
    assert sorted(map(len, coco.short)) == [5]*5 + [6]
    assert all(a["caption"] != a["caption"].strip() for a in json.loads((written["coco"]/"annotations/captions_val2017.json").read_text())["annotations"])
    assert (written["urban1k"]/"Urban1k/caption/2.txt").read_text().startswith("\n")
    assert {p.parts[-3] for p in (written["sharegpt4v"]/"data").rglob("*.jpg")} >= {"sam", "coco"}


@pytest.mark.parametrize("name", [n for n in DATASETS if n != "sharegpt4v"])
def test_nothing_but_the_numbers_is_wrong_with_them(written, name):
    "`debias-clip data check` finds the counts other than published, and no fault of a file."
    protocol = next(n for n in (name, *DATASETS[name].protocols) if n in PROTOCOLS)
    found = check_data(protocol, written[name]).summary()
    for fault in ("missing", "unreadable", "misspelt", "damaged"): assert not re.search(rf"[1-9]\d* [a-z ]*{fault}", found), found


def test_tokenisers_are_of_the_published_kinds(tmp_path):
    text = made_up_caption(3)
    for backbone, first_differs in (("ViT-B-16-SigLIP", False), ("ViT-B-16-SigLIP2", True)):
        rehearsal._tokenizer(tmp_path/backbone, first_differs)
        tok = get_tokenizer(backbone, path=tmp_path/backbone)
        ids = tok.encode(text)
        assert 0 < len(ids) <= 2*len(text.split()) and max(ids) < model_config(backbone)["text_cfg"]["vocab_size"]
        assert (tok.encode_sentence("The dog") != tok.encode("The dog")) == first_differs
        assert tok.join([tok.encode_sentence(s) for s in ("A dog.", "It rests.")]) == tok.encode("A dog. It rests.")
        assert (tok.pad == tok.eot) == (not first_differs)


FINE = dict(data="sharegpt4v", root="data/sharegpt4v", backbone="ViT-B-16-quickgelu", init="openai", batch_size=256, pca_dim=32, lr=1e-6)
PARAMETERS = dict(out="runs/x", preset="x", seeds=[0], arms={"start": None, "DeBias": {"recipe": "debias", "epochs": 6}}, pretraining={}, finetuning=FINE,
                  tests={"DOCCI": dict(data="docci", root="data/docci"), "scenes": dict(data="scenes")})


def test_only_what_few_records_cannot_bear_is_replaced():
    small, roots, weights = small_parameters(PARAMETERS)
    changed = {k: v for k, v in small.items() if PARAMETERS[k] != v}
    assert changed == dict(finetuning=FINE | SMALL, arms={"start": None, "DeBias": {"recipe": "debias", "epochs": 1}})
    assert roots == {"data/sharegpt4v": "sharegpt4v", "data/docci": "docci"} and weights == [("ViT-B-16-quickgelu", "openai")]
    assert PARAMETERS["finetuning"] is FINE and FINE["batch_size"] == 256


def test_what_draws_is_made_small_and_random():
    "A pipeline of gigabytes is replaced by a tiny one, and who looks at its pictures by what is trained from."
    pictures = dict(pipeline="sdxl", checkpoints={"mine": "mine.pt"}, n_prompts=8, options=4, noises=4, steps=30, size=1024, guidance=5.0, judge=dict(backbone="ViT-H-14", pretrained="laion2b_s32b_b79k"))
    small, roots, weights = small_parameters({k: v for k, v in PARAMETERS.items() if k != "tests"} | pictures)
    assert {k: small[k] for k in pictures} == dict(pipeline=None, checkpoints={}, n_prompts=1, options=2, noises=1, steps=1, size=16, guidance=5.0, judge=dict(backbone="ViT-B-16-quickgelu", pretrained="openai"))
    assert roots == {"data/sharegpt4v": "sharegpt4v"} and weights == [("ViT-B-16-quickgelu", "openai")] and pictures["size"] == 1024


@pytest.mark.parametrize("root", ["/disk/docci", "../docci"])
def test_data_outside_the_checkout_are_written_inside_it(root):
    small, roots, _ = small_parameters(PARAMETERS | dict(tests={"t": dict(data="docci", root=root)}))
    assert small["tests"]["t"]["root"] == "data/docci" and "data/docci" in roots


def test_what_cannot_be_made_up_is_said():
    with pytest.raises(ValueError, match="mine.csv is a table of one's own"): small_parameters(PARAMETERS | dict(finetuning=FINE | dict(data="mine.csv", root=None)))
    with pytest.raises(ValueError, match="init weights/mine.pt is a file of one's own"): small_parameters(PARAMETERS | dict(finetuning=FINE | dict(init="weights/mine.pt")))
    with pytest.raises(ValueError, match="No weights 'opnai' of ViT-B-16-quickgelu are on the hub; there are openai"): rehearsal.publish("ViT-B-16-quickgelu", "opnai", "nowhere")


def test_nothing_is_written_where_the_disk_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal.shutil, "disk_usage", lambda folder: type("Usage", (), dict(free=int(8e8)))())
    with pytest.raises(ValueError, match=r"up to 1 GB of models, and .* has 1 GB free: name another folder \(TMPDIR\)"): prepare(tmp_path, "x", {REPO/"nbs/experiments/main_table.ipynb": PARAMETERS})
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_in_a_hurry_loads_the_same_weights(tmp_path):
    "Modules made without drawing their weights: whatever they hold, the file replaces all of it."
    from debias_clip.models import create_model, save_checkpoint
    for name in ("scenes-clip", "scenes-siglip"): save_checkpoint(create_model(name, keep=8), tmp_path/f"{name}.safetensors")
    code = """
import sys, torch
from safetensors.torch import load_file
from debias_clip.models import load_checkpoint
from debias_clip.rehearsal import hurry
hurry()
for name in ("scenes-clip", "scenes-siglip"):
    model, want = load_checkpoint(f"{name}.safetensors"), load_file(f"{name}.safetensors")
    got = model.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    buffers = [b for n, b in model.named_buffers() if n not in want]
    assert all(torch.isfinite(b).all() or (b[~torch.isfinite(b)] == -torch.inf).all() for b in buffers)     # the mask; nothing that no file holds is left unmade
assert torch.equal(torch.nn.init.normal_(torch.zeros(3)), torch.zeros(3))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(REPO)}, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def rehearsed(preset, tmp_path, *only):
    "What a rehearsal of some experiments prints; it leaves nothing behind, gigabytes least of all."
    before = {f: f.stat().st_mtime_ns for f in (REPO/"runs"/preset).rglob("*")}
    done = subprocess.run([sys.executable, "-c", "from debias_clip.runs import main; main()", "run", preset, "--rehearse", *(a for name in only for a in ("--only", name))], cwd=REPO, text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)}, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"REHEARSAL of {preset}: random weights" in done.stdout and list(tmp_path.iterdir()) == []
    assert {f: f.stat().st_mtime_ns for f in (REPO/"runs"/preset).rglob("*")} == before
    return done.stdout


def test_the_papers_preset_is_rehearsed(tmp_path):
    """Four notebooks of paper-b16 on random weights of its four backbones. Five minutes.

    The longest test of the suite: nothing but the data is new to a reader who has them."""
    out = rehearsed("paper-b16", tmp_path, "main_table", "ablation", "permutation", "backbones")
    for told in ("ViT-B-16-quickgelu (openai), ViT-B-16 (laion2b_s34b_b88k), ViT-B-16-SigLIP (webli), ViT-B-16-SigLIP2 (webli)", "[4/4] backbones"): assert told in out
    for test in ("Urban1k", "DCI", "Long-DCI", "DOCCI", "COCO", "Flickr30k"): assert re.search(rf"^ *{test} +whole caption +DeBias recipe", out, re.M), test


@pytest.mark.slow
def test_the_sweep_is_rehearsed(tmp_path):
    "Its arms and variants of a large backbone. MINUTES."
    out = rehearsed("paper-b16", tmp_path, "tradeoff")
    for told in (r"DOCCI +DeBias recipe +1\.0", r"COCO +Long-CLIP recipe +0\.5"): assert re.search(told, out), out


@pytest.mark.slow
def test_the_pictures_are_rehearsed(tmp_path):
    "Text encoders of ViT-L/14's size in a random pipeline of their width."
    out = rehearsed("paper-l14", tmp_path, "generation")
    for arm in ("the pipeline's own encoder", "pre-trained", "Long-CLIP recipe", "DeBias recipe"): assert re.search(rf"{arm} .* 50\.0 ", out), out
