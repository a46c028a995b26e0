"""What several test files share."""
import json

import open_clip
import pytest

TINY = dict(embed_dim=64, quick_gelu=True, vision_cfg=dict(image_size=32, layers=2, width=128, patch_size=8),
            text_cfg=dict(context_length=77, vocab_size=1000, width=128, heads=2, layers=2))


@pytest.fixture(scope='session')
def parity_backbone(tmp_path_factory):
    "Name of the golden values' architecture; registered once, since open_clip keeps it and a second name would make its shapes ambiguous."
    file = tmp_path_factory.mktemp('config')/'parity-tiny.json'
    file.write_text(json.dumps(TINY))
    open_clip.add_model_config(file)
    return file.stem
