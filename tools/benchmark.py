"""benchmark.py: what speed and memory must reach. Not a test: machines differ.

  python tools/benchmark.py          the offline world on one core, and the memory of recall at Flickr30k's size
  python tools/benchmark.py step     a plain training step beside ours: operations, seconds, memory, losses; --help lists what can be set
  python tools/benchmark.py memory   a training step under each of the trainer's ways to need less memory
  python tools/benchmark.py options  a training step with AdamW fused or not, and with torch.compile
  python tools/benchmark.py loader   the training loader alone, on JPEG files: samples/s, where the time goes, and how many A100s it would feed
"""
import argparse, dataclasses, itertools, json, os, re, resource, statistics, subprocess, sys, tempfile, time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from debias_clip import models
from debias_clip.captions import RECIPES, split_sentences
from debias_clip.data import GlobalBatches, PairDataset, Records, TextStore, TextTable, load_image, make_loader, read_records, select, text_speed, text_store, write_tables
from debias_clip.keys import code_hash, content_key
from debias_clip.losses import DualCaptionLoss
from debias_clip.models import create_model, encode_texts, freeze_positions
from debias_clip.results import device_name
from debias_clip.scenes import draw_scenes, render, scene_records
from debias_clip.tokens import get_tokenizer, model_config, stretched_length, text_family
from debias_clip.train import TrainConfig, _attention, _criterion, _half, _scaler, _step, _Towers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Setting:
    """What is measured. backbone, context_length, keep: as in `models.create_model`, random weights; captions: a folder with captions.jsonl (a "caption" a line) or
    DOCCI's own file, or one without: text of the offline world in DOCCI's lengths; batch: images, each with a long and a short caption; recipe, pca_dim: of the
    trainer; precision: fp32 or bf16; kernels: of attention, for both ways, "trainer" (as in `train`) or "torch" (what PyTorch chooses by itself)."""
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
        if text_family(self.backbone) != "clip": raise SystemExit(f"The text tower of {self.backbone} reads every position, so nothing can be left out: take a CLIP backbone.")
        if self.precision not in ("fp32", "bf16"): raise SystemExit(f"precision is fp32 or bf16, not {self.precision!r}.")
        if self.kernels not in ("trainer", "torch"): raise SystemExit(f"kernels is trainer or torch, not {self.kernels!r}.")
        if self.batch <= self.pca_dim: raise SystemExit(f"pca_dim={self.pca_dim} needs a batch of {self.pca_dim + 1} or more.")


def long_captions(s, tok):
    "Captions as lists of sentences, and what they are."
    for name, field in (("captions.jsonl", "caption"), ("docci_descriptions.jsonlines", "description")):
        file = Path(s.captions)/name
        if not file.is_file(): continue
        with open(file, encoding="utf-8") as lines: texts = [json.loads(line)[field] for _, line in zip(range(s.batch), lines)]
        if len(texts) < s.batch: raise SystemExit(f"{file} has {len(texts)} captions, and a batch needs {s.batch}: take a smaller --batch.")
        return [split_sentences(t) for t in texts], f"the first {s.batch} captions of {file.parent.name}"
    sentences = iter([x for caption in scene_records("train", 16*s.batch).captions for x in caption])
    lengths = np.random.default_rng(0).lognormal(4.90, .35, s.batch)   # tokens of a caption of DOCCI: mean 142, a tenth below 86, a tenth above 212
    captions = []
    for n in lengths:
        captions.append([next(sentences)])
        while sum(len(tok.encode(x)) for x in captions[-1]) < n: captions[-1].append(next(sentences))
    return captions, f"{s.batch} captions of the offline world, as long as DOCCI's"

def make_batch(s):
    "What the trainer's loader would give: pictures, long and short token rows; and what the captions are."
    tok = get_tokenizer(s.backbone, s.context_length or stretched_length(model_config(s.backbone)["text_cfg"].get("context_length", 77), s.keep))
    captions, what = long_captions(s, tok)
    records = Records("benchmark", render(draw_scenes(s.batch, seed=0)), captions)
    batch = PairDataset(records, TextStore(captions, tok), RECIPES[s.recipe], None).__getitems__([(0, i) for i in range(s.batch)])
    return batch, what

def sized(batch, model):
    "The pictures at the model's size, as floats."
    size = model.visual.image_size
    image = F.interpolate(batch["image"].float()/127.5 - 1, size if isinstance(size, tuple) else (size, size), mode="bilinear")
    return {"image": image, "long": batch["long"], "short": batch["short"]}


class Plain:
    "Both captions at full length with open_clip's own encoder and dense masks."
    def __init__(self, model): self.model = model
    def texts(self, batch): return torch.cat([self.model.encode_text(batch[k], normalize=True) for k in ("long", "short")])
    def features(self, batch): return self.model.encode_image(batch["image"], normalize=True), *self.texts(batch).chunk(2), self.model.logit_scale.exp()

class Ours:
    "The trainer's towers."
    def __init__(self, model): self.model, self.towers = model, _Towers(model)
    def texts(self, batch): return encode_texts(self.model, torch.cat([batch["long"], batch["short"]]), normalize=True)
    def features(self, batch): return self.towers(batch)[:4]

VARIANTS = {"plain": Plain, "ours": Ours}


def build(s, variant):
    torch.manual_seed(0)
    return VARIANTS[variant](create_model(s.backbone, None, s.context_length, s.keep).to(DEVICE).train())

def step(s, way, batch, what, criterion):
    "Forward and backward of a whole training step, or of the text branch alone. Returns the loss."
    way.model.zero_grad()
    with _attention(DEVICE) if s.kernels == "trainer" else nullcontext(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=s.precision == "bf16"):
        if what == "step": loss = criterion(*[f.float() for f in way.features(batch)])["loss"]
        else: loss = way.texts(batch).float()[:, 0].sum()
        loss.backward()
    return loss.item()   # waits for a GPU

def peak_memory():
    "Bytes: of the process, or on a GPU what PyTorch took there."
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*(1 if sys.platform == "darwin" else 1024)

def worker(s, variant):
    "A variant's own process: a line in (step or text), a line of JSON out."
    way, criterion = build(s, variant), DualCaptionLoss(pca_dim=s.pca_dim)
    batch = {k: v.to(DEVICE) for k, v in sized(make_batch(s)[0], way.model).items()}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        loss = step(s, way, batch, line.strip(), criterion)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": loss, "peak": peak_memory()}), flush=True)


class Process:
    "A variant in a process of its own, that works when it is asked."
    def __init__(self, s, variant, command="worker"):
        self.variant = variant
        self.process = subprocess.Popen([sys.executable, __file__, command, variant, json.dumps(dataclasses.asdict(s))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("{"): return json.loads(line)
        raise SystemExit(f"The process of {self.variant!r} ended with {self.process.wait()} (-9: not enough memory): see its message above, or take a smaller --batch.")

    def ask(self, what):
        print(what, file=self.process.stdin, flush=True)
        return self.answer()

    def __enter__(self): return self
    def __exit__(self, *error):
        self.process.stdin.close()
        if error[0]: self.process.terminate()
        self.process.wait()

def measure(s, repeats, cache):
    "Interleaved repeats, plain, ours, plain, …; what a run that was stopped left in the cache (a file of JSON lines) is not measured again. Returns a list of dicts."
    rows = [json.loads(line) for line in cache.read_text().splitlines() if line.endswith("}")] if cache and cache.is_file() else []
    missing = lambda i, v: [what for what in ("step", "text") if not any((r["what"], r["repeat"], r["variant"]) == (what, i, v) for r in rows)]
    for i, v in itertools.product(range(repeats), VARIANTS):
        if not missing(i, v): continue
        with Process(s, v) as p:   # a new one each time: what the other variant's holds would not be there to use
            p.answer()
            for what in missing(i, v):
                rows.append({"what": what, "repeat": i, "variant": v} | p.ask(what))
                print(f"{what} {v} {i + 1}/{repeats}: {rows[-1]['seconds']:.2f} s", file=sys.stderr)
                if cache: append(cache, rows[-1])
    return rows

def append(cache, row):
    cache.parent.mkdir(parents=True, exist_ok=True)
    with open(cache, "a") as f: f.write(("" if not f.tell() or cache.read_text().endswith("\n") else "\n") + json.dumps(row) + "\n")


def count_operations(s):
    """Floating point operations of a step, forward and backward, counted by PyTorch on its `meta` device, where attention is two matrix products and masked pairs count:
    done by each variant and needed; of the step and of the text branch alone."""
    batch, tokens_plan = make_batch(s)[0], models._plan
    on_meta = lambda x: x.to("meta") if torch.is_tensor(x) else [models._Group(*map(on_meta, g)) for g in x] if isinstance(x, list) else x
    meta_plan = lambda tokens: models._Plan(*map(on_meta, tokens_plan(tokens)))
    def count(f):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), mock.patch.object(models, "_plan", meta_plan): f().sum().backward()
        return counter.get_total_flops()
    with torch.device("meta"): ways = {v: VARIANTS[v](create_model(s.backbone, None, s.context_length, s.keep).train()) for v in VARIANTS}
    image = count(lambda: ways["plain"].model.encode_image(sized(batch, ways["plain"].model)["image"].to("meta")))
    text = {v: count(lambda way=way: way.texts(batch)) for v, way in ways.items()} | {"needed": needed_operations(ways["ours"].model, batch)}
    return {"text": text, "step": {v: n + image for v, n in text.items()}}

def needed_operations(model, batch):
    "Of the text branch: each real token once, the pads before words once a batch, each reading its own causal context alone; in the last block only the pooled tokens ask."
    tower = getattr(model, "text", model)
    rows = torch.cat([batch["long"], batch["short"]])
    lengths = (rows.argmax(-1) + 1).tolist()
    first = [min(n - 1, int((row[1:] == 0).int().cumprod(0).sum()) + 1) for row, n in zip(rows, lengths)]   # of its own, behind SOT and pads
    d, layers, out = tower.positional_embedding.shape[1], len(tower.transformer.resblocks), getattr(tower.text_projection, "weight", tower.text_projection).numel()
    context = [np.arange(a, n) + 1 for a, n in zip(first, lengths)] + [np.arange(max(first)) + 1]
    tokens, pairs = sum(map(len, context)), sum(int(c.sum()) for c in context)
    forward = (layers - 1)*(12*d*d*tokens + 2*d*pairs) + 2*d*d*tokens + len(rows)*(10*d*d + out) + 2*d*sum(lengths)
    return 3*2*forward   # a product and a sum; the backward pass is twice the forward pass


def benchmark(s, repeats, cache=None):
    "All numbers of a setting, as plain data."
    key = content_key(setting=dataclasses.asdict(s), code=code_hash(["train"]), device=device_name(), threads=torch.get_num_threads())
    cache = cache/f"benchmark-{key}.jsonl" if cache else None
    rows, flops, batch = measure(s, repeats, cache), count_operations(s), make_batch(s)
    if cache: cache.unlink(missing_ok=True)
    of = lambda what, v, key: [r[key] for r in rows if r["what"] == what and r["variant"] == v and r["repeat"] < repeats]
    text = torch.cat([batch[0]["long"], batch[0]["short"]])
    return {"setting": dataclasses.asdict(s) | {"captions": batch[1]}, "repeats": repeats, "device": device_name(), "threads": torch.get_num_threads(), "torch": torch.__version__,
            "tokens": {"every position": text.numel(), "up to the pooled one": int((text.argmax(-1) + 1).sum()), "each once": len(models._plan(text).ids)},
            "flops": flops, "seconds": {what: {v: of(what, v, "seconds") for v in VARIANTS} for what in ("step", "text")},
            "peak": {v: max(of("step", v, "peak")) for v in VARIANTS}, "loss": {v: of("step", v, "loss")[0] for v in VARIANTS}}

def summary(result):
    "Rows (dicts) of a table: quantity, plain, ours, ratio, and what the ratio is to reach with ViT-B/16 on a CPU."
    n, median = result["setting"]["batch"], lambda what, v: statistics.median(result["seconds"][what][v])
    row = lambda name, plain, ours, target="", up=True: {"quantity": name, "plain": plain, "ours": ours, "ratio": plain/ours if up else ours/plain, "to reach": target}
    f, rows = result["flops"], []
    rows.append(row("step: 10¹² operations", f["step"]["plain"]/1e12, f["step"]["ours"]/1e12, "≥ 1.4"))
    rows.append({**row("step: images/s", n/median("step", "plain"), n/median("step", "ours"), "≥ 1.35"), "ratio": median("step", "plain")/median("step", "ours")})
    rows.append(row("step: peak memory, GB", result["peak"]["plain"]/1e9, result["peak"]["ours"]/1e9, "≤ 0.75", up=False))
    rows.append(row("text branch: 10¹² operations", f["text"]["plain"]/1e12, f["text"]["ours"]/1e12))
    rows.append(row("text branch: seconds", median("text", "plain"), median("text", "ours"), "≥ 2"))
    for what in ("step", "text"): rows.append(row(f"{what}: operations done / needed", f[what]["plain"]/f[what]["needed"], f[what]["ours"]/f[what]["needed"]))
    return rows


A100 = 312e12   # dense bf16 operations a second at most, by NVIDIA's data sheet

@dataclass(frozen=True)
class Loading:
    """What is measured of the loader. backbone: one of CLIP's, for picture size, tokens and operations; context_length, keep: None and 20 stretch its context as the trainer does;
    data: a folder with captions.jsonl or captions.csv, a table, or shards; "": JPEG files made on the spot, of the sizes (WIDTHxHEIGHT, by turns; 640x480 is COCO's), with captions of the folder
    `captions`, as in `Setting`; recipe: of the short captions; images: how many are used (0: all of the data); workers: processes; batch: of one GPU; seconds: of a repeat; utilisation: percent
    of an A100's bf16 operations that training is assumed to reach."""
    backbone: str = "ViT-B-16-quickgelu"
    context_length: int | None = None
    keep: int = 20
    captions: str = "/none/"
    recipe: str = "debias"
    data: str = ""
    sizes: str = "640x480"
    images: int = 256
    workers: int = 2
    batch: int = 64
    seconds: float = 10.
    utilisation: float = 40.

    def __post_init__(self):
        self.setting(32), self.shapes()
        if self.images < (0 if self.data else 1): raise SystemExit("images is 1 or more (0, for all, with --data alone).")
        if not 0 < self.utilisation <= 100: raise SystemExit(f"utilisation is a percentage, over 0 and up to 100, not {self.utilisation:g}.")
        if self.workers < 0 or self.batch < 1 or self.seconds <= 0: raise SystemExit("workers is 0 or more, batch 1 or more, seconds over 0.")

    def setting(self, n): return Setting(self.backbone, self.context_length, self.keep, self.captions, n, self.recipe, 1)

    def shapes(self):
        "(width, height) of each size."
        found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size) for size in self.sizes.split(",")]
        if not all(found): raise SystemExit(f"sizes are WIDTHxHEIGHT with commas between, such as 640x480,2250x1500, not {self.sizes!r}.")
        return [tuple(map(int, m.groups())) for m in found]


def photograph(width, height, seed):
    "A made-up picture with edges and grain, a JPEG of which is about as large as one of a photograph (COCO's have 0.5 bytes a pixel)."
    rng, out = np.random.default_rng(seed), np.zeros((height, width, 3))
    for k, share in ((4, .4), (16, .3), (64, .2), (256, .1)):
        layer = Image.fromarray(rng.integers(0, 256, (max(1, k*height//width), k, 3), dtype=np.uint8))
        out += share*np.asarray(layer.resize((width, height), Image.Resampling.NEAREST if k == 16 else Image.Resampling.BICUBIC))
    return Image.fromarray((out + rng.normal(0, 9, (height, width, 1))).clip(0, 255).astype(np.uint8))

def loading_records(s, tok, folder):
    "Records of JPEG files, their captions in files in `folder` as those of ShareGPT4V, and what they are."
    if s.data:
        try: found = read_records(s.data)
        except ValueError as e: raise SystemExit(str(e)) from e
        found = select(found, range(min(len(found), s.images or len(found))))
        images, captions, what = found.images, found.captions, f"{len(found)} pictures of {found.name}"
    else:
        captions, about = long_captions(s.setting(s.images), tok)
        images, shapes = [folder/f"{i}.jpg" for i in range(s.images)], s.shapes()
        for i, path in enumerate(images): photograph(*shapes[i % len(shapes)], i).save(path, quality=90)
        what = f"{len(images)} JPEG files of {s.sizes} made on the spot ({sum(p.stat().st_size for p in images)/len(images)/1e3:.0f} kB each), {about}"
    if len(images) < s.batch: raise SystemExit(f"A batch of {s.batch} cannot be drawn from {len(images)} images: take more --images or a smaller --batch.")
    write_tables(folder, ((c,) for c in captions), ["caption"])
    return Records("benchmark", images, TextTable(folder, "caption")), what

class Endless(GlobalBatches):
    "Epoch after epoch, so that the workers never wait for the next."
    def __iter__(self):
        for epoch in itertools.count():
            self.set_epoch(epoch)
            yield from super().__iter__()

def loader_speeds(data, s, repeats):
    "Samples/s of each repeat, once the batches that workers make ahead are used up."
    loader = iter(make_loader(data, Endless(len(data), s.batch), s.workers))
    for _ in range(1 + 6*s.workers): next(loader)
    speeds = []
    for i in range(repeats):
        begin, n = time.perf_counter(), 0
        while (took := time.perf_counter() - begin) < s.seconds: n += len(next(loader)["index"])
        speeds.append(n/took)
        print(f"loader {i + 1}/{repeats}: {speeds[-1]:,.0f} samples/s", file=sys.stderr)
    return speeds

def stage_costs(data, repeats, n=64):
    "Microseconds of one core that a sample takes in each stage, of each repeat: dict of lists. whole: decoding without draft mode."
    out = {k: [] for k in ("whole", "decode", "transform", "text")}
    def timed(name, work, n):
        begin = time.process_time(); made = work()
        out[name].append(1e6*(time.process_time() - begin)/n)
        return made
    for epoch in range(repeats + 1):
        index = np.random.default_rng(epoch).permutation(len(data))[:n].tolist()
        for name, at_least in (("whole", None), ("decode", data.at_least)): pictures = timed(name, lambda: [load_image(data.records.images[i], at_least) for i in index], len(index))
        timed("transform", lambda: [data.transform(p) for p in pictures], len(index))
        timed("text", lambda: [data.texts([(e, i) for i in index]) for e in range(10)], 10*len(index))
    return {k: v[1:] for k, v in out.items()}   # the first warms up

def loading(s, repeats):
    "All numbers of the loader, as plain data."
    tok = get_tokenizer(s.backbone, s.context_length or stretched_length(model_config(s.backbone)["text_cfg"].get("context_length", 77), s.keep))
    with torch.device("meta"): visual = create_model(s.backbone, None, s.context_length, s.keep).visual
    transform, size = image_transform_v2(PreprocessCfg(**visual.preprocess_cfg), is_train=False), np.max(visual.image_size)
    with tempfile.TemporaryDirectory() as folder:
        records, what = loading_records(s, tok, Path(folder))
        data = PairDataset(records, text_store(records.captions, tok), RECIPES[s.recipe], transform, at_least=2*int(size))   # as the trainer's
        costs, speeds = stage_costs(data, repeats), loader_speeds(data, s, repeats)
    operations = count_operations(s.setting(32))["step"]["ours"]/32
    eaten, core = s.utilisation/100*A100/operations, 1e6/sum(statistics.median(costs[k]) for k in ("decode", "transform", "text"))
    return {"setting": dataclasses.asdict(s) | {"what": what, "counted for": make_batch(s.setting(32))[1]}, "repeats": repeats, "device": device_name(), "torch": torch.__version__, "samples/s": speeds,
            "µs a sample": costs, "samples/s by the stages": core*min(max(1, s.workers), os.cpu_count()), "operations a sample": operations, "A100 operations/s, data sheet": A100, "samples/s of an A100, computed": eaten, "A100s fed, computed": statistics.median(speeds)/eaten, "cores an A100 needs, computed": eaten/core}

def told(r):
    "Lines of text."
    s, speeds, cost = r["setting"], r["samples/s"], {k: statistics.median(v) for k, v in r["µs a sample"].items()}
    eaten, fed, speed = r["samples/s of an A100, computed"], r["A100s fed, computed"], statistics.median(speeds)
    yield f"{s['backbone']}; {s['what']}; {r['device']}, {s['workers']} workers, batches of {s['batch']}, medians of {r['repeats']}; files are in memory already, so without the disk"
    yield f"measured, loader alone: {speed:,.0f} samples/s (repeats of {s['seconds']:g} s: {min(speeds):,.0f} to {max(speeds):,.0f})"
    yield f"measured, µs of one core a sample: decoding {cost['decode']:,.0f} (without draft mode {cost['whole']:,.0f}), transform {cost['transform']:,.0f}, text {cost['text']:,.0f}"
    if speed < r["samples/s by the stages"]/2: yield f"  (the stages alone would allow {r['samples/s by the stages']:,.0f} samples/s: other programs take the cores; measure again on a quiet machine)"
    yield f"computed, not measured: a training step takes {r['operations a sample']/1e9:,.0f}·10⁹ operations a sample (counted for {s['counted for']}, forward and backward);"
    yield f"  an A100 does at most {A100/1e12:.0f}·10¹² bf16 operations/s (data sheet), and at an assumed {s['utilisation']:g} % of them trains {eaten:,.0f} samples/s:"
    yield f"  the loader would feed {fed:.2f} A100s of {s['backbone']} training; by the µs above, one A100 needs {r['cores an A100 needs, computed']:.1f} cores."


WAYS = {"none": {}, "grad_checkpointing": {"grad_checkpointing": True}, "micro_batch": {"micro_batch": None}, "both": {"grad_checkpointing": True, "micro_batch": None}, "freeze_image": {"freeze_image": True}}   # of `train.TrainConfig`

def trainer_step(s, model, batch, optimizer, frozen=False, **fields):
    "A function that does the trainer's whole step, optimiser included, and prints its seconds, loss and peak memory as a line of JSON. fields: more of `train.TrainConfig`."
    config = TrainConfig(backbone=s.backbone, context_length=s.context_length, keep=s.keep, recipe=s.recipe, pca_dim=s.pca_dim, batch_size=s.batch, precision=s.precision, **fields)
    towers, criterion = _Towers(model, config.micro_batch, frozen), _criterion(config)
    def step():
        start = time.perf_counter()
        loss = _step(towers, criterion, optimizer, _scaler(DEVICE, s.precision), batch, DEVICE, _half(DEVICE, s.precision))["loss"].item()
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss, "peak": peak_memory()}), flush=True)
    return step

def memory_worker(s, options):
    "One whole training step in a process of its own: a line of JSON."
    fields, frozen = {k: v for k, v in options.items() if k != "freeze_image"}, options.get("freeze_image", False)
    torch.manual_seed(0)
    model = create_model(s.backbone, None, s.context_length, s.keep).to(DEVICE).train()
    if options.get("grad_checkpointing"): model.set_grad_checkpointing()
    batch = sized(make_batch(s)[0], model)
    if frozen:   # its features are made once before the training, so their cost is not in a step
        model.lock_image_tower(freeze_bn_stats=True)
        with torch.no_grad(): batch["image"] = torch.cat([F.normalize(model.encode_image(x.to(DEVICE)), dim=-1).cpu() for x in batch["image"].split(2)])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    freeze_positions(model, optimizer)
    trainer_step(s, model, batch, optimizer, frozen, **fields)()

def memory(s, micro_batch):
    "A training step under each of the trainer's ways to need less memory. Returns a list of dicts: way, peak (bytes, of the process), seconds, loss."
    rows = []
    for name, options in WAYS.items():
        options = {k: micro_batch if v is None else v for k, v in options.items()}
        done = subprocess.run([sys.executable, __file__, "memory-worker", json.dumps(options), json.dumps(dataclasses.asdict(s))], stdout=subprocess.PIPE, text=True)
        if done.returncode: raise SystemExit(f"The process of {name!r} ended with {done.returncode} (-9: not enough memory): see its message above, or take a smaller --batch.")
        rows.append({"way": name} | json.loads(done.stdout.splitlines()[-1]))
        print(f"{name:20} {rows[-1]['peak']/1e9:6.2f} GB, a step {rows[-1]['seconds']:6.1f} s, loss {rows[-1]['loss']:.6f}", flush=True)
    return rows


OPTIONS = {"fused": (True, False), "not fused": (False, False), "fused, image tower compiled": (True, True)}   # AdamW's, torch.compile's

def options_worker(s, name):
    "A way's own process: a whole training step for every line in, a line of JSON out."
    fused, compiled = OPTIONS[name]
    torch.manual_seed(0)
    model = create_model(s.backbone, None, s.context_length, s.keep).to(DEVICE).train()
    if compiled: model.visual.compile()
    step = trainer_step(s, model, sized(make_batch(s)[0], model), torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused))
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin: step()

def options(s, repeats):
    "Seconds of a step with AdamW fused, as in the trainer, or not, and with the image tower compiled: the first, which compiles, and the median of interleaved repeats after it."
    with ExitStack() as open_ones:
        ways = {name: open_ones.enter_context(Process(s, name, "options-worker")) for name in OPTIONS}
        for p in ways.values(): p.answer()
        rows = {name: [p.ask("step")] for name, p in ways.items()}
        for _, (name, p) in itertools.product(range(repeats), ways.items()): rows[name].append(p.ask("step"))
    base = statistics.median(r["seconds"] for r in rows["fused"][1:])
    for name, (first, *others) in rows.items():
        usual = statistics.median(r["seconds"] for r in others)
        print(f"{name:28} first step {first['seconds']:6.1f} s, then {usual:6.2f} s ({base/usual:.2f} times the speed), peak {others[-1]['peak']/1e9:5.2f} GB, loss {first['loss']:.6f}")


def world():
    torch.set_num_threads(1)
    start = time.perf_counter(); render(draw_scenes(4000, seed=0))
    print(f"rendering: {4000/(time.perf_counter() - start):,.0f} scenes/s, once a run")
    records, tok = scene_records("train"), get_tokenizer("scenes-clip", 88)
    start = time.perf_counter(); store = TextStore(records.captions, tok)
    print(f"tokenising every sentence once: {len(records)/(time.perf_counter() - start):,.0f} captions/s")
    for name, recipe in RECIPES.items(): print(f"augmentation and token rows, long and short, {name}: {text_speed(PairDataset(records, store, recipe, None)):,.0f} captions/s (to reach: 20,000)")
    print("recall_at_k at the size of Flickr30k (to reach: under 2 GB):", flush=True)
    subprocess.run([sys.executable, "-m", "debias_clip.retrieval"], check=True)

def add_settings(parser, fields):
    for f in fields: parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, type=int if f.default is None else type(f.default))

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("step", help="a plain training step beside ours", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_settings(one, dataclasses.fields(Setting))
    one.add_argument("--repeats", default=3, type=int, help="of each variant, interleaved; medians are shown")
    one.add_argument("--cache", type=Path, help="folder that keeps each repeat until the end, so that a run that was stopped goes on")
    one.add_argument("--json", action="store_true", help="print all numbers as JSON")
    ways = commands.add_parser("memory", help="a training step under each of the trainer's ways to need less memory", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_settings(ways, dataclasses.fields(Setting)[:-1])
    ways.add_argument("--micro-batch", default=4, type=int, help="samples encoded at a time, in the ways that have it")
    which = commands.add_parser("options", help="a step with AdamW fused or not, and with torch.compile", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_settings(which, dataclasses.fields(Setting)[:-1])
    which.add_argument("--repeats", default=3, type=int, help="of each, interleaved; medians are shown")
    two = commands.add_parser("loader", help="the training loader alone: samples/s, and how many A100s it would feed", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                              epilog=Loading.__doc__)
    add_settings(two, dataclasses.fields(Loading))
    two.add_argument("--repeats", default=3, type=int, help="medians are shown")
    two.add_argument("--json", action="store_true", help="print all numbers as JSON")
    inner = commands.add_parser("memory-worker")
    inner.add_argument("options", type=json.loads); inner.add_argument("setting", type=json.loads)
    for name, choices in (("worker", VARIANTS), ("options-worker", OPTIONS)):
        inner = commands.add_parser(name)
        inner.add_argument("variant", choices=choices); inner.add_argument("setting", type=json.loads)
    given = vars(parser.parse_args())
    command = given.pop("command")
    if command is None: return world()
    if command == "worker": return worker(Setting(**given["setting"]), given["variant"])
    if command == "options-worker": return options_worker(Setting(**given["setting"]), given["variant"])
    if command == "options": return options(Setting(**{k: v for k, v in given.items() if k != "repeats"}), given["repeats"])
    if command == "memory-worker": return memory_worker(Setting(**given["setting"]), given["options"])
    if command == "memory": return memory(Setting(**{k: v for k, v in given.items() if k != "micro_batch"}), given["micro_batch"])
    if command == "loader":
        repeats, as_json = given.pop("repeats"), given.pop("json")
        result = loading(Loading(**given), repeats)
        return print(json.dumps(result) if as_json else "\n".join(told(result)))
    repeats, cache, as_json = (given.pop(k) for k in ("repeats", "cache", "json"))
    result = benchmark(Setting(**given), repeats, cache)
    if as_json: return print(json.dumps(result | {"table": summary(result)}))
    print(", ".join([result["setting"][k] for k in ("backbone", "captions", "precision")]) + f", {result['device']}, {result['threads']} threads, medians of {repeats}; to reach: with ViT-B/16")
    for r in summary(result): print(f"{r['quantity']:32} {r['plain']:8.3f} {r['ours']:8.3f}   ratio {r['ratio']:.2f} {r['to reach']}")
    print(f"losses: {result['loss']['plain']:.6f} and {result['loss']['ours']:.6f}")

if __name__ == "__main__": main()
