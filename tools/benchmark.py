"""A plain training step beside ours: operations, seconds, memory, losses. Not a test: machines differ.

  python tools/benchmark.py step --help     lists what can be set

nbs/experiments/benchmark.ipynb shows the numbers as tables.
"""
import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from debias_clip import towers
from debias_clip.authors import scene_records
from debias_clip.captions import RECIPES, split_sentences
from debias_clip.core import content_key
from debias_clip.families import base_length, family_of, stretched_length
from debias_clip.losses import DualCaptionLoss
from debias_clip.models import create_model, encode_texts, text_tower
from debias_clip.pairs import PairDataset
from debias_clip.preset import code_hash
from debias_clip.records import Records
from debias_clip.results import device_name
from debias_clip.resume import device
from debias_clip.scenes import draw_scenes, render
from debias_clip.step import Towers, attention_kernels
from debias_clip.store import TextStore
from debias_clip.tokens import get_tokenizer

CAPTION_FILES = {"captions.jsonl": "caption", "docci_descriptions.jsonlines": "description"}   # file: its column
DOCCI_TOKENS = dict(mean=4.90, sigma=0.35)   # logarithm of a caption's tokens; mean 142, a tenth below 86 or above 212


@dataclass(frozen=True)
class Setting:
    """What is measured.

    backbone, context_length, keep: as in `models.create_model`, random weights
    captions: folder with captions.jsonl or DOCCI's file; without one: text of the offline world in DOCCI's lengths
    batch: images, each with a long and a short caption
    recipe, pca_dim: of the trainer
    precision: fp32 or bf16
    kernels: of attention, for both ways: "trainer" (as in `train`) or "torch" (what PyTorch chooses by itself)
    """
    backbone: str = "ViT-B-16-quickgelu"
    context_length: int | None = None
    keep: int = 20
    captions: str = "/none/"
    batch: int = 32
    recipe: str = "debias"
    pca_dim: int = 16
    precision: str = "fp32"
    kernels: str = "trainer"

    def __post_init__(self):
        if not family_of(self.backbone).ends_at_mark:
            raise SystemExit(f"The text tower of {self.backbone} reads every position, so nothing can be left out: "
                             "take a CLIP backbone.")
        for name, known in (("precision", ("fp32", "bf16")), ("kernels", ("trainer", "torch"))):
            given = getattr(self, name)
            if given not in known: raise SystemExit(f"{name} is {' or '.join(known)}, not {given!r}.")
        if self.batch <= self.pca_dim: raise SystemExit(f"pca_dim={self.pca_dim} needs a batch of {self.pca_dim + 1}.")


# What a step is given

def long_captions(s, tok):
    "Captions as lists of sentences, and what they are."
    for name, column in CAPTION_FILES.items():
        file = Path(s.captions)/name
        if not file.is_file(): continue
        with open(file, encoding="utf-8") as lines: texts = [json.loads(next(lines, "null")) for _ in range(s.batch)]
        if None in texts: raise SystemExit(f"{file} has fewer captions than a batch of {s.batch}: lower --batch.")
        return [split_sentences(t[column]) for t in texts], f"the first {s.batch} captions of {file.parent.name}"
    return as_long_as_docci(s.batch, tok), f"{s.batch} captions of the offline world, as long as DOCCI's"


def as_long_as_docci(n, tok):
    "Captions of the offline world's sentences, as many tokens each as DOCCI's have."
    sentences = iter([sentence for caption in scene_records("train", 16*n).captions for sentence in caption])
    captions = []
    for length in np.random.default_rng(0).lognormal(**DOCCI_TOKENS, size=n):
        caption = [next(sentences)]
        while sum(len(tok.encode(sentence)) for sentence in caption) < length: caption.append(next(sentences))
        captions.append(caption)
    return captions


def make_batch(s):
    "What the trainer's loader would give: pictures, long and short token rows; and what the captions are."
    tok = get_tokenizer(s.backbone, s.context_length or stretched_length(base_length(s.backbone), s.keep))
    captions, what = long_captions(s, tok)
    records = Records("benchmark", render(draw_scenes(s.batch, seed=0)), captions)
    pairs = PairDataset(records, TextStore(captions, tok), RECIPES[s.recipe], None)
    return pairs.__getitems__([(0, i) for i in range(s.batch)]), what


def sized(batch, model):
    "The pictures at the model's size, as floats."
    size = np.broadcast_to(model.visual.image_size, 2).tolist()
    image = F.interpolate(batch["image"].float()/127.5 - 1, size, mode="bilinear")
    return {"image": image, "long": batch["long"], "short": batch["short"]}


# The two ways

class Plain:
    "Both captions at full length with open_clip's own encoder and dense masks."
    def __init__(self, model): self.model = model

    def texts(self, batch):
        return torch.cat([self.model.encode_text(batch[name], normalize=True) for name in ("long", "short")])

    def features(self, batch):
        image = self.model.encode_image(batch["image"], normalize=True)
        return image, *self.texts(batch).chunk(2), self.model.logit_scale.exp()


class Ours:
    "The trainer's towers."
    def __init__(self, model): self.model, self.towers = model, Towers(model)
    def texts(self, batch): return encode_texts(self.model, torch.cat([batch["long"], batch["short"]]), normalize=True)
    def features(self, batch): return self.towers(batch)[:4]


VARIANTS = {"plain": Plain, "ours": Ours}


def build(s, variant, place):
    "A variant with random weights, on a device."
    torch.manual_seed(0)
    with torch.device(place): model = create_model(s.backbone, None, s.context_length, s.keep)
    return VARIANTS[variant](model.to(place).train())


def step(s, way, batch, what, criterion):
    "Forward and backward of a whole training step, or of the text branch alone. Returns the loss."
    way.model.zero_grad()
    place = batch["long"].device
    with attention_kernels(place) if s.kernels == "trainer" else nullcontext():
        with torch.autocast(place.type, torch.bfloat16, enabled=s.precision == "bf16"):
            out = way.features(batch) if what == "step" else way.texts(batch)
        loss = criterion(*[view.float() for view in out])["loss"] if what == "step" else out.float()[:, 0].sum()
        loss.backward()
    return loss.item()   # waits for a GPU


# Time and memory: each variant in processes of its own

def peak_memory():
    "Bytes: of the process, or on a GPU what PyTorch took there."
    if torch.cuda.is_available(): return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*(1 if sys.platform == "darwin" else 1024)


def worker(s, variant):
    "A variant's process: takes a step of each kind, and prints a line of JSON for it."
    way, criterion = build(s, variant, device()), DualCaptionLoss(pca_dim=s.pca_dim)
    batch = {name: v.to(device()) for name, v in sized(make_batch(s)[0], way.model).items()}
    for what in ("step", "text"):
        begin = time.perf_counter()
        loss = step(s, way, batch, what, criterion)
        row = {"what": what, "seconds": time.perf_counter() - begin, "loss": loss, "peak": peak_memory()}
        print(json.dumps(row), flush=True)


def ask(s, variant):
    "The rows (dicts) that a variant's process printed."
    command = [sys.executable, __file__, "worker", variant, json.dumps(dataclasses.asdict(s))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"The process of {variant!r} ended with {done.returncode} (-9: not enough memory): see its "
                         "message above, or take a smaller --batch.")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(s, repeats, cache):
    "Interleaved repeats, plain, ours, plain, …; those in the cache (a file of JSON lines) are not measured again."
    rows = [json.loads(line) for line in cache.read_text().splitlines()] if cache and cache.is_file() else []
    for repeat in range(repeats):
        for variant in VARIANTS:
            if any((r["repeat"], r["variant"]) == (repeat, variant) for r in rows): continue
            new = [{"repeat": repeat, "variant": variant} | row for row in ask(s, variant)]
            print(f"{variant} {repeat + 1}/{repeats}: {new[0]['seconds']:.2f} s a step", file=sys.stderr)
            rows += new
            if cache: write_lines(cache, rows)
    return rows


def write_lines(file, rows):
    "Rows as JSON lines, whole or not at all."
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".tmp")
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(beside, file)


# Operations

def on_meta(x):
    "A plan of a batch, its tensors without data."
    if torch.is_tensor(x): return x.to("meta")
    if isinstance(x, list): return [on_meta(one) for one in x]
    if isinstance(x, tuple): return type(x)(*map(on_meta, x))
    return x


def count(work):
    "Floating point operations of a forward and a backward pass, counted by PyTorch on its `meta` device."
    make_plan = towers.make_plan
    def meta_plan(tokens, read_pads=True): return on_meta(make_plan(tokens, read_pads))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), mock.patch.object(towers, "make_plan", meta_plan):
        work().sum().backward()
    return counter.get_total_flops()


def count_operations(s, batch):
    """Operations of the step and of the text branch alone: done by each variant, and needed.

    Attention is two matrix products there, and masked pairs count.
    """
    ways = {variant: build(s, variant, "meta") for variant in VARIANTS}
    model = ways["plain"].model
    picture = sized(batch, model)["image"].to("meta")
    image = count(lambda: model.encode_image(picture))
    text = {variant: count(lambda way=way: way.texts(batch)) for variant, way in ways.items()}
    text["needed"] = needed_operations(model, batch)
    return {"text": text, "step": {name: n + image for name, n in text.items()}}


def needed_operations(model, batch):
    """Of the text branch: each token up to the pooled one once, reading only what stands before it.

    Pads before words count once a batch. In the last block only the pooled tokens ask.
    """
    tower, rows = text_tower(model), torch.cat([batch["long"], batch["short"]])
    lengths, pads, _ = (column.numpy() for column in towers.caption_shapes(rows))
    own = [np.arange(first, end) + 1 for first, end in zip(pads + 1, lengths + 1, strict=True)]
    reads = np.concatenate([*own, np.arange(pads.max() + 1) + 1])
    width, layers = tower.positional_embedding.shape[1], len(tower.transformer.resblocks)
    projection = getattr(tower.text_projection, "weight", tower.text_projection).numel()
    whole_block = 12*width**2*len(reads) + 2*width*reads.sum()
    keys_and_values = 2*width**2*len(reads)
    pooled = len(rows)*(10*width**2 + projection) + 2*width*(lengths + 1).sum()
    forward = (layers - 1)*whole_block + keys_and_values + pooled
    return 3*2*int(forward)   # a product and a sum; the backward pass is twice the forward pass


# The result

def benchmark(s, repeats, cache=None):
    "All numbers of a setting, as plain data. cache: folder that keeps repeats until the end."
    setting, machine = dataclasses.asdict(s), [device_name(), torch.get_num_threads()]
    key = content_key(setting=setting, code=code_hash(["step", "train"]), machine=machine)
    file = cache/f"benchmark-{key}.jsonl" if cache else None
    rows, (batch, what) = measure(s, repeats, file), make_batch(s)
    rows = [r for r in rows if r["repeat"] < repeats]
    if file: file.unlink(missing_ok=True)
    text = torch.cat([batch["long"], batch["short"]])
    tokens = {"every position": text.numel(), "up to the pooled one": int((text.argmax(-1) + 1).sum()),
              "each once": len(towers.make_plan(text).ids)}
    def of(kind, variant, field): return [r[field] for r in rows if (r["what"], r["variant"]) == (kind, variant)]
    result = {
        "setting": setting | {"captions": what}, "repeats": repeats, "device": device_name(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "tokens": tokens,
        "flops": count_operations(s, batch),
        "seconds": {kind: {v: of(kind, v, "seconds") for v in VARIANTS} for kind in ("step", "text")},
        "peak": {v: max(of("step", v, "peak")) for v in VARIANTS},
        "loss": {v: of("step", v, "loss")[0] for v in VARIANTS}}
    return result | {"table": summary(result)}


def summary(result):
    "Rows (dicts): quantity, plain, ours, ratio, and what the ratio is to reach with ViT-B/16 on a processor."
    flops, peak, images = result["flops"], result["peak"], result["setting"]["batch"]
    median = {kind: {v: statistics.median(x) for v, x in by.items()} for kind, by in result["seconds"].items()}
    speed = {v: images/seconds for v, seconds in median["step"].items()}
    def row(quantity, of, unit=1, to_reach="", more_is_better=False):
        ratio = of["ours"]/of["plain"] if more_is_better else of["plain"]/of["ours"]
        return {"quantity": quantity, "plain": of["plain"]/unit, "ours": of["ours"]/unit, "ratio": ratio,
                "to reach": to_reach}
    def per_needed(kind): return {v: flops[kind][v]/flops[kind]["needed"] for v in VARIANTS}
    memory = row("step: peak memory, GB", peak, 1e9, "≤ 0.75", True)   # ours as a share of the plain step's
    return [
        row("step: 10¹² operations", flops["step"], 1e12, "≥ 1.4"),
        row("step: images/s", speed, to_reach="≥ 1.35", more_is_better=True),
        memory,
        row("text branch: 10¹² operations", flops["text"], 1e12),
        row("text branch: seconds", median["text"], to_reach="≥ 2"),
        *(row(f"{kind}: operations done / needed", per_needed(kind)) for kind in ("step", "text"))]


def told(result):
    "Lines of text."
    setting = result["setting"]
    yield ", ".join([setting["backbone"], setting["captions"], setting["precision"], result["device"],
                     f"{result['threads']} threads, medians of {result['repeats']}; to reach: with ViT-B/16"])
    for r in result["table"]:
        yield f"{r['quantity']:32} {r['plain']:8.3f} {r['ours']:8.3f}   ratio {r['ratio']:.2f} {r['to reach']}"
    yield f"losses: {result['loss']['plain']:.6f} and {result['loss']['ours']:.6f}"


# The command

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("step", help="a plain training step beside ours", epilog=Setting.__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(Setting):
        kind = int if f.default is None else type(f.default)
        one.add_argument("--" + f.name.replace("_", "-"), default=f.default, type=kind, help=f"default: {f.default}")
    one.add_argument("--repeats", default=3, type=int, help="of each variant, interleaved; medians are shown")
    one.add_argument("--cache", type=Path, help="folder that keeps each repeat, so that a stopped run goes on")
    one.add_argument("--json", action="store_true", help="print all numbers as JSON")
    inner = commands.add_parser("worker", help="(a variant's own process)")
    inner.add_argument("variant", choices=VARIANTS)
    inner.add_argument("setting", type=json.loads)
    return vars(parser.parse_args())


def main():
    given = arguments()
    if given.pop("command") == "worker": return worker(Setting(**given["setting"]), given["variant"])
    repeats, cache, as_json = (given.pop(name) for name in ("repeats", "cache", "json"))
    result = benchmark(Setting(**given), repeats, cache)
    print(json.dumps(result) if as_json else "\n".join(told(result)))


if __name__ == "__main__": main()
