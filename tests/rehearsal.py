"""A paper's preset from end to end without its data: random weights of tiny models, made-up captions, small settings.

    python tests/rehearsal.py paper-b16 [EXPERIMENT …]

Everything lies where the real thing does: data sets in their layouts, weights and tokenisers in the hub's cache. So
for a reader who has them only the numbers are new.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import open_clip
import yaml
from layouts import COLOURS, DEEDS, PLACES, THINGS, write_data, write_json
from safetensors.torch import save_file

from debias_clip.preset import read_preset

REPO = Path(__file__).parents[1]
REGISTER = "import open_clip\nopen_clip.add_model_config('configs')   # the rehearsal's tiny models\n"


# ---- settings

SMALL = {"batch_size": 9, "pca_group": 9, "pca_dim": 4, "epochs": 1, "warmup": 1}
SMALL_PICTURES = {"pipeline": None, "checkpoints": {}, "n_prompts": 1, "options": 2, "noises": 1, "steps": 1,
                  "size": 16}


def small_parameters(parameters: dict) -> dict:
    "A notebook's parameters with what few records cannot bear made small: training, and what draws pictures."
    small = json.loads(json.dumps(parameters))
    for fields in (small.get("finetuning"), small.get("pretraining")):
        if fields: fields.update(SMALL)
    others = [fields for other in small.get("backbones", {}).values() for fields in other.values()]
    for fields in [*small.get("arms", {}).values(), *others]:
        if fields: fields.update({name: value for name, value in SMALL.items() if name in fields})
    small.update({name: value for name, value in SMALL_PICTURES.items() if name in small})
    if "judge" in small:
        backbone, tag = weights_of(small)[0]
        small["judge"] = {"backbone": backbone, "pretrained": tag}
    return small


def weights_of(parameters: dict) -> list[tuple]:
    "(backbone, tag) of the published weights that a notebook's models start from."
    fine = parameters["finetuning"]
    backbones = parameters.get("backbones") or {fine["backbone"]: {}}
    return [(name, {**fine, **other.get("finetuning", {})}["init"]) for name, other in backbones.items()]


def data_of(parameters: dict) -> dict:
    "Folder of each data set that a notebook reads -> its name."
    sources = [parameters["finetuning"], *parameters.get("tests", {}).values()]
    return {source["root"]: source["data"] for source in sources if source.get("root")}


# ---- weights and tokenisers, as the hub's cache holds them

def snapshot(hub, repository) -> Path:
    "The folder of a repository in a cache of the hub, made."
    base, commit = Path(hub)/f"models--{repository.strip('/').replace('/', '--')}", "0"*40
    for inside in ("refs", f"snapshots/{commit}", f".no_exist/{commit}"):
        (base/inside).mkdir(parents=True, exist_ok=True)
    (base/"refs/main").write_text(commit)
    (base/".no_exist"/commit/"config.json").touch()           # asked for and not there: transformers 5 asks
    return base/"snapshots"/commit


def publish(backbone, tag, folder):
    """Puts random weights of a backbone made tiny, and its tokeniser, where those published lie.

    backbone, tag: as `create_model` takes them
    folder: the tiny backbone's configuration goes into its configs/, the rest into its hub/
    """
    config = open_clip.get_model_config(backbone)
    config["embed_dim"] = 64
    config["vision_cfg"] = {"image_size": 32, "patch_size": 16, "width": 64, "layers": 2, "head_width": 32}
    config["text_cfg"] |= {"width": 64, "heads": 2, "layers": 2}
    write_json(folder/"configs"/f"{backbone}.json", config)
    open_clip.add_model_config(folder/"configs")

    weights = {name: value.half().contiguous() for name, value in open_clip.create_model(backbone).state_dict().items()}
    repository = open_clip.get_pretrained_cfg(backbone, tag)["hf_hub"]
    save_file(weights, snapshot(folder/"hub", repository)/"open_clip_model.safetensors")
    name = config["text_cfg"].get("hf_tokenizer_name")
    if name: write_tokenizer(snapshot(folder/"hub", name), "siglip2" in name.lower())


WORDS = list(dict.fromkeys(" ".join(["a picture of things around the", *THINGS, *COLOURS, *DEEDS, *PLACES]).split()))
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_tokenizer(folder, gemma):
    "A small tokeniser of SigLIP's kind (T5), or of SigLIP2's (Gemma), for the words of made-up captions."
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast
    made, marks = gemma_pieces() if gemma else t5_pieces()
    end = marks["eos_token"]
    made.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 1)])
    PreTrainedTokenizerFast(tokenizer_object=made, **marks).save_pretrained(folder)


def t5_pieces():
    "Whole words, with their space, are likelier than letters."
    from tokenizers import Tokenizer, models, pre_tokenizers
    marks = [("<pad>", 0.), ("</s>", 0.), ("<unk>", 0.)]
    pieces = [*marks, *((letter, -9.) for letter in "▁" + LETTERS), *((f"▁{word}", -3.) for word in WORDS)]
    made = Tokenizer(models.Unigram(pieces, unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made, {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}


def gemma_pieces():
    "Byte pairs that build each word letter by letter, and put the space before it last."
    from tokenizers import Tokenizer, decoders, models, normalizers
    pieces, merges = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *LETTERS], []
    grown = [(word[:k - 1], word[k - 1]) for word in WORDS for k in range(2, len(word) + 1)]
    for left, right in [*grown, *(("▁", word) for word in WORDS)]:
        if left + right in pieces: continue
        pieces.append(left + right)
        merges.append((left, right))
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made, {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>"}


# ---- the checkout

def prepare(folder, preset, notebooks: dict) -> str:
    "Writes a checkout for notebooks (file -> parameters) of a preset into a folder. Returns the preset's name in it."
    folder, name = Path(folder), f"{preset}-rehearsal"
    (folder/"nbs/experiments").mkdir(parents=True)
    (folder/"settings.ini").write_text("[DEFAULT]\nlib_name = debias_clip\n")
    settings = {"about": "REHEARSAL: random weights, made-up captions. The numbers mean nothing.", "experiments": []}
    weights, roots = {}, {}
    for file, parameters in notebooks.items():
        small = small_parameters(parameters)
        settings["experiments"].append(file.stem)
        settings[file.stem] = {key: value for key, value in small.items() if key not in ("out", "preset")}
        weights |= dict.fromkeys(weights_of(small))
        roots |= data_of(small)
        copy_notebook(file, folder/"nbs/experiments"/file.name)
    for backbone, tag in weights: publish(backbone, tag, folder)
    for root, data in roots.items(): write_data(data, folder/root)
    preset_file = folder/"runs"/name/"params.yaml"
    preset_file.parent.mkdir(parents=True)
    preset_file.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    return name


def copy_notebook(file, to):
    "Copies a notebook, with a first cell that makes its models tiny."
    notebook = json.loads(file.read_text(encoding="utf-8"))
    first = {"cell_type": "code", "id": "tiny", "metadata": {}, "outputs": [], "execution_count": None}
    write_json(to, {**notebook, "cells": [{**first, "source": REGISTER}, *notebook["cells"]]})


def rehearse(preset, only=()) -> subprocess.CompletedProcess:
    "Runs experiments of a preset (none named: all) by the command itself, in a folder that is deleted afterwards."
    jobs = [job for job in read_preset(preset, REPO).jobs if not only or job.name in only]
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        folder = Path(folder).resolve()
        name = prepare(folder, preset, {job.notebook: job.parameters for job in jobs})
        command = f"{REGISTER}from debias_clip.cli import main\nmain()"
        return subprocess.run([sys.executable, "-c", command, "run", name, "--workers", "0"], cwd=folder, text=True,
                              env={**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_CACHE": str(folder/"hub"),
                                   "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    done = rehearse(sys.argv[1], sys.argv[2:])
    print(done.stdout)
    sys.exit(done.returncode)
