"""Small files that several tests write: pictures, tables, JSON."""
import csv
import json

import numpy as np
from PIL import Image

def rgb(height=6, width=9):
    "A picture of noise, always the same."
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pictures(folder, *names):
    "Writes pictures of noise under a folder, which it returns."
    for name in names:
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        rgb().save(folder/name)
    return folder


def write_csv(path, *rows):
    with open(path, "w", encoding="utf-8", newline="") as f: csv.writer(f).writerows(rows)
    return path


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sharegpt4v_record(i, image=None, caption=None):
    "One record of ShareGPT4V's file, in its layout."
    source = ["sam/images/sa_", "coco/train2017/", "llava/llava_pretrain/images/0/"][i % 3]
    said = caption or f"The image shows item {i}. It is  grey.\n\nNothing else, 2.5 m wide."
    return {"id": str(i), "image": image or f"{source}{i}.jpg", "conversations": [
        {"from": "human", "value": "What do you see?\n<image>"}, {"from": "gpt", "value": said}]}


def write_sharegpt4v(root, n=1007, fill=None):
    "n records and their pictures, empty files or what `fill` writes. Returns the root."
    records = [sharegpt4v_record(i) for i in range(n)]
    write_json(root/"share-captioner_coco_lcs_sam_1246k_1107.json", records)
    for record in records:
        file = root/"data"/record["image"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch() if fill is None else fill(file)
    return root
