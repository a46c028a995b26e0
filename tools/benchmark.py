"""benchmark.py: prints what the offline world must reach on one core, and the memory of recall at Flickr30k's size. Not a test: machines differ."""
import subprocess, sys, time

import torch

from debias_clip.captions import RECIPES
from debias_clip.data import PairDataset, TextStore, text_speed
from debias_clip.scenes import draw_scenes, render, scene_records
from debias_clip.tokens import get_tokenizer

torch.set_num_threads(1)
start = time.perf_counter(); render(draw_scenes(4000, seed=0))
print(f"rendering: {4000/(time.perf_counter() - start):,.0f} scenes/s, once a run")
records, tok = scene_records("train"), get_tokenizer("scenes-clip", 88)
start = time.perf_counter(); store = TextStore(records.captions, tok)
print(f"tokenising every sentence once: {len(records)/(time.perf_counter() - start):,.0f} captions/s")
for name, recipe in RECIPES.items(): print(f"augmentation and token rows, long and short, {name}: {text_speed(PairDataset(records, store, recipe, None)):,.0f} captions/s (to reach: 20,000)")
print("recall_at_k at the size of Flickr30k (to reach: under 2 GB):", flush=True)
subprocess.run([sys.executable, "-m", "debias_clip.retrieval"], check=True)
