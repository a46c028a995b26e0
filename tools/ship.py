"""Packs the pre-trained models of runs/pretraining into the package: `debias-clip run pretraining`, then this."""
import json
from pathlib import Path

from debias_clip.arms import arms_of
from debias_clip.authors import ANNOTATORS, AUTHORS, scene_records
from debias_clip.checkpoints import read_safetensors
from debias_clip.config import model_key
from debias_clip.core import file_hash, write_atomically
from debias_clip.preset import read_preset
from debias_clip.shipped import FOLDER, TABLE, Shipped, pack, shipped
from debias_clip.tokens import get_tokenizer
from debias_clip.train import WEIGHTS

FILLER = "This is a photo."


def world_texts():
    "All that anybody writes in the offline world."
    yield FILLER
    for author in AUTHORS:
        yield from (text for caption in scene_records("web", text="web", author=author).captions for text in caption)
        for split in ("train", "val"):
            yield from (text for caption in scene_records(split, author=author).captions for text in caption)
    for several in scene_records("val").short:
        assert len(several) == len(ANNOTATORS)
        yield from several


def tokens_in_use(backbone):
    "The ids of these texts in the backbone's tokeniser, with its marks and the pad."
    tok = get_tokenizer(backbone)
    return {tok.eot, tok.pad, *({tok.sot} - {None})}.union(*map(tok.encode, set(world_texts())))


def main():
    root = Path(__file__).parent.parent
    job = next(job for job in read_preset("pretraining", root).jobs if job.name == "pretraining")
    models, rows, in_use = root/job.out/"models", [], {}
    for arm in arms_of(job.parameters):
        if arm.config is not None: continue
        config = arm.start.init
        row = Shipped(config.backbone, f"web-{arm.seed}", model_key(config, arm.options), "")
        if there := shipped(key=row.key):   # packed anew it would be the same tensors in other bytes
            rows.append(there[0]._asdict())
            continue
        if not (models/row.key/WEIGHTS).exists():
            print(row.file.name, "left out: it is not trained", row.key)
            continue
        if config.backbone not in in_use: in_use[config.backbone] = tokens_in_use(config.backbone)
        state, metadata = read_safetensors(models/row.key/WEIGHTS)[:2]
        pack(state, in_use[config.backbone], row.file, metadata)
        rows.append(row._replace(sha256=file_hash(row.file))._asdict())
        print(row.file.name, f"{row.file.stat().st_size/1e6:.1f} MB", row.key)
    write_atomically(FOLDER/TABLE, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__": main()
