"""Configurations and keys: what is refused, in one answer; what makes another model, and what does not."""
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import yaml
from PIL import Image

import debias_clip
from debias_clip import config as configuration
from debias_clip.captions import PIECES, RECIPES, Recipe, piece
from debias_clip.config import RunOptions, TrainConfig, arm_config, model_key, read_config, run_options

pytest_plugins = ["training_fixtures"]


# What is refused

@pytest.mark.parametrize("fields, message", [
    (dict(learning_rate=1e-6), "there is no field 'learning_rate'"),
    (dict(ecpochs=1), "did you mean epochs"),
    (dict(save_evry=1), "did you mean save_every?"),
    (dict(save_every=1), "save_every tells how a training is run: give it to RunOptions"),
    (dict(init=dict(lerning=1)), "init: there is no field 'lerning'"),
    (dict(init=3), "init: 3 must be none (null), a published tag, a checkpoint file, or a configuration"),
    (dict(lr="1e-6"), "lr='1e-6' is text: YAML reads 1e-6 so; write 1.0e-6"),
    (dict(weight_decay="1e-2"), "weight_decay='1e-2' is text"),
    (dict(lr=None), "lr=None must be a valid number"),
    (dict(lr=True), "lr=True must be a valid number"),
    (dict(lr=float("nan")), "lr=nan must be a finite number"),
    (dict(eps=math.inf), "eps=inf must be a finite number"),
    (dict(lr=-1.0), "lr=-1.0 must be greater than or equal to 0"),
    (dict(epochs=0), "epochs=0 must be greater than or equal to 1"),
    (dict(epochs=1.5), "epochs=1.5 must be a valid integer"),
    (dict(epochs=True), "epochs=True must be a valid integer"),
    (dict(seed=-1), "seed=-1"),
    (dict(warmup="2"), "warmup='2'"),
    (dict(betas=[0.9]), "betas.1"),
    (dict(betas=0.9), "betas=0.9"),
    (dict(betas=[0.9, 1.0]), "betas.1=1.0 must be less than 1"),
    (dict(freeze_image=1), "freeze_image=1 must be a valid boolean"),
    (dict(logit_scale="4.6"), "logit_scale='4.6' is text"),
    (dict(precision="fp64"), "precision='fp64' must be 'auto', 'fp32', 'bf16' or 'fp16'"),
    (dict(short_weight=1.5), "short_weight=1.5"),
    (dict(label_smoothing=1), "label_smoothing=1"),
    (dict(recipe="debiased"), "did you mean debias?"),
    (dict(recipe={"short": ["drop_sumary"]}), "did you mean drop_summary"),
    (dict(recipe=None), "short_weight=0.1 must be 0"),
    (dict(backbone="ViT-B-17"), "ViT-B-16"),
    (dict(keep=77), "keep=77"),
    (dict(context_length=64), "shorter than the 77 positions"),
    (dict(init=dict(backbone="ViT-B-32")), "cannot start from a trained ViT-B-32"),
    (dict(batch_size=32), "pca_dim=32 needs a batch_size and pca_group of 33 or more"),
    (dict(pca_group=32), "pca_dim=32 needs a batch_size and pca_group of 33 or more"),
    (dict(pca_group=100), "pca_group=100 must divide batch_size=256"),
    (dict(pca_dim=513, batch_size=1024), "more than the 512 dimensions"),
    (dict(backbone="ViT-B-16-SigLIP", read_pads=False), "reads all its pads by nature"),
    (dict(image_aug={"scales": [0.5, 1.0]}), "did you mean scale?"),
    (dict(image_aug={"scale": [0.5, 1.0]}, freeze_image=True), "leave one out"),
], ids=str)
def test_a_configuration_that_cannot_be_meant(fields, message):
    with pytest.raises(ValueError) as e: TrainConfig.from_dict(fields)
    assert message in str(e.value) and "pydantic" not in str(e.value)


def test_all_faults_come_in_one_answer():
    with pytest.raises(ValueError) as e: TrainConfig(lr="1e-6", epochs=0, sede=1, init=dict(seed=-1, recipe="x"))
    lines = str(e.value).splitlines()
    assert len(lines) == 5 and sum(line.startswith("init: ") for line in lines) == 2
    with pytest.raises(ValueError) as e: TrainConfig(keep=80, context_length=20, batch_size=8, pca_group=3)
    assert len(str(e.value).splitlines()) == 4


@pytest.mark.parametrize("fields, message", [
    (dict(workers=-1), "workers=-1"), (dict(micro_batch=0), "micro_batch=0"), (dict(save_every="5"), "save_every='5'"),
    (dict(grad_checkpointing=1), "grad_checkpointing=1"), (dict(rot="x"), "did you mean root"),
    (dict(watch=dict(every=0)), "watch: every=0"), (dict(watch=dict(dta="x")), "there is no field 'dta'")], ids=str)
def test_run_options_that_cannot_be_meant(fields, message):
    with pytest.raises(ValueError) as e: RunOptions(**fields)
    assert message in str(e.value)


def test_what_a_configuration_may_be():
    assert TrainConfig(recipe=None, short_weight=0, batch_size=8).batch_size == 8    # no PCA, no need of samples
    assert TrainConfig(betas=[0, 0.9]).betas == (0.0, 0.9)
    assert TrainConfig(init=Path("weights.pt")).init == "weights.pt" and TrainConfig(data=Path("a.csv")).data == "a.csv"


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"): TrainConfig().lr = 1.0
    with pytest.raises(ValueError, match="lr=-1"): TrainConfig().replace(lr=-1)


# Files

@pytest.mark.parametrize("text, message", [
    ("lerning: 1", "no field 'lerning'"), ("- a\n- b", "lines are needed"), ("7", "lines are needed"),
    ("a: [1", "bad.yaml"), ("1: 2", "no field '1'"), ("batch_size: 8", "batch_size and pca_group of 33"),
    ("lr: 1.0e-6\nlr: 1.0e-5", "lr given twice"), ("lr: 1e-6\nworkers: -1", "workers=-1"),
    ("lr: 1e-6\nworkers: -1", "write 1.0e-6"), (None, "bad.yaml"), (b"\xff\xfe\x00", "bad.yaml")], ids=str)
def test_a_file_that_cannot_be_meant(text, message, tmp_path):
    bad = tmp_path/"bad.yaml"
    if text is not None: bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ValueError, OSError)) as e: read_config(bad)
    assert message in str(e.value) and "bad.yaml" in str(e.value)


def test_a_file_holds_both_kinds_of_fields(tmp_path):
    (file := tmp_path/"arm.yaml").write_text(yaml.safe_dump(dict(
        data="docci", root="data/docci", epochs=1, workers=3, watch=dict(every=5),
        init=dict(data="coco", root="data/coco", save_every=7, recipe=None, short_weight=0.0))))
    config, options = read_config(file)
    assert (config.epochs, config.init.data) == (1, "coco") and (options.workers, options.watch.every) == (3, 5)
    assert [options.root_of(name) for name in ("docci", "coco", "dci")] == ["data/docci", "data/coco", None]
    assert options.save_every == 7 and config.as_dict().keys() == TrainConfig.model_fields.keys()


def test_experiments_give_both_kinds_in_their_parameters():
    finetuning = dict(data="a", root="at/a", backbone="ViT-B-16", save_every=5, micro_batch=4)
    pretraining = dict(data="b", root="at/b", epochs=1, save_every=9)
    config = arm_config(finetuning, pretraining, 3, {"recipe": "long_clip"})
    assert (config.seed, config.init.seed, config.init.data, config.init.backbone) == (3, 3, "b", "ViT-B-16")
    options = run_options(finetuning, pretraining, workers=2)
    assert options == RunOptions(roots={"a": "at/a", "b": "at/b"}, save_every=5, micro_batch=4, workers=2)
    assert arm_config(finetuning | dict(init="openai"), {}, 0, {}).init == "openai"


def test_loaders_are_what_the_machine_has_unless_told(monkeypatch):
    monkeypatch.setattr(configuration, "default_workers", lambda: 7)
    assert (RunOptions().loaders, RunOptions(workers=0).loaders) == (7, 0)


# Keys

OTHER = dict(
    data="scenes", data_options=dict(n=8), backbone="ViT-B-16", init="openai", context_length=100, keep=19,
    recipe="sampled", read_pads=False, short_weight=0.2, pca_dim=31, pca_group=128, label_smoothing=0.0, epochs=4,
    batch_size=512, lr=1e-5, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-6, warmup=0, logit_scale=2.0, seed=1,
    precision="fp16", freeze_image=True, image_aug={"scale": [0.5, 1.0]})


@pytest.fixture
def no_data(monkeypatch):
    "Data sets that need not be there: what they hold is their name and options."
    monkeypatch.setattr(configuration, "data_digest", lambda data, root, options: [data, options])


def test_every_field_is_in_the_key(no_data):
    assert OTHER.keys() == TrainConfig.model_fields.keys()
    base = TrainConfig()
    configs = [base, *(base.replace(**{name: value}) for name, value in OTHER.items())]
    configs += [base.replace(init=base), base.replace(init=base.replace(seed=1)), base.replace(data_options=dict(n=2))]
    keys = [model_key(c) for c in configs]
    assert len(set(keys)) == len(keys) and all(len(key) == 12 and int(key, 16) >= 0 for key in keys)


def test_defaults_are_guarded():
    "They are left out of the key, so a model of before would be taken for one of now."
    defaults = TrainConfig().as_dict()
    assert defaults == dict(
        data="sharegpt4v", data_options={}, backbone="ViT-B-16-quickgelu", init=None, context_length=None, keep=20,
        recipe="debias", read_pads=True, short_weight=0.1, pca_dim=32, pca_group=None, label_smoothing=0.1, epochs=3,
        batch_size=256, lr=1e-6, weight_decay=0.01, betas=[0.9, 0.999], eps=1e-8, warmup=200, logit_scale=None, seed=0,
        precision="auto", freeze_image=False, image_aug={}), \
        "A default changed: raise TRAINING_VERSION. A new field must leave models as they are at its default."


def test_keys_stay_what_they_are(no_data):
    "When this key moves, every model is trained anew: undo the change, or mean it and write down the new key."
    config = TrainConfig(data="scenes", backbone="scenes-clip", keep=8, precision="fp32", init=TrainConfig(
        data="scenes", backbone="scenes-clip", keep=8, recipe=None, short_weight=0, precision="fp32"))
    assert model_key(config) == "9ccacc73d4be"


def test_the_key_survives_yaml_and_order(no_data, tmp_path):
    inner = TrainConfig(**OTHER | dict(freeze_image=False))
    own = inner.replace(init=inner, data_options=dict(n=3, text="web"), recipe={"short": [{"draw": {"count": 2}}]})
    for config in (TrainConfig(), inner, own):
        plain = config.as_dict()
        for k, fields in enumerate((plain, dict(reversed(plain.items())))):
            (file := tmp_path/f"{k}.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
            read, _ = read_config(file)
            assert read == config and model_key(read) == model_key(config)


def test_one_setting_written_in_two_ways_makes_one_key(no_data):
    base = TrainConfig(precision="fp32", weight_decay=0, betas=[0, 0.9])
    assert model_key(base) == model_key(TrainConfig(precision="fp32", weight_decay=0.0, betas=(0.0, 0.9)))
    assert model_key(base) == model_key(base.replace(pca_group=256))
    assert model_key(base) == model_key(base.replace(recipe=RECIPES["debias"].as_dict()))


def test_precision_is_what_is_really_used(no_data, monkeypatch):
    keys = {}
    for precision in ("fp32", "bf16"):
        monkeypatch.setattr(configuration, "fast_precision", lambda p=precision: p)
        keys[precision] = model_key(TrainConfig())
        assert TrainConfig(init=TrainConfig()).resolved().init.precision == precision
        assert model_key(TrainConfig(precision=precision)) == keys[precision]
    assert keys["fp32"] != keys["bf16"]


def test_ones_own_piece_counts_by_name_and_version(no_data):
    keys = []
    for version in (1, 2):
        @piece(version=version)
        def every_second(places, rng): return places[::2]
        keys.append(model_key(TrainConfig(recipe=Recipe(short=[every_second]))))
        del PIECES["every_second"]
    assert len({*keys, model_key(TrainConfig())}) == 3


def test_how_it_is_run_is_in_no_key(no_data):
    config = TrainConfig()
    how = RunOptions(root="elsewhere", roots={"sharegpt4v": "there"}, workers=5, save_every=3, micro_batch=2,
                     grad_checkpointing=True, watch={"every": 2})
    assert {name for name, value in how if value == RunOptions.model_fields[name].default} == set()
    assert model_key(config, how) == model_key(config)


def write_table(folder, colours, captions):
    "A table of one's own: a picture a colour, with its caption."
    folder.mkdir(parents=True)
    for i, colour in enumerate(colours): Image.new("RGB", (8, 8), colour).save(folder/f"{i}.png")
    rows = [dict(image=f"{i}.png", caption=caption) for i, caption in enumerate(captions)]
    (folder/"captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_data_counts_by_what_it_holds(tmp_path):
    colours, captions = ["red", "blue"], ["A red square. It is small.", "A blue square. It is small."]
    here, there = (write_table(tmp_path/name, colours, captions) for name in ("here", "far/there"))
    pictures = write_table(tmp_path/"pictures", ["red", "lime"], captions)
    texts = write_table(tmp_path/"texts", colours, ["A red square. It is large.", captions[1]])
    base = TrainConfig(backbone="scenes-clip", keep=8)
    keys = [model_key(base.replace(data=data)) for data in (here, there, pictures, texts)]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_start_weights_count_by_their_bytes(arm, starts, tmp_path):
    moved, other = tmp_path/"moved.safetensors", tmp_path/"other.safetensors"
    shutil.copy(starts["trained-clip"], moved)
    shutil.copy(starts["trained-siglip"], other)
    (tmp_path/"folder").mkdir()
    shutil.copy(starts["trained-clip"], tmp_path/"folder"/"model.safetensors")
    assert model_key(arm.replace(init=moved)) == model_key(arm)
    assert len({model_key(arm), *(model_key(arm.replace(init=p)) for p in (other, tmp_path/"folder"))}) == 3
    assert arm.replace(init=moved).as_dict()["init"] == str(moved)            # the configuration still says where


def test_a_start_of_a_start_of_a_start_has_a_key_of_its_own(arm):
    chain = [arm.replace(init=None)]
    for seed in (0, 0, 1): chain.append(arm.replace(init=chain[-1], seed=seed))
    assert len({model_key(c) for c in chain}) == 4


def test_another_architecture_of_the_same_name_is_another_model(arm, monkeypatch):
    before, config = model_key(arm), open_clip.get_model_config(arm.backbone)
    monkeypatch.setattr(configuration.families, "model_config", lambda _: config | {"quick_gelu": False})
    assert model_key(arm) != before


def test_reworded_messages_and_new_data_sets_change_no_key(tmp_path):
    "A copy of the package with other messages and one more data set gives the same key."
    package = Path(debias_clip.__file__).parent
    shutil.copytree(package, tmp_path/"debias_clip", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train", "config", "pairs", "records", "losses"):
        file = tmp_path/"debias_clip"/f"{name}.py"
        file.write_text(file.read_text().replace("must be", "ought to be"))
    with open(tmp_path/"debias_clip"/"datasets.py", "a") as f: f.write("\nDATASETS['mine'] = DATASETS['docci']\n")
    ask = ("from debias_clip.config import *; import debias_clip; print(debias_clip.__file__, model_key(TrainConfig("
           "data='scenes', backbone='scenes-clip', keep=8)))")
    run = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True,
                         env=os.environ | {"PYTHONPATH": str(tmp_path)})
    path, key = run.stdout.split()
    assert Path(path).is_relative_to(tmp_path)
    assert key == model_key(TrainConfig(data="scenes", backbone="scenes-clip", keep=8))
